"""Contract of every runner: a document gets the same answers in whatever steps it is read.

To test another runner, add a function that makes one to `RUNNERS`.
"""

import functools

import numpy as np
import pytest
from fake_runner import FakeRunner
from fixtures_engine import random_ids, small_runner
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import MODELS
from slow import ci, examples, slow

from griffin_eval.states.saved_state import SavedState, origin_of, shapes_of

SMALL = MODELS["attention first"]
RUNNERS = {
    "fake": FakeRunner,
    "fake, padded": lambda: FakeRunner(padded=True),
    "torch": lambda: small_runner("torch", SMALL),
    "jax": lambda: small_runner("jax", SMALL),
}
FEW = {"torch": 4, "jax": 2}  # examples of a property; any other runner gets 25
ROWS, CAPACITY = 4, 64
each_runner = pytest.mark.parametrize("kind", ["fake", "fake, padded", "torch", "jax"])
each_in_ci = pytest.mark.parametrize("kind", ["fake", "fake, padded", "torch", ci("jax")])

open_runner = functools.cache(lambda kind: RUNNERS[kind]())


def for_examples(kind, *strategies):
    """Run the decorated function with examples, as many as this runner gets."""
    return lambda function: settings(max_examples=examples(FEW.get(kind, 25)))(
        given(*strategies)(function)
    )()


def array(*values):
    return np.array(values, np.int64)


def read(runner, pool, parts, ablations=None):
    """Read ids in one step, ``parts`` being (ids, source, target). Return the logits after every
    token of each part, and the pool."""
    lengths = array(*(len(ids) for ids, *_ in parts))
    tokens = np.concatenate([ids for ids, *_ in parts]).astype(np.int32)
    sources, targets = (array(*(part[at] for part in parts)) for at in (1, 2))
    hidden, pool = runner.read(pool, tokens, lengths, sources, targets, ablations)
    logits = runner.logits(hidden, np.arange(len(tokens)))
    return np.split(logits, np.cumsum(lengths)[:-1]), pool


@functools.cache
def alone(kind, ids):
    """Return the logits [N, V] after every token of a document that is read whole, by itself."""
    runner = open_runner(kind)
    ((logits,), _) = read(runner, runner.open_pool(ROWS, CAPACITY), [(ids, -1, -1)])
    return logits


def check_same(kind, found, expected):
    """Compare logits of a runner: exactly those of the fake, up to rounding those of another."""
    exact = kind.startswith("fake")
    np.testing.assert_allclose(found, expected, rtol=0, atol=0 if exact else 5e-5)


@st.composite
def plans(draw):
    """Draw steps that read parts (length, source, target) of up to three documents."""
    written, plan = set(), []
    for _ in range(draw(st.integers(1, 4))):
        parts, taken = [], set()
        for _ in range(draw(st.integers(1, 3))):
            source = draw(st.sampled_from([-1, *sorted(written - taken)]))
            target = draw(st.sampled_from([-1, *sorted({*range(ROWS)} - taken)]))
            parts.append((draw(st.integers(1, 12)), source, target))
            taken |= {target} - {-1}
        written |= taken
        plan.append(parts)
    return plan


def texts_of(plan):
    """Yield the parts of each step with their ids, and the whole documents up to their ends. Then
    yield the document of every row that was written."""
    held, number = {-1: ()}, 0
    for step in plan:
        parts, documents = [], []
        for length, source, target in step:
            number += 1
            parts.append((random_ids(length, number), source, target))
            documents.append((*held[source], *parts[-1][0]))
        held |= {part[2]: one for part, one in zip(parts, documents, strict=True) if part[2] >= 0}
        yield parts, documents
    del held[-1]
    yield held


@each_runner
def test_a_document_gets_the_same_logits_in_any_steps(kind):
    """Rows that are no targets stay, and discarded states change none."""
    runner = open_runner(kind)

    @for_examples(kind, plans())
    def check(plan):
        pool = runner.open_pool(ROWS, CAPACITY)
        *steps, held = texts_of(plan)
        for parts, documents in steps:
            logits, pool = read(runner, pool, parts)
            for found, document in zip(logits, documents, strict=True):
                check_same(kind, found, alone(kind, document)[-len(found) :])
        for row, document in held.items():
            ((found,), pool) = read(runner, pool, [([5, 6], row, -1)])
            check_same(kind, found, alone(kind, (*document, 5, 6))[-2:])


