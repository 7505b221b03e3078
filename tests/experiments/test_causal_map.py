"""`experiments.causal_map`: properties of a map, whatever a model has learned, and the command."""

import json
from dataclasses import replace

import numpy as np
import pytest
import typer
from fixtures_engine import reference_scores, small_runner
from hypothesis import given
from hypothesis import strategies as st
from parity import BASE, MODELS
from typer.testing import CliRunner

from experiments.causal_map.__main__ import causal_map
from experiments.causal_map.pairs import (
    SYMBOLS,
    Pair,
    induction_heads,
    own_pair,
    selective_copying,
)
from experiments.causal_map.patching import (
    Component,
    components,
    measure,
)
from experiments.causal_map.withheld import bins, lost_keys, lost_writes
from griffin_eval.checkpoints import folder
from griffin_eval.errors import ArgumentError, BadInput
from griffin_eval.text.load import load_tokenizer

LAYERS, KINDS = tuple(range(BASE.num_layers)), ("RG-LRU", "conv", "attention")
EVERYTHING, NOTHING = Component("everything", LAYERS, KINDS), Component("nothing", (), KINDS)
DISTANCES = [0, 1, 16, None]


def pair_of(seed: int, length: int = 30, fact: int = 5, answer: int = 2) -> Pair:
    rng = np.random.default_rng(seed)
    original = rng.integers(BASE.vocab_size, size=length).astype(np.int32)
    changed = original.copy()
    changed[fact] = (changed[fact] + 1 + seed % 5) % BASE.vocab_size
    one, other = rng.integers(BASE.vocab_size, size=(2, answer)).astype(np.int32)
    return Pair(original, changed, fact + 1, one, other)


def by_the_equations(pair: Pair, document: np.ndarray) -> float:
    """Return log p(changed answer) - log p(original answer) after a document, in float64."""
    one, other = (
        reference_scores((*document.tolist(), *answer.tolist()))[0][-len(answer) :].sum()
        for answer in (pair.original_answer, pair.changed_answer)
    )
    return other - one


PAIRS = [pair_of(0), pair_of(1, length=41, fact=20), pair_of(2, answer=1, length=12)]
# A fact of several tokens, one at the beginning of its document, and one before its last token.
LONG_FACT = pair_of(3)._replace(changed=np.where(np.arange(30) // 3 == 2, 7, pair_of(3).original))
EDGES = [
    *PAIRS,
    LONG_FACT._replace(fact_end=9),
    pair_of(4, fact=0, answer=1),
    pair_of(5, length=20, fact=18),
]


# Patching


def test_everything_is_the_other_document_and_a_part_is_not():
    effects = measure(small_runner("torch"), PAIRS, [EVERYTHING, *components(BASE)], DISTANCES)
    for index, pair in enumerate(PAIRS):
        wanted = [by_the_equations(pair, document) for document in pair[:2]]
        measured = [effects.original[index], effects.changed[index]]
        np.testing.assert_allclose(measured, wanted, rtol=0, atol=2e-5)
        between = wanted[1] - wanted[0]
        for effect in (effects.sufficient[index], effects.necessary[index]):
            missing = [pair.cut(distance) is None for distance in DISTANCES]
            assert (np.isnan(effect) == missing).all()
            everything, *others = effect
            whole = everything[~np.isnan(everything)]
            np.testing.assert_allclose(whole, between, rtol=0, atol=5e-5)
            assert any(abs(one[0] - between) > 1e-4 for one in others)


def test_documents_that_agree_have_a_map_of_zeros():
    same = [pair._replace(changed=pair.original) for pair in PAIRS[:2]]
    effects = measure(small_runner("torch"), same, components(BASE), [1, None])
    assert np.abs(effects.sufficient).max() < 1e-6 and np.abs(effects.necessary).max() < 1e-6


def test_results_that_are_not_finite_are_named(monkeypatch):
    runner = small_runner("torch")
    monkeypatch.setattr(runner, "score", lambda *a: (np.full(len(a[2]), np.nan), None))
    with pytest.raises(BadInput, match="not finite"):
        measure(runner, PAIRS[:1], components(BASE), [None])


@given(st.sampled_from(list(MODELS)))
def test_components_share_no_tensor_and_hold_all(name):
    config = MODELS[name]
    names = [
        f"layers.{layer}.{leaf}"
        for layer, kind in enumerate(config.block_types)
        for leaf in (("h", "conv") if kind == "recurrent" else ("k", "v"))
    ]
    of, to = ({name: np.array([value]) for name in names} for value in (1, 0))
    for groups in (False, True):
        for together in (False, True):  # "all recurrent" and "all attention", or the other parts
            moved = []
            for part in components(config, groups=groups):
                if part.label.startswith("all ") == together:
                    patched = part.patch(to, of)
                    moved += [name for name, value in patched.items() if value[0]]
            assert sorted(moved) == sorted(names)


# Facts that are not written, and keys that are not seen


def test_everything_withheld_is_everything_lost_and_nothing_is_nothing():
    runner = small_runner("torch")
    between = measure(runner, EDGES, [], [None]).between
    lost = lost_writes(runner, EDGES, [EVERYTHING, NOTHING, *components(BASE)], between)
    np.testing.assert_allclose(lost[:, 0], between, rtol=0, atol=5e-5)
    np.testing.assert_allclose(lost[:, 1], 0, rtol=0, atol=5e-5)
    # Every layer matters to some pair, and none is all of it.
    for part in lost[:, 2:].T:
        assert np.abs(part).max() > 1e-4 and np.abs(part - between).max() > 1e-4


def test_keys_beyond_an_age_are_a_smaller_window():
    narrow = replace(BASE, visible_keys=4)
    between, smaller = (
        measure(small_runner("torch", config), EDGES, [], [None]).between
        for config in (BASE, narrow)
    )
    part = Component("all attention", LAYERS, ("attention",))
    ages = [(4, BASE.visible_keys), (BASE.visible_keys, 99)]
    lost = lost_keys(small_runner("torch", BASE), EDGES, [part], ages, between)
    np.testing.assert_allclose(between - lost[:, 0, 0], smaller, rtol=0, atol=5e-5)
    assert np.abs(between - smaller).max() > 1e-3
    np.testing.assert_allclose(lost[:, 0, 1], 0, rtol=0, atol=5e-5)


@given(st.integers(2, 3000), st.one_of(st.none(), st.integers(2, 3000)))
def test_bins_hold_every_age_once(length, visible):
    ages = bins([pair_of(0, length=length, fact=0)], visible)
    held = [age for low, high in ages for age in range(low, high)]
    assert held == list(range(1, min(length + 1, visible or length + 1)))


# Pairs


@given(st.integers(0, 2**31), st.integers(16, 200))
def test_sequences_differ_in_the_symbol_that_is_asked_for(seed, length):
    copies, symbols = selective_copying(20, length, seed)[1:]
    heads = induction_heads(3, length, seed).pairs
    for pair in [*heads, *copies]:
        (place,) = np.flatnonzero(pair.original != pair.changed)
        assert place == pair.fact_end - 1
        assert pair.original[place] == pair.original_answer[0] != pair.changed_answer[0]
        assert pair.changed[place] == pair.changed_answer[0] < 15
    for pair in heads:
        assert (pair.original == 15).sum() == (pair.changed == 15).sum() == 2
        assert pair.original[pair.fact_end - 2] == pair.original[-1] == 15
    assert symbols == [*range(SYMBOLS), *range(4)]
    for pair, symbol in zip(copies, symbols, strict=True):
        data = np.flatnonzero(pair.original[:length])
        assert data[symbol] == pair.fact_end - 1 and len(data) == SYMBOLS
        assert (pair.original[length:] == 15).all() and len(pair.original) == length + symbol + 1
        assert pair.cut(None) == length and pair.changed_answer[0] > 0


def test_facts_that_cannot_be_compared_are_refused():
    tokenizer = load_tokenizer(folder("bytes_griffin"))
    for text, fact, instead, message in (
        ("It is red.", "blue", "cyan", "'blue' stands 0 times"),
        ("red, red", "red", "tan", "'red' stands 2 times"),
        ("It is red.", "red", "blue", "have .* and .* tokens, not equally many"),
        ("It is red.", "red", "red", "must differ from --fact"),
    ):
        with pytest.raises(ArgumentError, match=message):
            own_pair(tokenizer, False, text, fact, instead, "It is")


# The command


def run(model, *arguments):
    app = typer.Typer()
    app.command()(causal_map)
    words = [str(folder(model)), *map(str, arguments)]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "140"})
    if done.exception:
        raise done.exception
    return done.stdout


