"""`griffin-eval map`: what state patching must give, whatever a model has learned."""

import json

import numpy as np
import pytest
from fact_pairs import PAIRS, by_the_equations
from fixtures_engine import small_runner
from hypothesis import given
from hypothesis import strategies as st
from parity import BASE, MODELS
from slow import fast, slow
from typer.testing import CliRunner

from experiments.causal_map.causal_map import (
    Component,
    components,
    distances_of,
    measure,
    permuted,
)
from experiments.causal_map.map_pairs import (
    SYMBOLS,
    copying_pairs,
    induction_pairs,
    own_pair,
    passkey_pairs,
)
from griffin_eval.cli.main import app
from griffin_eval.errors import ArgumentError, BadInput

FRAMEWORKS = ("torch", "jax")
EVERYTHING = Component("everything", tuple(range(9)), ("RG-LRU", "conv", "attention"))
DISTANCES = [0, 1, 16, None]


@pytest.mark.parametrize("framework", fast(["torch"], FRAMEWORKS))
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


@pytest.mark.slow
def test_frameworks_draw_the_same_map():
    one, other = (
        measure(small_runner(framework), PAIRS, components(BASE), DISTANCES)
        for framework in FRAMEWORKS
    )
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("framework", fast(["torch"], FRAMEWORKS))
def test_documents_that_agree_have_a_map_of_zeros(framework):
    same = [pair._replace(changed=pair.original) for pair in PAIRS[:2]]
    effects = measure(small_runner(framework), same, components(BASE), [1, None])
    assert np.abs(effects.sufficient).max() < 1e-6 and np.abs(effects.necessary).max() < 1e-6


@pytest.mark.slow
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
    assert moved and all(int(name.split(".")[1]) in part.layers for name in moved)
    # Single parts share no tensor and hold all of them; so do the kinds, and the halves.
    for some in (
        [each for each in components(config) if not each.label.startswith("all")],
        [each for each in components(config) if each.label.startswith("all")],
        [each for each in components(config, groups=True) if each.label.startswith("all")],
        [each for each in components(config, groups=True) if not each.label.startswith("all")],
    ):
        shares = [{name for name, value in each.patch(to, of).items() if value[0]} for each in some]
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


@given(st.integers(0, 2**31), st.integers(16, 200))
def test_copies_differ_in_the_symbol_that_the_last_marker_asks_for(seed, length):
    pairs, symbols = copying_pairs(count=20, length=length, seed=seed)
    assert symbols == [*range(SYMBOLS), *range(4)]
    for pair, symbol in zip(pairs, symbols, strict=True):
        (place,) = np.flatnonzero(pair.original != pair.changed)
        data = np.flatnonzero(pair.original[:length])
        assert data[symbol] == place == pair.fact_end - 1 and len(data) == SYMBOLS
        assert pair.original[place] == pair.original_answer[0] != pair.changed_answer[0]
        assert pair.changed[place] == pair.changed_answer[0] in range(1, 15)
        assert (pair.original[length:] == 15).all() and len(pair.original) == length + symbol + 1
        assert pair.cut(None) == length


def test_columns_of_symbols_hold_the_pairs_that_ask_for_them():
    pairs, symbols = copying_pairs(count=3, length=20, seed=0)
    effects = measure(small_runner("torch"), pairs, components(BASE), [None])
    apart = effects.apart(symbols, 5)
    for pair, symbol in enumerate(symbols):
        for mine, theirs in zip(apart[2:], effects[2:], strict=True):
            np.testing.assert_array_equal(mine[pair, :, symbol], theirs[pair, :, 0])
            assert np.isnan(np.delete(mine[pair], symbol, 1)).all()