@each_in_ci
def test_decoding_continues_documents_as_reading_does(kind):
    """Rows may be inserted at any time, from a pool or as a new document, and pause."""
    runner, batch = open_runner(kind), 4
    stems = [tuple(random_ids(length, 9)) for length in (1, 7, 20)]
    parts = [(stem, -1, row) for row, stem in enumerate(stems)]
    _, pool = read(runner, runner.open_pool(ROWS, CAPACITY), parts)

    @for_examples(kind, st.lists(st.tuples(st.integers(0, 15), st.integers(-1, 2)), max_size=5))
    def check(plan):
        state = runner.start_decoding(batch, CAPACITY)
        documents = [()] * batch
        sources = array(2, -1, 0)
        state = runner.insert_rows(state, array(0, 1, 3), pool, sources)
        documents[0], documents[3] = stems[2], stems[0]
        for step, (mask, source) in enumerate([*plan, (15, -1)]):
            row = step % batch
            state = runner.insert_rows(state, array(row), pool, array(source))
            documents[row] = stems[source] if source >= 0 else ()
            active = array(*(mask >> row & 1 for row in range(batch)))
            tokens = array(*random_ids(batch, step))
            hidden, state = runner.decode_step(state, tokens, active)
            logits, greedy = (
                method(hidden, np.arange(batch)) for method in (runner.logits, runner.greedy)
            )
            for row in np.flatnonzero(active):
                documents[row] = (*documents[row], int(tokens[row]))
                check_same(kind, logits[row], alone(kind, documents[row])[-1])
                assert greedy[row] == logits[row].argmax()


@each_in_ci
def test_a_larger_pool_begins_with_the_rows_of_the_smaller(kind):
    runner, stem = open_runner(kind), random_ids(9, 1)
    _, pool = read(runner, runner.open_pool(2, CAPACITY), [(stem, -1, 0), ([3], -1, 1)])
    pool = runner.grow_pool(pool, ROWS, CAPACITY)
    _, pool = read(runner, pool, [([8], 0, 3), ([7], -1, 2)])
    ends = [(*stem, 1), (3, 1), (7, 1), (*stem, 8, 1)]
    logits, _ = read(runner, pool, [([1], row, -1) for row in range(ROWS)])
    for found, document in zip(logits, ends, strict=True):
        check_same(kind, found[0], alone(kind, document)[-1])


@each_in_ci
def test_scores_are_those_of_the_logits(kind):
    runner, rng = open_runner(kind), np.random.default_rng(0)
    pool = runner.open_pool(ROWS, CAPACITY)
    lengths, none = array(30, 20), array(-1, -1)
    hidden, _ = runner.read(pool, rng.integers(61, size=50), lengths, none, none)
    positions = np.flatnonzero(rng.random(50) < 0.5)
    targets, position_of = rng.integers(61, size=40), rng.integers(len(positions), size=40)
    logits = runner.logits(hidden, positions).astype(np.float64)
    np.testing.assert_array_equal(runner.greedy(hidden, positions), logits.argmax(1))
    targets[:9] = logits.argmax(1)[position_of[:9]]  # some of the most likely ones

    expected = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    entropies = -(np.exp(expected) * expected).sum(1)[position_of]
    expected = expected[position_of]
    logprobs = np.take_along_axis(expected, targets[:, None], 1)[:, 0]
    ranks = 1 + (expected > logprobs[:, None]).sum(1)
    near = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5)

    asked = hidden, positions, targets, position_of, "float32"
    found, greedy = runner.score(*asked)
    near(found, logprobs)
    np.testing.assert_array_equal(greedy, expected.argmax(1) == targets)
    assert found.dtype == np.float64 and greedy[:9].all() and not greedy.all()
    found, greedy, rank, entropy = runner.score(*asked, details=True)
    near(found, logprobs)
    near(entropy, entropies)
    np.testing.assert_array_equal(greedy, expected.argmax(1) == targets)
    np.testing.assert_array_equal(rank, ranks)
    for top in (1, 5):
        found, tokens, likeliest = runner.score(*asked, top=top)
        near(found, logprobs)
        near(likeliest, -np.sort(-expected, 1)[:, :top])
        near(likeliest, np.take_along_axis(expected, tokens, 1))
    # Values of up to 25 nats, of which bfloat16 has eight bits.
    wide, narrow = (runner.score(*asked[:4], dtype)[0] for dtype in ("float64", "bfloat16"))
    assert np.abs(wide - logprobs).max() < 1e-12 < np.abs(wide - found).max()
    assert 1e-3 < np.abs(narrow - wide).max() < 2**-7 * np.abs(wide).max()


@each_in_ci
def test_a_state_that_is_not_finite_has_no_most_likely_token(kind):
    runner = open_runner(kind)
    _, pool = read(runner, runner.open_pool(ROWS, CAPACITY), [([3, 4, 5, 6], -1, 0)])
    tensors = runner.state_tensors(pool, 0, 4)
    for value in (np.nan, np.inf, -np.inf):
        lost = {name: np.full_like(one, value) for name, one in tensors.items()}
        pool = runner.write_state(pool, 1, lost, 4, CAPACITY)
        hidden, pool = runner.read(pool, array(1, 1), array(1, 1), array(0, 1), array(-1, -1))
        greedy = runner.greedy(hidden, array(0, 1))
        assert greedy[0] >= 0 and greedy[1] == -1
        found, _ = runner.score(hidden, array(0, 1), array(2, 2), array(0, 1), "float32")
        assert np.isfinite(found[0]) and np.isnan(found[1])


