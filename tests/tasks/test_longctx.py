"""Loss by position and by context: cuts of documents, and whole runs of lm_eval."""

import json
from pydoc_data.topics import topics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece_models import train_sentencepiece
from slow import examples
from symbol_models import evaluate

from griffin_eval.errors import ArgumentError
from griffin_eval.lm.model import GriffinLM
from griffin_eval.tasks.long_text import documents, longctx
from griffin_eval.text.load import load_tokenizer

PYTHON = "\n\n".join(topics[name] for name in sorted(topics))
UNUSUAL = "naïve 東京 🙂🙂  \n\n\n\tdef x(1234):\r\n   \u3000y\u00a0z <bos>a" * 3
MILLION = 1_000_000


@pytest.fixture(scope="module", params=["bpe", "sentencepiece"])
def tokenizer(request, checkpoint, tmp_path_factory):
    if request.param == "bpe":
        return load_tokenizer(checkpoint)
    folder = tmp_path_factory.mktemp("gemma")
    train_sentencepiece(folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write three texts of a few thousand tokens each, and a short one."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "deeper").mkdir()
    for index in range(3):
        text = PYTHON[index * 12_000 : (index + 1) * 12_000]
        (folder / "deeper" / f"{index}.txt").write_text(text, encoding="utf-8")
    (folder / "short.md").write_text("It is short.", encoding="utf-8")
    (folder / ".hidden").write_text("not read", encoding="utf-8")
    return folder


# Where documents are cut


@settings(max_examples=examples(40))
@given(text=st.text(max_size=60) | st.sampled_from([UNUSUAL, PYTHON[:500], "", " ", "\n\n"]))
def test_every_token_has_its_span(tokenizer, text):
    ids, spans = tokenizer.encode(text), tokenizer.spans(text)
    assert spans.shape == (len(ids), 2) and spans.dtype == np.int64
    assert (spans[:, 0] <= spans[:, 1]).all() and (spans >= 0).all() and (spans <= len(text)).all()
    found = documents.tokenised(tokenizer, text)
    assert found.tokens == len(ids)
    assert found.token_starts[0] == 0 and (np.diff(found.token_starts) >= 0).all()
    if ids:
        assert found.part(0, found.tokens) == text


@pytest.mark.parametrize("text", [PYTHON[:6000], UNUSUAL * 8], ids=["python", "unusual"])
def test_parts_have_the_tokens_that_they_have_in_the_whole(tokenizer, text):
    ids, found = tokenizer.encode(text), documents.tokenised(tokenizer, text)
    cuts = {found.word_end(token) for token in range(0, found.tokens, 37)}
    assert len(cuts) > 5
    for cut in cuts:
        at = int(found.token_starts[cut])
        assert tokenizer.encode(text[:at]) == ids[:cut]
        assert tokenizer.encode(text[at:]) == ids[cut:]
        assert at in (0, len(text)) or not text[at - 1].isspace()
    for token in range(0, found.tokens, 41):
        back = found.clean_start(token)
        assert token - 4 < back <= token  # a character has four bytes at most
        assert tokenizer.encode(text[int(found.token_starts[back]) :]) == ids[back:]


def test_cuts_are_at_the_end_of_words_and_near(tokenizer):
    found = documents.tokenised(tokenizer, PYTHON[:20_000])
    distances = []
    for token in range(1, found.tokens - 100, 13):
        cut = found.word_end(token)
        at = found.token_starts[cut]
        assert found.text[at].isspace() and not found.text[at - 1].isspace()
        distances.append(cut - token)
    assert min(distances) == 0 and max(distances) < documents.SLACK and np.mean(distances) < 5
    assert found.word_end(found.tokens) == found.tokens
    without_words = documents.tokenised(tokenizer, "東京都" * 200)
    assert 0 <= without_words.word_end(100) - 100 <= 4


# Rows


def rows(function, **arguments):
    return list(function(**arguments)["test"])


def test_positions_are_all_of_every_document(checkpoint, folder):
    tokenizer = load_tokenizer(checkpoint)
    found = rows(longctx.positions, document=str(folder), pretrained=str(checkpoint), first=64)
    assert {row["name"] for row in found} == {f"deeper/{i}.txt" for i in range(3)} | {"short.md"}
    for row in found:
        text = (folder / row["name"]).read_text()
        assert row["text"] == text
        edges = [*row["start"], row["end"][-1]]
        assert edges[0] == 0 and edges[-1] == len(text) and edges[1:] == row["end"]
        assert row["context"] == [0] * len(row["label"])
        assert row["label"] == [str(64 << n) for n in range(len(row["label"]))]
        ends = np.cumsum(row["tokens"])
        assert ends[-1] == len(tokenizer.encode(text))
        for label, end in zip(row["label"][:-1], ends[:-1], strict=True):
            assert 0 <= end - int(label) <= documents.SLACK
        assert len({row["dataset_sha256"] for row in found}) == 1


def test_contexts_end_in_the_same_target(checkpoint, folder):
    tokenizer = load_tokenizer(checkpoint)
    found = rows(
        longctx.contexts,
        document=str(folder),
        pretrained=str(checkpoint),
        contexts=[512, 128, 1024],
        targets=3,
        span=50,
    )
    assert len(found) == 9  # the short one is left out
    assert [row["name"] for row in found] == [row["name"] for row in found[:3]] * 3  # take turns
    places = {}
    for row in found:
        assert row["label"] == ["128", "512", "1024", "whole"]
        assert len({*row["start"]}) == len({*row["end"]}) == len({*row["tokens"]}) == 1
        start, end = row["start"][0], row["end"][0]
        assert 50 <= row["tokens"][0] <= 50 + documents.SLACK
        assert len(tokenizer.encode(row["text"][start:end])) == row["tokens"][0]
        for label, context in zip(row["label"][:-1], row["context"], strict=False):
            assert len(tokenizer.encode(row["text"][context:start])) == int(label)
        assert row["context"][-1] == 0
        places.setdefault(row["name"], []).append((start, end))
    for found in places.values():  # apart from each other
        assert all(end <= start for (_, end), (start, _) in zip(found, found[1:], strict=False))


def test_seeds_draw_other_places_and_orders(checkpoint, folder):
    given = {"document": str(folder), "pretrained": str(checkpoint), "contexts": 256}
    one, again, other = (rows(longctx.contexts, seed=seed, **given) for seed in (0, 0, 1))
    assert one == again
    assert one[0]["dataset_sha256"] != other[0]["dataset_sha256"]
    assert {(r["name"], r["start"][0]) for r in one} & {
        (r["name"], r["start"][0]) for r in other
    } == set()
    few = rows(longctx.contexts, samples=1, **given)
    assert [row["start"] for row in few] == [one[i]["start"] for i in (0, 3)]


def test_texts_of_python_are_long_and_said_to_be_a_smoke_test(checkpoint, caplog):
    found = rows(longctx.positions, pretrained=str(checkpoint), samples=2)
    assert "smoke test" in caplog.text
    assert all(sum(row["tokens"]) > 20_000 for row in found)
    names = [name for name, _ in documents.python_texts()]
    assert len(names) == len(set(names)) >= 8 and "pydoc_data.topics" in names


def test_sources(tmp_path):
    (tmp_path / "one.txt").write_text("A file.", encoding="utf-8")
    assert documents.texts_of(str(tmp_path / "one.txt")) == [("one.txt", "A file.")]
    lines = [json.dumps({"body": f"text {i}"}) for i in range(3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    spec = {"path": "json", "data_files": str(tmp_path / "rows.jsonl"), "split": "train"}
    spec["cache_dir"] = str(tmp_path / "cache")
    found = documents.texts_of(spec | {"field": "body"})
    assert found == [(f"train {i}", f"text {i}") for i in range(3)]
    with pytest.raises(ArgumentError, match="no column 'text', but body; .* field="):
        documents.texts_of(spec)
    rows = [json.dumps(row) for row in ({"text": None, "id": 5}, {"text": "a", "id": 6})]
    (tmp_path / "more.jsonl").write_text("\n".join(rows), encoding="utf-8")
    spec["data_files"] = str(tmp_path / "more.jsonl")
    assert documents.texts_of(spec) == [("train 1", "a")]
    with pytest.raises(ArgumentError, match="id of train 0 is no text: name the column"):
        documents.texts_of(spec | {"field": "id"})
    with pytest.raises(ArgumentError, match="has no split test"):
        documents.texts_of({"path": str(tmp_path / "nothing")})


def test_metadata_that_cannot_be(checkpoint, folder):
    for function, arguments, message in (
        (longctx.positions, {"first": 0}, "first must be an integer of at least 1, found 0"),
        (longctx.positions, {"samples": "many"}, "samples must be an integer .* found 'many'"),
        (longctx.positions, {"seed": -1}, "seed must be an integer of at least 0"),
        (longctx.positions, {"document": "/nowhere at all"}, "expected a folder of text files, a"),
        (longctx.contexts, {"contexts": [128, "x"]}, r"contexts must be integers .* \[128, 'x'\]"),
        (longctx.contexts, {"contexts": []}, "contexts must be integers"),
        (longctx.contexts, {"targets": True}, "targets must be an integer"),
        (
            longctx.contexts,
            {"contexts": 10**6},
            "no document has the 1000256 tokens .* longest has",
        ),
        (
            longctx.contexts,
            {"contexts": 16, "span": 64},
            "span=64 .* more than the shortest context",
        ),
        (longctx.positions, {"pretrained": None}, "name a tokenizer with --metadata"),
        (longctx.positions, {"tokenizer": []}, r"tokenizer must be a path or a hub id, found \[\]"),
    ):
        given = {"document": str(folder), "pretrained": str(checkpoint)} | arguments
        with pytest.raises(ArgumentError, match=message):
            function(**given)


def test_an_unreadable_text_is_named(checkpoint, tmp_path):
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(ArgumentError, match="latin.txt cannot be read as a text in UTF-8"):
        longctx.positions(document=str(tmp_path), pretrained=str(checkpoint))


# Runs of lm_eval


def read_by(checkpoint, **metadata):
    """Return a run's counts of tokens, and the number of characters that it tokenises."""
    lm = GriffinLM(pretrained=str(checkpoint), framework="torch", max_batch_size=4)
    encode, characters = lm.tokenizer.encode_batch, []
    lm.tokenizer.encode_batch = lambda some: characters.append(sum(map(len, some))) or encode(some)
    evaluate(lm, "griffin_longctx_position", metadata | {"pretrained": str(checkpoint)})
    return lm.stats, sum(characters)


def test_a_document_is_read_and_tokenised_once(checkpoint, tmp_path):
    text = PYTHON[:30_000]
    (tmp_path / "book.txt").write_text(text, encoding="utf-8")
    stats, characters = read_by(checkpoint, document=str(tmp_path), first=128)
    count = len(load_tokenizer(checkpoint).encode(text))
    assert count > 7_500
    assert stats.tokens_computed <= 1.01 * count
    assert stats.tokens_requested > 1.9 * count
    assert characters <= 1.01 * len(text)


@pytest.fixture(scope="module")
def million(checkpoint):
    """Return a text of a million tokens."""
    text = "\n\n".join(text for _, text in documents.python_texts()) * 2
    spans = load_tokenizer(checkpoint).spans(text)
    return text[: int(spans[MILLION, 0])]


@pytest.mark.slow
def test_a_million_tokens_are_read_once(checkpoint, million, tmp_path):
    (tmp_path / "book.txt").write_text(million, encoding="utf-8")
    stats, _ = read_by(checkpoint, document=str(tmp_path))
    assert MILLION <= stats.tokens_computed <= 1.01 * MILLION
