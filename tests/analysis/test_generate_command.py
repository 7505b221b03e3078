"""`griffin-eval generate`: the Python API's text, whole, streamed and as JSON."""

import io
import json
import sys

import pytest
from commands import griffin_eval
from typer.testing import CliRunner

import griffin_eval as package
from griffin_eval.checkpoints import folder
from griffin_eval.cli import generate
from griffin_eval.cli.main import app
from griffin_eval.errors import ArgumentError

CHECKPOINT = folder("bytes_griffin")
PROMPT = "import os\n"


@pytest.fixture(scope="module")
def model():
    return package.Evaluator(CHECKPOINT, framework="torch")


def test_the_text_is_that_of_the_python_api(model, monkeypatch):
    sampling = {"max_new_tokens": 12, "temperature": 0.8, "top_k": 5, "seed": 3}
    [expected] = model.generate([PROMPT], **sampling)
    words = [f for n, v in sampling.items() for f in ("--" + n.replace("_", "-"), v)]
    assert griffin_eval("generate", CHECKPOINT, PROMPT, *words).stdout == expected.text + "\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT + "\n"))
    done = griffin_eval("generate", CHECKPOINT, *words, "--json")
    assert json.loads(done.stdout) == {
        "prompt": PROMPT,
        "text": expected.text,
        "tokens": expected.tokens.tolist(),
    }


def test_a_prompt_that_is_not_utf8_is_refused():
    done = CliRunner().invoke(app, ["generate", str(CHECKPOINT)], input=b"a\xff")
    assert "not UTF-8" in str(done.exception) and isinstance(done.exception, ArgumentError)


def test_one_text_gives_one_continuation(model):
    seen = []
    one = model.generate(PROMPT, max_new_tokens=6, on_token=lambda i, ids: seen.append([*ids]))
    [same] = model.generate([PROMPT], max_new_tokens=6)
    known = f"Checkpoint({str(CHECKPOINT)!r}: griffin, 334,336 parameters, bfloat16)"
    assert repr(model) == f"Evaluator({known}, torch, bfloat16)"
    assert one.text == same.text and model.tokenizer.encode(one.text) == one.tokens.tolist()
    assert seen == [one.tokens[:count].tolist() for count in range(1, 6)]


def test_a_terminal_gets_the_text_in_parts_and_no_half_character(model, capsys):
    tokens = model.tokenizer.encode("é\x1b!")
    show = generate._shower(model)
    for count in range(1, len(tokens) + 1):
        show(tokens[:count], count == len(tokens))
        assert "\ufffd" not in capsys.readouterr().out
    show = generate._shower(model)
    show(tokens, True)
    assert capsys.readouterr().out == "é\\x1b!"


def test_a_chat_uses_the_template(tmp_path, model):
    done = griffin_eval("generate", CHECKPOINT, "hi", "--chat")
    assert done.returncode == 2 and "no chat template" in done.stderr
    package.convert(CHECKPOINT, tmp_path / "chat", to="hf")
    (tmp_path / "chat" / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}:"
    )
    done = griffin_eval("generate", tmp_path / "chat", "hi", "--chat", "--max-new-tokens", 5)
    assert done.stdout == model.generate("<user>hi:", max_new_tokens=5).text + "\n"


def test_a_bad_value_is_named():
    done = CliRunner().invoke(app, ["generate", str(CHECKPOINT), "a", "--temperature", "-1"])
    assert done.exit_code == 2 and "--temperature" in done.output
