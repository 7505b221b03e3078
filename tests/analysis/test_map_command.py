"""`griffin-eval map`: what state patching must give, whatever a model has learned."""

import json

import numpy as np
import pytest
from fixtures_engine import reference_scores, small_runner
from hypothesis import given
from hypothesis import strategies as st
from parity import BASE, MODELS
from typer.testing import CliRunner

from griffin_eval.analysis.causal_map import Component, Pair, components, distances_of, measure
from griffin_eval.analysis.map_pairs import induction_pairs, own_pair, passkey_pairs
from griffin_eval.cli.main import app
from griffin_eval.errors import ArgumentError, BadInput

FRAMEWORKS = ("torch", "jax")
EVERYTHING = Component(None, ("RG-LRU", "conv", "attention"))
DISTANCES = [0, 1, 16, None]


def pair_of(seed: int, length: int = 30, fact: int = 5, answer: int = 2) -> Pair:
    rng = np.random.default_rng(seed)
    original = rng.integers(BASE.vocab_size, size=length).astype(np.int32)
    changed = original.copy()
    changed[fact] = (changed[fact] + 1 + seed % 5) % BASE.vocab_size
    one, other = rng.integers(BASE.vocab_size, size=(2, answer)).astype(np.int32)
    return Pair(original, changed, fact + 1, one, other)


PAIRS = [pair_of(0), pair_of(1, length=41, fact=20), pair_of(2, answer=1, length=12)]


def by_the_equations(pair: Pair, document: np.ndarray) -> float:
    """log p(changed answer) - log p(original answer) after a document, in float64."""
    one, other = (
        reference_scores((*document.tolist(), *answer.tolist()))[0][-len(answer) :].sum()
        for answer in (pair.original_answer, pair.changed_answer)
    )
    return other - one


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_everything_is_the_other_document_and_a_part_is_not(framework):
    parts = [EVERYTHING, *components(BASE)]
    effects = measure(small_runner(framework), PAIRS, parts, DISTANCES)
    for index, pair in enumerate(PAIRS):
        wanted = [by_the_equations(pair, document) for document in pair[:2]]
        found = [effects.original[index], effects.changed[index]]
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)
        for effect in (effects.sufficient, effects.necessary):
            missing = np.isnan(effect[index])
            expected = [pair.cut(distance) is None for distance in DISTANCES]
            assert (missing == expected).all()
            everything, *others = effect[index]
            np.testing.assert_allclose(
                everything[~missing[0]], wanted[1] - wanted[0], rtol=0, atol=5e-5
            )
            assert any(abs(one[0] - (wanted[1] - wanted[0])) > 1e-4 for one in others)


def test_frameworks_draw_the_same_map():
    one, other = (
        measure(small_runner(framework), PAIRS, components(BASE), DISTANCES)
        for framework in FRAMEWORKS
    )
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_documents_that_agree_have_a_map_of_zeros(framework):
    same = [pair._replace(changed=pair.original) for pair in PAIRS[:2]]
    effects = measure(small_runner(framework), same, components(BASE), [1, None])
    assert np.abs(effects.sufficient).max() < 1e-6 and np.abs(effects.necessary).max() < 1e-6


def test_few_rows_at_a_time_give_the_same(monkeypatch):
    runner = small_runner("torch")
    whole = measure(runner, PAIRS, components(BASE), DISTANCES)
    monkeypatch.setattr(runner, "free_memory", lambda: 0)
    monkeypatch.setattr(runner, "step_tokens", 3)
    parts = measure(runner, PAIRS, components(BASE), DISTANCES)
    for mine, theirs in zip(whole, parts, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-4)


def test_results_that_are_not_finite_are_named(monkeypatch):
    runner = small_runner("torch")
    monkeypatch.setattr(runner, "score", lambda *a: (np.full(len(a[2]), np.nan), None))
    with pytest.raises(BadInput, match="not finite"):
        measure(runner, PAIRS[:1], components(BASE), [None])


@given(st.sampled_from(list(MODELS)), st.booleans(), st.data())
def test_a_part_takes_its_tensors_and_no_other(name, groups, data):
    config = MODELS[name]
    leaves = {"recurrent": ("h", "conv")}
    names = [
        f"layers.{layer}.{leaf}"
        for layer, kind in enumerate(config.block_types)
        for leaf in leaves.get(kind, ("k", "v"))
    ]
    of, to = ({name: np.array([value]) for name in names} for value in (1, 0))
    part = data.draw(st.sampled_from(components(config, groups=groups)))
    patched = part.patch(to, of)
    moved = {name for name, value in patched.items() if value[0]}
    single = {f"layers.{part.layer}."} if part.layer is not None else {"layers."}
    assert moved and all(name.startswith(tuple(single)) for name in moved)
    # Single parts share no tensor and hold all of them; so do the groups.
    shares = [
        {name for name, value in each.patch(to, of).items() if value[0]}
        for each in components(config, groups=True)
    ]
    assert sorted(name for share in shares for name in share) == sorted(names)


