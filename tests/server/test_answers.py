"""The streamed parts of an answer add up to the whole answer."""

import numpy as np
import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sentencepiece_models import train_sentencepiece
from slow import examples

from griffin_eval.checkpoints import folder
from griffin_eval.engine.live.requests import NewToken
from griffin_eval.server.answers import Answer, Completion
from griffin_eval.server.logprobs import TokenNames
from griffin_eval.text.load import load_tokenizer

TEXT = "The café's 東京 🙂  don't . , \n\n e\u0301 END of it"


@pytest.fixture(scope="module", params=["bytes", "pieces"])
def tokenizer(request, tmp_path_factory):
    if request.param == "bytes":
        return load_tokenizer(folder("bytes_griffin"))
    pytest.importorskip("sentencepiece")
    path = tmp_path_factory.mktemp("pieces")
    train_sentencepiece(path)
    return load_tokenizer(path)


def read(logprobs):
    return orjson.loads(orjson.dumps(logprobs))


def told(tokenizer, ids, stop, asked, top=None):
    """Return all parts of an answer (text and log-probabilities), which are read after the tokens
    that ``asked`` selects, and the completion when it has ended."""
    answer = Answer(tokenizer, stop, lambda: None, in_parts=True)
    ids = [token % tokenizer.vocab_size for token in ids]
    prompt = np.array(tokenizer.encode("a b"))
    completion = Completion(TokenNames(tokenizer), prompt, "a b", answer, False, top)
    parts = []
    for number, token in enumerate(ids):
        one = NewToken(token, False, -1.0 * number, np.array([token, 5]), np.array([-1.0, -2.0]))
        stopped = answer.token(one)
        if asked[number % len(asked)]:
            parts.append(completion.news(chat=False))
        if stopped:
            break
    answer.done("stop", None)
    parts.append(completion.news(chat=False))
    return parts, completion


@given(data=st.data(), words=st.integers(0, 3), stop=st.sampled_from([[], ["END"], ["don", " ."]]))
@settings(max_examples=examples(40))
def test_parts_are_the_whole(tokenizer, data, words, stop):
    ids = tokenizer.encode(TEXT) * words
    noise = data.draw(st.lists(st.integers(0, 1 << 20), max_size=12))
    at = data.draw(st.integers(0, len(ids)))
    asked = data.draw(st.lists(st.booleans(), min_size=1, max_size=7))
    ids = [*ids[:at], *noise, *ids[at:]]
    parts, completion = told(tokenizer, ids, stop, asked, top=2)
    whole = completion.answer
    text = tokenizer.decode([one.id for one in whole.tokens], skip_special_tokens=True)
    if found := [text.find(one) for one in stop if one in text]:
        text = text[: min(found)]
    assert "".join(part for part, *_ in parts) == whole.text == text
    once = read(completion.logprobs())
    assert [len(read(each)["tokens"]) for _, each, _ in parts] == [count for *_, count in parts]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [one for _, each, _ in parts for one in read(each)[name]] == once[name]


@pytest.mark.parametrize("chat", [False, True])
def test_tokens_that_come_while_a_part_is_made_are_of_the_next(tokenizer, chat, monkeypatch):
    """The scheduler's thread adds them at any time."""
    answer = Answer(tokenizer, [], lambda: None, in_parts=True)
    ids = np.array(tokenizer.encode("a b"))
    completion = Completion(TokenNames(tokenizer), ids, "a b", answer, False, 1)

    def come() -> None:
        if len(answer.tokens) < 6:
            answer.token(NewToken(5, False, -1.0, np.array([5]), np.array([-1.0])))

    name = "chat_logprobs" if chat else "logprobs"
    made = getattr(completion, name)
    monkeypatch.setattr(completion, name, lambda *at: (made(*at), come())[0])
    come()
    parts = [read(completion.news(chat)[1]) for _ in range(7)]
    assert [len(one["content" if chat else "tokens"]) for one in parts] == [1] * 6 + [0]


def test_the_replacement_character_may_be_a_token(tmp_path):
    """It is then no part of another character."""
    pytest.importorskip("sentencepiece")
    train_sentencepiece(tmp_path, user_defined_symbols=["\ufffd"])
    tokenizer = load_tokenizer(tmp_path)
    names, ids = TokenNames(tokenizer), tokenizer.encode("a\ufffdb")
    assert [names.text(one) for one in ids] == ["a", "\ufffd", "b"]
    assert [names.bytes_of(one) for one in ids] == [b"a", "\ufffd".encode(), b"b"]
    assert [names.width(one) for one in ids] == [1, 1, 1]


def test_a_token_beyond_the_tokenizers_has_a_name(tokenizer):
    """As an embedding that is padded has some."""
    beyond, names = tokenizer.vocab_size + 3, TokenNames(tokenizer)
    assert names.text(beyond) == f"token_id:{beyond}" and names.bytes_of(beyond) is None
    assert tokenizer.decode([beyond], skip_special_tokens=False) == ""


@given(text=st.text(max_size=12))
@example("<pad>")
@settings(max_examples=examples(40))
def test_bytes_and_widths_of_tokens_make_up_a_text(tokenizer, text):
    """A special token has a width, and stands for no bytes."""
    names, ids = TokenNames(tokenizer), tokenizer.encode(text)
    decoded = tokenizer.decode(ids, skip_special_tokens=False)
    plain = tokenizer.decode(ids, skip_special_tokens=True)
    assert b"".join(names.bytes_of(token) or b"" for token in ids) == plain.encode()
    assert sum(map(names.width, ids)) == len(decoded)
