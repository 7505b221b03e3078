"""Selective copying: its sequences, models whose score is known, and both frameworks beside hf."""

import numpy as np
import pytest

pytest.importorskip("lm_eval")

from hypothesis import given
from hypothesis import strategies as st
from symbol_models import Rule, evaluate, guessing, points, write_symbol_checkpoint
from transformers import AutoTokenizer

from griffin_eval.errors import ArgumentError
from griffin_eval.tasks.symbols import selective_copying, sequences
from griffin_eval.text.load import load_tokenizer

TASK = "griffin_selective_copying"


def rows(**metadata):
    return list(selective_copying.dataset(**metadata)["test"])


def solve(context: str) -> str:
    """Return the next data symbol from the text alone, in either variant."""
    sequence, marker, said = context.partition("#")
    data = sequence.replace(".", "")
    return data[len(said)]


# The sequences


@given(
    seed=st.integers(0, 2**32),
    symbols_=st.integers(1, 16),
    noise=st.integers(0, 60),
    variant=st.sampled_from(sequences.VARIANTS),
)
def test_a_sequence_is_as_documented(seed, symbols_, noise, variant):
    length = symbols_ + noise
    rng = sequences.generator("test", seed, length, 0)
    tokens, answers = sequences.selective_copying(rng, length, symbols_, variant)
    assert tokens.shape == (length + symbols_,) and answers.shape == (symbols_,)
    sequence, rest = tokens[:length], tokens[length:]
    assert set(answers) <= set(sequences.DATA)
    assert (sequence[sequence != sequences.NOISE] == answers).all()
    assert (sequence == sequences.NOISE).sum() == noise
    expected = [sequences.MARKER] * symbols_
    if variant == "autoregressive":
        expected = [sequences.MARKER, *answers[:-1]]
    assert rest.tolist() == list(expected)


def test_places_and_symbols_are_drawn_evenly():
    draws = [
        sequences.selective_copying(sequences.generator("even", 0, 20, i), 20, 5)
        for i in range(2000)
    ]
    places = sum((tokens[:20] != sequences.NOISE).astype(int) for tokens, _ in draws)
    data = np.bincount(np.concatenate([answers for _, answers in draws]), minlength=16)[1:15]
    # 99.99% of such samples are below 50 and 45, at 19 and 13 degrees of freedom; places vary less
    # than independent draws would.
    assert ((places - 500) ** 2 / 500).sum() < 50
    assert ((data - 10000 / 14) ** 2 / (10000 / 14)).sum() < 45


def test_the_same_everywhere():
    """The hash of default documents, whatever the process, platform or version of numpy."""
    expected = "b7e329edc87b90c82dc31816bb96acec6d83c0d39ea76888bf02fb02765afb97"
    assert rows(samples=3)[0]["dataset_sha256"] == expected


def test_lengths_take_turns_and_more_of_them_leave_the_others_as_they_are():
    many = rows(lengths=[20, 30, 40], samples=3)
    assert [row["length"] for row in many] == [20, 30, 40] * 3
    few = rows(lengths=30, samples=2)
    assert [row["tokens"] for row in few] == [r["tokens"] for r in many if r["length"] == 30][:2]
    other = rows(lengths=30, samples=2, seed=1)
    assert not {row["tokens"] for row in other} & {row["tokens"] for row in few}


def test_metadata_that_cannot_be():
    for metadata, message in (
        (
            {"variant": "marker"},
            "markers or autoregressive, found 'marker' .did you mean 'markers'",
        ),
        ({"lengths": 15}, "lengths must be integers of at least 16, found 15"),
        ({"lengths": []}, r"found \[\]"),
        ({"lengths": "1024"}, "found '1024'"),
        ({"lengths": [64, 4.5]}, r"found \[64, 4.5\]"),
        ({"symbols": 0, "samples": "a"}, "samples .* found 'a'; symbols .* at least 1, found 0"),
        ({"symbols": None}, "symbols .* found None"),
        ({"seed": -1}, "seed must be an integer of at least 0, found -1"),
        ({"samples": True}, "samples .* found True"),
    ):
        with pytest.raises(ArgumentError, match=message):
            selective_copying.dataset(**metadata)


def test_a_checkpoint_with_another_tokenizer_is_refused(checkpoint):
    with pytest.raises(ArgumentError, match=r"16 symbols .ABC.* is another tokenizer"):
        selective_copying.dataset(pretrained=str(checkpoint))


# The tokenizer


@pytest.fixture(scope="module")
def symbol_checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("symbols")
    write_symbol_checkpoint(folder)
    return folder


def test_one_token_a_character(symbol_checkpoint):
    ids = np.random.default_rng(0).integers(16, size=500)
    text = sequences.text(ids)
    ours, theirs = (
        load_tokenizer(symbol_checkpoint),
        AutoTokenizer.from_pretrained(symbol_checkpoint),
    )
    assert ours.encode(text) == theirs.encode(text) == ids.tolist()
    assert ours.encode("A b\nB") == theirs.encode("A b\nB") == [1, 2]
    assert ours.vocab_size == len(theirs) == 16
    assert ours.decode(ids, skip_special_tokens=False) == text
    assert ours.bos_token_id is theirs.bos_token_id is None and not ours.adds_bos
    assert ours.eos_token_id == theirs.pad_token_id == sequences.MARKER


# Models whose score is known


@pytest.mark.parametrize("variant", sequences.VARIANTS)
def test_a_model_that_solves_it(variant):
    results = evaluate(Rule(solve), TASK, {"lengths": [20, 33], "samples": 4, "variant": variant})
    found = points(results, TASK)
    for length in (20, 33):
        for metric in ("token_accuracy", "sequence_accuracy"):
            assert found[f"{metric}@{length}"] == found[f"{metric}@{length}_high"] == 1
            assert 0 < found[f"{metric}@{length}_low"] < 1
    assert found["token_accuracy@20_low"] == found["sequence_accuracy@20_low"]  # 4 clusters
    assert results["higher_is_better"][TASK]["token_accuracy@20"]
    chance = results["configs"][TASK]["metadata"]["chance"]
    assert chance == {"token_accuracy": 1 / 14, "sequence_accuracy": (1 / 14) ** 16}
    hashes = {sample["doc"]["dataset_sha256"] for sample in results["samples"][TASK]}
    assert len(hashes) == 1


def test_the_interval_of_guessing_holds_chance():
    results = evaluate(guessing(sequences.ALPHABET[1:15]), TASK, {"lengths": 32, "samples": 200})
    found = points(results, TASK)
    chance = results["configs"][TASK]["metadata"]["chance"]["token_accuracy"]
    assert found["token_accuracy@32_low"] < chance < found["token_accuracy@32_high"]
    # 3200 tokens, so about 1.96 √(p (1 - p) / 3200) = 0.009 to either side
    assert 0.012 < found["token_accuracy@32_high"] - found["token_accuracy@32_low"] < 0.024
    assert found["sequence_accuracy@32"] == 0 < found["sequence_accuracy@32_high"] < 0.05


def test_one_wrong_symbol_makes_a_sequence_wrong():
    def all_but_the_last(context):
        answer = solve(context)
        return answer if context.count("#") < 16 else "."

    found = points(evaluate(Rule(all_but_the_last), TASK, {"lengths": 20, "samples": 5}), TASK)
    assert found["token_accuracy@20"] == 15 / 16
    assert found["sequence_accuracy@20"] == 0


# A checkpoint, in both frameworks and in transformers
