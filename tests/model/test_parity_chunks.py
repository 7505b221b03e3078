"""The contract of `step`: however tokens are cut into chunks and rows, the result is the same."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import MODELS, compare, tokens, weights
from parity_reference import reference_logits
from parity_twins import TWINS, leaves, twin
from slow import examples, slow

ROWS = 3
CAPACITY = 40  # tokens of a document, for global attention; also the longest row here
# Chunks shorter than the convolution, than the window (8), and longer than both.
CHUNKS = (1, 3, 12)
SPLIT = {
    name: MODELS[name]
    for name in ("recurrent last", "one visible key", "mqa", "wide convolution", "paper griffin")
    + ("every field changed", "attention first", "complex gates")
}
CONTRACT = settings(max_examples=examples(5))
each_twin = pytest.mark.parametrize("ours", TWINS)


IN_TORCH = ("recurrent last", "mqa", "complex gates")


def twins_and_models(models, in_jax=("attention first",), in_torch=IN_TORCH):
    """Return each twin with each model; JAX compiles every step, so fewer in `make test`."""
    chosen = [("torch", model) for model in in_torch] + [("jax", model) for model in in_jax]
    pairs = list(itertools.product(TWINS, models))
    assert set(chosen) <= set(pairs)
    return pytest.mark.parametrize(
        ("ours", "model"), [pair if pair in chosen else slow(*pair) for pair in pairs]
    )


each_model = twins_and_models(SPLIT)
few_models = twins_and_models([*IN_TORCH, "attention first"])


@st.composite
def splits(draw):
    """Draw a few chunks: the width of each, and the tokens that every row reads of it (or none)."""
    sizes = draw(st.lists(st.sampled_from(CHUNKS), min_size=1, max_size=3))
    return [
        (size, draw(st.lists(st.integers(0, size), min_size=ROWS, max_size=ROWS))) for size in sizes
    ] + [(1, [1] * ROWS)] * draw(st.integers(0, 3))


def padded_size(model, size):
    """Return the width of a chunk: JAX compiles each, so its chunks of 3 tokens are padded."""
    return max(CHUNKS) if model.name == "jax" and size == 3 else size


def no_resets(ours):
    """Return resets where nothing starts: in JAX an array, so that tests share programs."""
    return None if ours == "torch" else np.zeros((ROWS, CAPACITY), bool)


def read_at_once(subject, ids, lengths):
    """Read the beginnings of rows of CAPACITY tokens, with one program in JAX."""
    state = subject.init_state(ROWS, CAPACITY)
    return subject.step(ids, lengths, state, no_resets(subject.name))


def read(model, documents, split, resets=None, seed=0):
    """Read ``documents`` [ROWS, CAPACITY] in chunks, garbage in the padding.

    Returns:
        Hidden vectors of each row's tokens, the state, and how many tokens each row read.
    """
    rng = np.random.default_rng(seed)
    state = model.init_state(ROWS, CAPACITY)
    hidden, done = [[] for _ in range(ROWS)], np.zeros(ROWS, int)
    for size, lengths in split:
        size = padded_size(model, size)
        chunk = rng.integers(model.config.vocab_size, size=(ROWS, size), dtype=np.int32)
        starts = rng.random((ROWS, size)) < 0.5
        for row, n in enumerate(lengths):
            chunk[row, :n] = documents[row, done[row] : done[row] + n]
            if resets is not None:
                starts[row, :n] = resets[row, done[row] : done[row] + n]
        before = [leaf.copy() for leaf in leaves(state)]
        y, after = model.step(chunk, lengths, state, None if resets is None else starts)
        idle = np.array(lengths) == 0
        for old, kept, new in zip(before, leaves(state), leaves(after), strict=True):
            np.testing.assert_array_equal(kept, old)  # the state given is not changed
            np.testing.assert_array_equal(new[idle], old[idle])  # nor rows that read nothing
        for row, n in enumerate(lengths):
            hidden[row].append(y[row, :n])
        done += lengths
        state = after
    return [np.concatenate(h) for h in hidden], state, done


@each_model
@CONTRACT
@given(split=splits())
def test_any_split_equals_the_whole(ours, model, split, record_parity):
    subject = twin(ours, SPLIT[model])
    documents = tokens(subject.config, ROWS, CAPACITY)
    hidden, state, done = read(subject, documents, split, no_resets(ours))
    whole, whole_state, _ = read(subject, documents, [(CAPACITY, done)], no_resets(ours))
    compare(record_parity, f"{ours} chunks - whole", "hidden", hidden, whole)
    compare(record_parity, f"{ours} chunks - whole", "state", leaves(state), leaves(whole_state))


@each_model
@CONTRACT
@given(
    split=splits(),
    starts=st.sets(st.tuples(st.integers(0, ROWS - 1), st.integers(0, CAPACITY - 1)), max_size=8),
)
def test_packed_documents_equal_documents_alone(ours, model, split, starts, record_parity):
    subject = twin(ours, SPLIT[model])
    documents = tokens(subject.config, ROWS, CAPACITY)
    resets = np.zeros((ROWS, CAPACITY), bool)
    for start in starts:
        resets[start] = True
    hidden, state, done = read(subject, documents, split, resets)

    # Every document in a row of its own, and the rows in which the last ones are.
    alone, last = [], []
    for row, n in enumerate(done):
        borders = np.flatnonzero(resets[row, :n])
        alone += np.split(documents[row, :n], borders[borders > 0])
        last.append(len(alone) - 1)
    ids = np.zeros((ROWS + 8, CAPACITY), np.int32)
    for row, document in enumerate(alone):
        ids[row, : len(document)] = document
    lengths = [len(document) for document in alone] + [0] * (len(ids) - len(alone))
    y, y_state = subject.step(ids, lengths, subject.init_state(len(ids), CAPACITY))

    pair = f"{ours} packed - alone"
    found = np.concatenate(hidden)
    expected = np.concatenate([y[row, :n] for row, n in enumerate(lengths)])
    compare(record_parity, pair, "hidden", found, expected)
    compare(record_parity, pair, "state", live(state), live(subject.gather(y_state, last)))


# Tiles of one query, of a length that divides nothing, and longer than any chunk.
TILES = dict(zip(SPLIT, (5, 1, 5, 16, 5, 5, 5, 5), strict=True))


@each_model
@CONTRACT
@given(split=splits())
def test_packed_rows_equal_padded_rows(ours, model, split, record_parity):
    tile = TILES[model]
    subject = twin(ours, SPLIT[model])
    documents = tokens(subject.config, ROWS, CAPACITY)
    hidden, state, done = [[] for _ in range(ROWS)], subject.init_state(ROWS, CAPACITY), [0] * ROWS
    for size, lengths in split:
        parts = [documents[row, done[row] : done[row] + n] for row, n in enumerate(lengths)]
        width = ROWS * size + (size == 3)  # full, or not
        packed = np.ones(width if ours == "torch" else ROWS * max(CHUNKS), np.int32)
        packed[: sum(lengths)] = np.concatenate(parts)
        before = [leaf.copy() for leaf in leaves(state)]
        y, after = subject.step_packed(packed, lengths, state, tile)
        for old, kept, new in zip(before, leaves(state), leaves(after), strict=True):
            np.testing.assert_array_equal(kept, old)  # the state given is not changed
            idle = np.array(lengths) == 0
            np.testing.assert_array_equal(new[idle], old[idle])  # nor rows that read nothing
        for row, part in enumerate(np.split(y[0, : sum(lengths)], np.cumsum(lengths)[:-1])):
            hidden[row].append(part)
            done[row] += lengths[row]
        state = after
    expected, expected_state, _ = read(subject, documents, [(CAPACITY, done)], no_resets(ours))
    pair = f"{ours} packed - padded"
    compare(record_parity, pair, "hidden", [np.concatenate(h) for h in hidden], expected)
    compare(record_parity, pair, "state", live(state), live(expected_state))


def live(state):
    """Return the leaves of a state, zero where they are older than the document."""
    pos, *rest = leaves(state)
    out = [pos]
    for leaf in rest:
        if leaf.ndim == 3:
            age = np.arange(leaf.shape[1], 0, -1)  # how many tokens ago the entry was made
            leaf = np.where((age <= pos[:, None])[:, :, None], leaf, 0)
        out.append(leaf)
    return out


# Windows of 8 keys are filled, exactly or not, and wrap; some rows begin, end or pause at any time.
PAST, ENTERS, COUNT = np.array([0, 7, 17]), np.array([0, 3, 8]), np.array([23, 16, 23])


@each_model
def test_decoding_equals_reading_at_once(ours, model, record_parity):
    subject = twin(ours, SPLIT[model])
    ids = tokens(subject.config, ROWS, CAPACITY)
    whole, _ = read_at_once(subject, ids, [CAPACITY] * ROWS)
    _, known = read_at_once(subject, ids, PAST)
    state = subject.start_decoding(ROWS, CAPACITY)
    found = [[] for _ in range(ROWS)]
    for now in range(99):
        if len(new := np.flatnonzero(ENTERS == now)):
            state = subject.insert(state, new, known, new)
        read = np.array([len(rows) for rows in found])
        active = (ENTERS <= now) & (read < COUNT) & ((now + np.arange(ROWS)) % 5 > 0)
        # Other rows are given a token, too, which they do not read.
        at = np.where(active, PAST + read, now % CAPACITY)
        hidden, state = subject.decode_step(state, ids[range(ROWS), at], active.astype(np.int64))
        for row in np.flatnonzero(active):
            found[row].append(hidden[row])
    assert [len(rows) for rows in found] == COUNT.tolist() and (PAST + COUNT <= CAPACITY).all()
    expected = [whole[row, PAST[row] : PAST[row] + COUNT[row]] for row in range(ROWS)]
    compare(record_parity, f"{ours} single - whole", "hidden", map(np.array, found), expected)


@few_models
def test_an_inserted_row_sees_nothing_of_the_one_before(ours, model, record_parity):
    subject = twin(ours, SPLIT[model])
    ids = tokens(subject.config, ROWS, CAPACITY)
    whole, _ = read_at_once(subject, ids, [CAPACITY] * ROWS)
    _, known = read_at_once(subject, ids, [17] * ROWS)
    state = subject.start_decoding(ROWS, CAPACITY)
    state = state._replace(rows=subject.with_values(state.rows, np.nan))
    state = subject.insert(state, np.arange(ROWS), known, np.arange(ROWS))
    found = []
    for at in (17, 18, 19):
        hidden, state = subject.decode_step(state, ids[:, at], np.ones(ROWS, np.int64))
        found.append(hidden)
    expected = whole[:, 17:20]
    compare(record_parity, f"{ours} single - whole", "hidden", np.stack(found, 1), expected)


@few_models
def test_rows_are_taken_out_as_they_were_put_in(ours, model, record_parity):
    """Also after some steps, in which another row paused; then other steps may continue them."""
    subject = twin(ours, SPLIT[model])
    ids = tokens(subject.config, ROWS, CAPACITY)
    _, known = read_at_once(subject, ids, PAST)
    every = np.arange(ROWS)
    state = subject.insert(subject.start_decoding(ROWS, CAPACITY), every, known, every)
    same = subject.extract(state, [2, 0, 1])
    for one, other in zip(leaves(same), leaves(subject.gather(known, [2, 0, 1])), strict=True):
        np.testing.assert_array_equal(one, other)
    steps = 10
    for step in range(steps):
        active = np.array([1, 0, 1])
        hidden, state = subject.decode_step(state, ids[every, PAST + step * active], active)
    _, expected = read_at_once(subject, ids, PAST + [steps, 0, steps])
    taken = subject.extract(state, every)
    compare(record_parity, f"{ours} chunks - whole", "state", live(taken), live(expected))
    hidden, _ = subject.step(ids[every, PAST + [steps, 0, steps]][:, None], [1] * ROWS, taken)
    state = subject.insert(subject.start_decoding(ROWS, CAPACITY), every[::-1], taken, every)
    at = (PAST + [steps, 0, steps])[::-1]
    again, _ = subject.decode_step(state, ids[every[::-1], at], np.ones(ROWS, np.int64))
    compare(record_parity, f"{ours} single - whole", "hidden", again[::-1], hidden[:, 0])


@twins_and_models(["recurrent last", "mqa"], in_jax=["mqa"], in_torch=["recurrent last", "mqa"])
def test_a_decoded_row_that_outgrows_global_attention_is_nan(ours, model):
    subject = twin(ours, SPLIT[model])
    ids, state = tokens(subject.config, 2, 6), subject.start_decoding(2, 4)
    finite = []
    for at in range(6):
        hidden, state = subject.decode_step(state, ids[:, at], np.ones(2, np.int64))
        finite.append(bool(np.isfinite(hidden).all()))
    outgrown = "global_attention" in subject.config.block_types
    assert finite == [True] * 4 + [not outgrown] * 2


@pytest.mark.slow
@pytest.mark.parametrize("model", ["recurrent last", "paper griffin"])
@each_twin
def test_a_long_document_does_not_drift(ours, model, record_parity):
    subject = twin(ours, SPLIT[model])
    ids = tokens(subject.config, 2, 3000)
    whole, expected = subject.step(ids, [3000, 3000], subject.init_state(2))
    hidden, state = [], subject.init_state(2)
    for chunk in np.split(ids, 3000 // 60, axis=1):
        y, state = subject.step(chunk, [60, 60], state)
        hidden.append(y)
    pair = f"{ours} chunks - whole"
    compare(record_parity, pair, "hidden", np.concatenate(hidden, 1), whole)
    compare(record_parity, pair, "state", leaves(state), leaves(expected))
    equations = reference_logits(subject.config, weights(subject.config), ids[0])[None]
    found = subject.logits(ids[:1])
    compare(record_parity, f"{ours} - equations", "logits", found, equations)


OUTGROWN = 6
GLOBAL = MODELS["global attention among others"]


@pytest.mark.parametrize("ours", ["torch", slow("jax")])
def test_a_document_as_long_as_the_capacity_fits(ours, record_parity):
    subject = twin(ours, GLOBAL)
    ids = tokens(GLOBAL, 2, 2 * OUTGROWN)
    resets = np.zeros_like(ids, bool)
    resets[:, OUTGROWN] = True
    documents = ids.reshape(-1, OUTGROWN)
    expected = np.stack([reference_logits(GLOBAL, weights(GLOBAL), d) for d in documents])
    found = subject.logits(ids, resets=resets, capacity=OUTGROWN).reshape(expected.shape)
    compare(record_parity, f"{ours} - equations", "logits, packed", found, expected)


@pytest.mark.parametrize(
    ("ours", "chunk"),
    [*itertools.product(["torch"], (1, 2, 5, 10)), slow("jax", 1), slow("jax", 2), slow("jax", 5)]
    + [slow("jax", 10)],
)
def test_a_document_longer_than_the_capacity_is_nan_and_never_wrong(ours, chunk):
    subject = twin(ours, GLOBAL)
    ids = tokens(GLOBAL, 2, 10)
    expected, _ = subject.step(ids, [10, 10], subject.init_state(2, 10))
    state = subject.init_state(2, OUTGROWN)
    hidden = []
    for start in range(0, 10, chunk):
        lengths = [chunk, min(chunk, max(0, 4 - start))]  # the second row stays short
        y, state = subject.step(ids[:, start : start + chunk], lengths, state)
        hidden.append(y)
    found = np.concatenate(hidden, 1)
    assert np.isnan(found[0, OUTGROWN:]).all()
    whole_chunks = OUTGROWN // chunk * chunk
    assert np.isfinite(found[0, :whole_chunks]).all()
    right = ~np.isnan(found)
    right[1, 4:] = False  # padding
    assert right[1, :4].all()
    np.testing.assert_allclose(found[right], expected[right], rtol=0, atol=1e-4)


@each_twin
def test_global_attention_asks_for_a_capacity(ours):
    with pytest.raises(ValueError, match="global attention.*capacity"):
        twin(ours, GLOBAL).init_state(1)