@each_runner
def test_sizes_are_padded_to_larger_ones(kind):
    runner = open_runner(kind)
    for pad in (runner.padded_tokens, runner.padded_batch, lambda n: runner.padded_tokens(n, 64)):
        sizes = [pad(count) for count in range(1, 300)]
        assert sizes == sorted(sizes) and sizes[0] == 1
        assert all(size >= count for count, size in enumerate(sizes, 1))
        assert [pad(size) for size in sizes] == sizes


@pytest.mark.parametrize(
    ("writer", "reader"),
    [("fake", "fake, padded"), ("torch", "torch"), ci("torch", "jax"), slow("jax", "torch")],
)
def test_a_state_moves_to_another_runner_as_tensors(writer, reader):
    first, second = open_runner(writer), RUNNERS[reader]()

    @for_examples(writer, st.integers(1, 20))
    def check(count):
        ids = random_ids(count, 2)
        _, pool = read(first, first.open_pool(ROWS, CAPACITY), [(ids, -1, 2)])
        tensors = first.state_tensors(pool, 2, count)
        shapes = shapes_of(first.config, count)
        assert {name: one.shape for name, one in tensors.items()} == shapes
        assert {one.dtype.name for one in tensors.values()} == {"float32"}
        _, pool = read(second, second.open_pool(ROWS, CAPACITY), [([9], -1, 0), ([8], -1, 1)])
        pool = second.write_state(pool, 1, tensors, count, CAPACITY)
        logits, pool = read(second, pool, [([4, 5, 6], 1, -1), ([2], 0, -1)])
        check_same(writer, logits[0], alone(writer, (*ids, 4, 5, 6))[-3:])
        check_same(writer, logits[1], alone(writer, (9, 2))[-1:])


@pytest.mark.parametrize("kind", ["fake", "torch", slow("jax")])
def test_every_document_starts_from_a_saved_state(kind):
    """Capacities count the tokens of a document only."""
    make = functools.partial(small_runner.__wrapped__, kind, SMALL)
    runner, text = FakeRunner() if kind == "fake" else make(), random_ids(20, 2)
    whole = read(runner, runner.open_pool(ROWS, CAPACITY), [([*text, 4, 5, 6], -1, -1)])[0][0]
    _, pool = read(runner, runner.open_pool(ROWS, CAPACITY), [(text, -1, 0)])
    tensors, told = runner.state_tensors(pool, 0, len(text)), {"bos": False, "text": ""}
    origin = origin_of(
        runner.config, "", None, runner.dtype, array(*text, 4), framework=kind, **told
    )
    runner.start_from(SavedState(origin, tensors))
    ((found,), pool) = read(runner, runner.open_pool(ROWS, 3), [([4, 5, 6], -1, 1)])
    check_same(kind, found, whole[-3:])
    state = runner.insert_rows(runner.start_decoding(1, 3), array(0), pool, array(-1))
    for token, expected in zip((4, 5, 6), whole[-3:], strict=True):
        hidden, state = runner.decode_step(state, array(token), array(1))
        check_same(kind, runner.logits(hidden, array(0))[0], expected)


@each_in_ci
def test_an_ablation_loses_the_memory_that_it_names(kind):
    """Answers after it do not depend on this memory, but on the other, as those without it do."""
    runner = open_runner(kind)
    _, pool = read(runner, runner.open_pool(ROWS, CAPACITY), [(random_ids(12, 1), -1, 0)])
    tensors = runner.state_tensors(pool, 0, 12)
    kinds = {1: ("h", "conv"), 2: ("k", "v")}

    def answers(changed, flag):
        """Continue the document with some tensors changed; the next row loses nothing."""
        nonlocal pool
        mine = {
            name: 2 * one + 1 if name.split(".")[-1] in changed else one
            for name, one in tensors.items()
        }
        pool = runner.write_state(pool, 1, mine, 12, CAPACITY)
        parts = [([4, 5], 1, -1), ([4, 5], 0, -1)]
        (found, plain), pool = read(runner, pool, parts, array(flag, 0))
        check_same(kind, plain, alone(kind, (*random_ids(12, 1), 4, 5))[-2:])
        return found

    expected = {flag: answers((), flag) for flag in range(4)}
    check_same(kind, expected[0], alone(kind, (*random_ids(12, 1), 4, 5))[-2:])
    for flag, one in expected.items():
        assert all(np.abs(one - expected[other]).max() > 1e-2 for other in range(flag))
        for memory, names in kinds.items():
            found = answers(names, flag)
            if flag & memory:
                check_same(kind, found, one)
            else:
                assert np.abs(found - one).max() > 1e-2
