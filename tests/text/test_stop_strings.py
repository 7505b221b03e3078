"""Stop strings mean the same to the server and to lm-eval's requests."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from sentencepiece_models import train_sentencepiece
from slow import examples

from griffin_eval.checkpoints import folder
from griffin_eval.engine import parallel
from griffin_eval.engine.live.requests import NewToken
from griffin_eval.engine.stats import Stats
from griffin_eval.lm.model import GriffinLM
from griffin_eval.server.answers import Answer
from griffin_eval.text.load import load_tokenizer

SAID = "abcd<pad>bc<bos>d\n\n"
STOPS = ["", "a", "bc", "cd", "abcd", "db", "d<pad>", "pad", "<bos>c", "bc\n", "é", "\ud800"]


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    """Return a model with a tokenizer that has tokens of several characters."""
    pytest.importorskip("sentencepiece")
    path = tmp_path_factory.mktemp("pieces")
    train_sentencepiece(path, user_defined_symbols=["bcd", "é"])
    lm = GriffinLM(str(folder("bytes_griffin")), "torch", device="cpu")
    lm.tokenizer = load_tokenizer(path)
    return lm


def expected(tokenizer, ids, stops):
    """Return the answer by the definition, which reads every beginning of the tokens anew."""
    stops, text = [stop for stop in stops if stop], ""
    for count in range(1, len(ids) + 1):
        text, whole = (
            tokenizer.decode(ids[:count], skip_special_tokens=skip) for skip in (True, False)
        )
        if any(stop in text or stop in whole for stop in stops):
            break
    return text[: min((text.find(stop) for stop in stops if stop in text), default=None)]


def evaluated(lm, ids, stops, monkeypatch):
    """Return the answer to a request of lm-eval for which the model generates these tokens."""

    def generate(runners, prompts, *, should_stop, on_result, **_):
        count = next((n for n in range(1, len(ids)) if should_stop(0, ids[:n])), len(ids))
        on_result(0, ids[:count])
        return Stats()

    monkeypatch.setattr(parallel, "generate", generate)
    request = Instance("generate_until", {}, ("A", {"until": stops, "max_gen_toks": 99}), 0)
    [text] = lm.generate_until([request], disable_tqdm=True)
    return text


def served(tokenizer, ids, stops):
    """Return the answer of the server for which the model generates these tokens."""
    answer = Answer(tokenizer, stops, lambda: None, in_parts=False)
    any(answer.token(NewToken(token, False, None, [], [])) for token in ids)
    answer.done("stop", None)
    return answer.text


@given(
    order=st.lists(st.integers(0, 7), max_size=14),
    stops=st.lists(st.sampled_from(STOPS), max_size=4),
)
@example(order=[0, 1], stops=["cd", "bc"])  # both end with one token: "a", not "ab"
@example(order=[0, 2, 3], stops=["ab"])  # a special token within the stop string
@example(order=[0, 2, 3], stops=["a<pad>"])
@settings(max_examples=examples(60))
def test_the_server_and_lm_eval_cut_alike(lm, order, stops):
    tokens = lm.tokenizer.encode(SAID)
    ids = [tokens[place % len(tokens)] for place in order]
    text = expected(lm.tokenizer, ids, stops)
    assert served(lm.tokenizer, ids, stops) == text
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert evaluated(lm, ids, stops, monkeypatch) == text
