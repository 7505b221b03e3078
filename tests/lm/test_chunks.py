"""Long contexts in chunks, beside a plain loop over the same chunks."""

import random
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from slow import slow

from griffin_eval import Evaluator
from griffin_eval.errors import ArgumentError
from griffin_eval.lm import chunks
from griffin_eval.lm.chunks import Chunking, prompts_of, surest
from griffin_eval.lm.model import GriffinLM
from griffin_eval.text.load import load_tokenizer

TOKENS = 60
QUESTION = "\nwhich one?\nanswer:"  # its first line ends the last line of the context


def texts():
    """Prompts of one, a few and many chunks."""
    rng = random.Random(0)
    words = ["left", "right", "up", "down", "north", "south", "east", "west"]
    prompts = []
    for lines in (3, 12, 25, 40):
        context = [" ".join(rng.choices(words, k=5)) for _ in range(lines)]
        prompts.append("find it\n" + "\n".join(context) + QUESTION)
    return prompts


CHUNKS = {"chunk_tokens": TOKENS, "chunk_question_lines": 2, "chunk_prefix_lines": 1}


def plain(tokenizer, text):
    """Return the prompts of the chunks of a text."""
    return prompts_of(text, tokenizer, Chunking(TOKENS, 2, 1, None, False))


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return load_tokenizer(checkpoint)


@given(
    lines=st.lists(st.text("ab é\t", max_size=30), min_size=3, max_size=30),
    tokens=st.integers(40, 90),
)
def test_chunks_are_the_context_between_prefix_and_question(tokenizer, lines, tokens):
    text = "\n".join(["to all:", *lines, "so?"])
    prompts = prompts_of(text, tokenizer, Chunking(tokens, 1, 1, None, False))
    assert all(p.startswith("to all:\n") and p.endswith("so?") for p in prompts)
    parts = [prompt.removeprefix("to all:\n").removesuffix("so?") for prompt in prompts]
    assert "".join(parts) == text.removeprefix("to all:\n").removesuffix("so?")
    for part in parts[:-1]:
        assert 0 < len(tokenizer.encode(part)) <= tokens


def test_questions_about_one_text_share_its_chunks(tokenizer):
    texts = [f"all:\n{'some words to read. ' * 40}\n{question}" for question in ("who?", "a b c?")]
    one, other = (plain(tokenizer, text + "\nanswer:") for text in texts)
    assert len(one) > 2
    assert [p.replace("who?", "a b c?") for p in one] == other


@pytest.mark.parametrize("framework", ["torch", slow("jax")])
def test_generated_texts_are_those_of_a_loop(framework, checkpoint, tokenizer, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "chat")
    template = "<user>{{ messages[0]['content'] }}<model>"
    (folder / "chat_template.jinja").write_text(template)
    model = Evaluator(checkpoint, framework=framework)
    lm = GriffinLM(pretrained=str(folder), framework=framework, **CHUNKS)
    chat = lm.apply_chat_template([{"role": "user", "content": texts()[2]}])
    assert chat.startswith("<user>find it\n") and chat.endswith("answer:<model>")
    asked, expected, several = [*texts(), chat], [], 0
    for text in asked:
        prompts = plain(tokenizer, text)
        # The entropy of the next token is that of the prediction of any token behind the prompt.
        details = model.score([prompt + " x" for prompt in prompts], details=True)
        entropies = [score.entropies[-1] for score in details]
        several += len(prompts) > 1
        best = prompts[int(np.argmin(entropies))]
        expected.append(model.generate([best], max_new_tokens=6)[0].text)
    assert several == 4
    arguments = {"until": ["\n\n\n"], "max_gen_toks": 6}
    found = lm.generate_until([Instance("generate_until", {}, (t, arguments), 0) for t in asked])
    assert found == expected
    info = lm.get_model_info()
    assert info["model_chunk_tokens"] == TOKENS and info["model_chunk_question_lines"] == 2