@pytest.mark.slow
def test_own_text_and_figure(tmp_path):
    (tmp_path / "note.txt").write_text("Herbert Manning: 8841551200\nGraham Baker: 6774675169\n\n")
    own = ["--text", tmp_path / "note.txt", "--fact", "8841551200", "--instead", "2093456789"]
    own += ["--question", "Herbert Manning:", "--groups"]
    (facts,) = json.loads(run("bytes_griffin", *own, "--json", "-o", tmp_path / "figures"))
    assert facts["pairs"] == facts["accuracy"] == 1 and facts["distances"] == [0, 1, 4, 16, None]
    assert [row["component"] for row in facts["components"]] == [
        *("lower recurrent", "lower attention", "upper recurrent", "upper attention"),
        *("all recurrent", "all attention"),
    ]
    for layer in facts["left_by_gates"]:
        medians = [share["50%"] for share in layer["left"]]
        assert medians[0] == 1 and sorted(medians, reverse=True) == medians
    assert {file.name for file in (tmp_path / "figures").iterdir()} == {"map.png", "map.svg"}
    printed = run("bytes_griffin", *own)
    assert "right after 100% of the unchanged documents" in printed and "sufficient" in printed


@pytest.mark.slow
@pytest.mark.parametrize(("model", "kind"), [("griffin", "recurrent"), ("mqa", "attention")])
def test_who_carries_the_fact_in_the_shipped_models(model, kind):
    options = ["--task", "induction_heads", "--length", 64, "--pairs", 4, "--groups", "--json"]
    (facts,) = json.loads(run(f"induction_heads_{model}", *options))
    assert facts["answered"] >= 3
    for row in facts["components"]:
        if row["component"].startswith("all"):
            share = row["sufficient"][-1]["value"]
            assert share == pytest.approx(1 if row["component"] == f"all {kind}" else 0, abs=0.2)


def test_a_model_that_does_not_answer_is_not_mapped():
    with pytest.raises(ArgumentError, match="does not answer phonebook of 20 entries: .* 50%"):
        run("bytes_griffin", "--pairs", 2)


def test_what_cannot_be_mapped_is_refused_in_a_sentence(tmp_path):
    copying = ["--task", "selective_copying", "--length", 9]
    for model, arguments, message in (
        ("bytes_griffin", ["--task", "induction_heads"], "models of the paper's 16 symbols"),
        ("induction_heads_hawk", [], "use --task induction_heads"),
        ("induction_heads_hawk", copying, "16 data symbols"),
        ("bytes_griffin", ["--text", tmp_path, "--fact", "red"], "needs --fact, --instead and"),
        ("bytes_griffin", ["--pairs", "1", "--control"], "expected two or more"),
    ):
        with pytest.raises(ArgumentError, match=message):
            run(model, *arguments)