@given(st.integers(0, 2**31), st.integers(12, 300))
def test_sequences_differ_in_the_symbol_that_is_asked_for(seed, length):
    for pair in induction_pairs(count=3, length=length, seed=seed):
        (place,) = np.flatnonzero(pair.original != pair.changed)
        assert pair.fact_end == place + 1 and pair.original[place - 1] == 15
        assert pair.original[place] == pair.original_answer[0] != pair.changed_answer[0]
        assert pair.changed[place] == pair.changed_answer[0]
        assert (pair.original == 15).sum() == (pair.changed == 15).sum() == 2
        assert pair.original[-1] == 15 and pair.fact_end < length


def test_distances_end_where_the_longest_pair_does():
    assert distances_of(PAIRS[:1]) == [0, 1, 4, 16, None]
    assert [PAIRS[0].cut(distance) for distance in (0, 16, 64, None)] == [6, 22, None, 29]


# The command


def run(*arguments, code=0):
    done = CliRunner().invoke(app, ["map", *map(str, arguments)], env={"COLUMNS": "140"})
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done.stdout


@pytest.fixture
def shipped():
    from griffin_eval.checkpoints import folder

    return folder


def test_own_text_and_figure(shipped, tmp_path):
    (tmp_path / "note.txt").write_text("The keys are red.\nThe door is open.\n")
    own = ["--text", tmp_path / "note.txt", "--fact", "red", "--instead", "tan"]
    own += ["--question", "The keys are"]
    facts = json.loads(
        run(shipped("bytes_griffin"), *own, "--groups", "--json", "-o", tmp_path / "figures")
    )
    assert facts["pairs"] == 1 and facts["distances"] == [0, 1, 4, 16, None]
    assert [row["component"] for row in facts["components"]] == ["all recurrent", "all attention"]
    assert {file.name for file in (tmp_path / "figures").iterdir()} == {"map.png", "map.svg"}
    assert "sufficient" in run(shipped("bytes_griffin"), *own)


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("model", "kind"), [("griffin", "recurrent"), ("hawk", "recurrent"), ("mqa", "attention")]
)
def test_who_carries_the_fact_in_the_shipped_models(shipped, model, kind, framework):
    options = ["--task", "induction_heads", "--pairs", "4", "--groups", "--json"]
    facts = json.loads(run(shipped(f"induction_heads_{model}"), *options, "--framework", framework))
    assert facts["answered"] >= 3
    for row in facts["components"]:
        share = row["sufficient"][-1]["value"]
        assert share == pytest.approx(1 if row["component"] == f"all {kind}" else 0, abs=0.2)


def test_a_passkey_stands_near_the_beginning(shipped):
    from griffin_eval.text.load import load_tokenizer

    folder = shipped("bytes_griffin")
    pairs = passkey_pairs(load_tokenizer(folder), False, count=2, length=600, seed=0, folder=folder)
    for pair in pairs:
        assert len(pair.original) == len(pair.changed) > 550
        assert pair.fact_end < len(pair.original) / 2
        assert len(pair.original_answer) == len(pair.changed_answer)


@pytest.mark.parametrize(
    ("text", "fact", "instead", "question", "said"),
    [
        ("It is red.", "blue", "cyan", "It is", "'blue' stands 0 times"),
        ("red, red", "red", "tan", "It is", "'red' stands 2 times"),
        ("It is red.", "red", "blue", "It is", "have .* and .* tokens, not equally many"),
        ("It is red.", "red", "red", "It is", "must differ from --fact"),
    ],
)
def test_facts_that_cannot_be_compared_are_refused(shipped, text, fact, instead, question, said):
    from griffin_eval.text.load import load_tokenizer

    tokenizer = load_tokenizer(shipped("bytes_griffin"))
    with pytest.raises(ArgumentError, match=said):
        own_pair(tokenizer, False, text, fact, instead, question)


@pytest.mark.parametrize(
    ("model", "arguments", "said"),
    [
        ("bytes_griffin", ["--task", "phonebok"], "did you mean 'phonebook'|phonebook"),
        ("bytes_griffin", ["--task", "induction_heads"], "models of the paper's 16 symbols"),
        ("induction_heads_hawk", [], "take[s]? --task induction_heads"),
        ("bytes_griffin", ["--fact", "red"], "add --text, --instead, --question"),
        ("bytes_griffin", ["--text", "a", "--pairs", "3", "--seed", "0"], "out --pairs, --seed"),
    ],
)
def test_what_cannot_be_mapped_is_refused_in_a_sentence(shipped, model, arguments, said):
    with pytest.raises(ArgumentError, match=said):
        run(shipped(model), *arguments)