@pytest.mark.parametrize("rule", ["entropy", "loglikelihood"])
def test_choices_are_scored_after_one_chunk(rule, checkpoint, tokenizer):
    whole = GriffinLM(pretrained=str(checkpoint), framework="torch")
    lm = GriffinLM(pretrained=str(checkpoint), framework="torch", chunk_rule=rule, **CHUNKS)
    choices = [" left", " east"]

    def ask(model, prompts):
        requests = [
            Instance("loglikelihood", {}, (prompt, choice), i)
            for prompt in prompts
            for i, choice in enumerate(choices)
        ]
        answers = model.loglikelihood(requests)
        return [answers[i : i + 2] for i in range(0, len(answers), 2)]

    found = ask(lm, texts())
    for text, pair in zip(texts(), found, strict=True):
        by_chunk = ask(whole, plain(tokenizer, text))
        scores = [[score for score, _ in each] for each in by_chunk]
        matching = [np.allclose([s for s, _ in pair], each, atol=1e-4) for each in scores]
        assert any(matching)
        if rule == "loglikelihood":
            assert matching[int(np.argmax([max(each) for each in scores]))]


def test_a_chunk_that_says_that_it_is_absent_is_passed_over():
    doubts = np.array([3.0, 1.0, 2.0])
    assert surest(doubts, np.array([False, False, False])) == 1
    assert surest(doubts, np.array([False, True, False])) == 2
    assert surest(doubts, np.array([True, True, True])) == 1  # all say so


def test_whether_a_chunk_says_that_it_is_absent(checkpoint, tokenizer, monkeypatch):
    """What the chunk says that is chosen counts as "not here", and what no chunk says does not."""
    text = texts()[2]
    arguments = {"until": ["\n\n\n"], "max_gen_toks": 1}
    request = [Instance("generate_until", {}, (text, arguments), 0)]
    model = Evaluator(checkpoint, framework="torch")
    said = {each.text for each in model.generate(plain(tokenizer, text), max_new_tokens=1)}
    seen = []

    def record(doubts, absent):
        seen.append(absent.tolist())
        return surest(doubts, absent)

    monkeypatch.setattr(chunks, "surest", record)
    for absent in (*said, "left"):
        lm = GriffinLM(pretrained=str(checkpoint), framework="torch", chunk_absent=absent, **CHUNKS)
        lm.generate_until(request)
    *of_said, of_other = seen
    assert [sum(each) for each in zip(*of_said, strict=True)] == [1] * len(of_other)
    assert not any(of_other)


def test_refusals(checkpoint):
    def lm(**arguments):
        return GriffinLM(pretrained=str(checkpoint), framework="torch", **arguments)

    def generate(text, **arguments):
        until = {"until": ["\n\n\n"], "max_gen_toks": 1}
        lm(**arguments).generate_until([Instance("generate_until", {}, (text, until), 0)])

    short, long = texts()[0], texts()[3]
    with pytest.raises(ArgumentError, match="nothing would be read in chunks"):
        generate(short, **CHUNKS)
    several = lm(**CHUNKS)  # another process may have longer texts
    several._world_size = 2
    several.generate_until([Instance("generate_until", {}, (short, {"max_gen_toks": 1}), 0)])
    with pytest.raises(ArgumentError, match="has no context between"):
        generate("one line", **CHUNKS)
    with pytest.raises(ArgumentError, match="more than a chunk"):
        generate(long, **(CHUNKS | {"chunk_tokens": 3}))
    with pytest.raises(ArgumentError, match="texts that are generated need chunk_rule=entropy"):
        generate(long, chunk_rule="loglikelihood", **CHUNKS)
    with pytest.raises(ArgumentError, match="chunk_absent= needs chunk_tokens="):
        lm(chunk_absent="no")
    with pytest.raises(ArgumentError, match="chunk_tokens must be a positive integer, found 0"):
        lm(chunk_tokens=0)
    with pytest.raises(ArgumentError, match="loglikelihood_rolling requests have none"):
        lm(**CHUNKS).loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (long,), 0)])