@pytest.mark.slow
def test_answers_of_other_pairs_are_not_moved():
    """A model that answers right: what it says of other answers has nothing to do with the fact."""
    from griffin_eval.checkpoints import folder
    from griffin_eval.runners.load import load_runner

    runner = load_runner(folder("induction_heads_hawk"), framework="torch")
    pairs, part = induction_pairs(count=8, length=24, seed=0), [components(runner.config)[-1]]
    effects = measure(runner, pairs, part, [1])
    assert effects.answered.sum() >= 6
    share = effects.share(effects.sufficient, 0, 0)
    assert share.value == pytest.approx(1, abs=0.1) and share.low > 0
    other = measure(runner, permuted(pairs), part, [1])
    control = effects.share(other.sufficient, 0, 0)
    assert control.low < 0 < control.high and abs(control.value) < 0.3
    with pytest.raises(ArgumentError, match="two pairs"):
        permuted(pairs[:1])


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


@pytest.mark.slow
def test_own_text_and_figure(shipped, tmp_path):
    (tmp_path / "note.txt").write_text("The keys are red.\nThe door is open.\n")
    own = ["--text", tmp_path / "note.txt", "--fact", "red", "--instead", "tan"]
    own += ["--question", "The keys are"]
    griffin = shipped("bytes_griffin")
    maps = json.loads(run(griffin, griffin, *own, "--groups", "--json", "-o", tmp_path / "figures"))
    assert maps[0] == maps[1] and len(maps) == 2
    facts = maps[0]
    assert facts["pairs"] == 1 and facts["distances"] == [0, 1, 4, 16, None]
    assert [row["component"] for row in facts["components"]] == [
        *("lower recurrent", "lower attention", "upper recurrent", "upper attention"),
        *("all recurrent", "all attention"),
    ]
    for layer in facts["left_by_gates"]:
        each = [one["50%"] for one in layer["left"]]
        assert each[0] == 1 and sorted(each, reverse=True) == each
    assert {file.name for file in (tmp_path / "figures").iterdir()} == {"map.png", "map.svg"}
    assert "sufficient" in run(shipped("bytes_griffin"), *own)


@pytest.mark.slow
def test_a_map_of_copying_has_a_column_for_each_symbol(tmp_path):
    from symbol_models import write_symbol_checkpoint

    write_symbol_checkpoint(tmp_path / "model")
    options = ["--task", "selective_copying", "--length", "24", "--pairs", "17", "--control"]
    said = run(tmp_path / "model", *options, "--json", "-o", tmp_path / "figures")
    (facts,) = json.loads(said)
    assert facts["symbols"] == [*range(1, SYMBOLS + 1)] and facts["distances"] is None
    for row in facts["components"]:
        assert len(row["sufficient"]) == len(row["necessary"]) == SYMBOLS
    assert {"cells", "without_0", "largest"} == set(facts["control"])
    assert "before the first marker" in run(tmp_path / "model", *options)


@pytest.mark.parametrize(
    ("model", "kind", "framework"),
    [
        slow("griffin", "recurrent", "jax"),
        slow("hawk", "recurrent", "torch"),
        slow("mqa", "attention", "torch"),
        slow("griffin", "recurrent", "torch"),
        slow("hawk", "recurrent", "jax"),
        slow("mqa", "attention", "jax"),
    ],
)
def test_who_carries_the_fact_in_the_shipped_models(shipped, model, kind, framework):
    options = ["--task", "induction_heads", "--pairs", "4", "--groups", "--json"]
    (facts,) = json.loads(
        run(shipped(f"induction_heads_{model}"), *options, "--framework", framework)
    )
    assert facts["answered"] >= 3
    for row in facts["components"]:
        share = row["sufficient"][-1]["value"]
        if row["component"].startswith("all"):
            assert share == pytest.approx(1 if row["component"] == f"all {kind}" else 0, abs=0.2)


@pytest.mark.slow
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
        ("bytes_griffin", ["--pairs", "1", "--control"], "expected two or more"),
        (
            "induction_heads_hawk",
            ["--task", "selective_copying", "--length", "9"],
            "16 data symbols",
        ),
    ],
)
def test_what_cannot_be_mapped_is_refused_in_a_sentence(shipped, model, arguments, said):
    with pytest.raises(ArgumentError, match=said):
        run(shipped(model), *arguments)
