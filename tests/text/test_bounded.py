"""Texts with tokens that the model's embedding lacks are refused."""

import asyncio
import json
import logging
import shutil

import httpx
import numpy as np
import pytest
from lm_eval.api.instance import Instance
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import griffin_eval
from griffin_eval.cli.main import app
from griffin_eval.errors import ArgumentError, BadInput, CheckpointError
from griffin_eval.lm.model import GriffinLM
from griffin_eval.model_arguments import parse_arguments
from griffin_eval.opened import open_model
from griffin_eval.server.app import make_app
from griffin_eval.server.model import ServedModel, ServerOptions
from griffin_eval.text.bounded import bounded
from griffin_eval.text.load import load_tokenizer

ROWS = 1024  # rows of the checkpoint's embedding, and ids of its tokenizer
PAD = ROWS + 1
TEXT = "The cat sat on the mat."
SAID = rf"uses the token '\[PAD\]' of id {PAD}, but the model's embedding has {ROWS} rows: leave"


@pytest.fixture(scope="module")
def padded(checkpoint, tmp_path_factory):
    """Write the checkpoint with two more tokens in its tokenizer, a result of fine-tuning."""
    folder = shutil.copytree(checkpoint, tmp_path_factory.mktemp("padded") / "model")
    files = {name: json.loads((folder / name).read_text()) for name in FILES}
    tokenizer, settings = files.values()
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for number, content in ((ROWS, "<extra>"), (PAD, "[PAD]")):
        tokenizer["added_tokens"].append(
            {"id": number, "content": content, "special": True, **flags}
        )
    settings["pad_token"] = "[PAD]"
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


FILES = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def evaluator(padded):
    return griffin_eval.Evaluator(padded, framework="torch", device="cpu")


@pytest.fixture(scope="module")
def lm(padded):
    return GriffinLM(str(padded), framework="torch", device="cpu")


def test_texts_without_the_token_are_read(checkpoint, evaluator):
    plain = griffin_eval.Evaluator(checkpoint, framework="torch", device="cpu")
    (expected,), (found,) = plain.score([TEXT]), evaluator.score([TEXT])
    assert np.array_equal(found.tokens, expected.tokens) and found.total == expected.total
    (answer,) = evaluator.generate([TEXT], max_new_tokens=4)
    assert answer.text == plain.generate([TEXT], max_new_tokens=4)[0].text
    assert (answer.tokens < ROWS).all()


ROADS = {
    "score": lambda e, text: e.score([TEXT, text]),
    "generate": lambda e, text: e.generate([text]),
    "read": lambda e, text: e.read(text),
    "layer_states": lambda e, text: e.layer_states(text),
}


@pytest.mark.parametrize("road", ROADS)
def test_the_evaluator_refuses_texts_and_ids_that_use_it(evaluator, road):
    with pytest.raises(ArgumentError, match=rf"the text 'a \[PAD\]' {SAID}") as refused:
        ROADS[road](evaluator, "a [PAD]")
    assert "\n" not in str(refused.value)
    with pytest.raises(ArgumentError, match=f"a list of token ids {SAID}"):
        ROADS[road](evaluator, [5, PAD, 6])
    with pytest.raises(ArgumentError, match=f"token ids must be from 0 to {ROWS - 1}, found 5 to"):
        ROADS[road](evaluator, [5, PAD + 1])  # no token's id


REQUESTS = {
    "loglikelihood": [("The", " [PAD]"), ("a [PAD]", " b"), ("", "[PAD]")],
    "loglikelihood_rolling": [("a [PAD]",)],
    "generate_until": [("a [PAD] b", {"max_gen_toks": 2, "until": ["\n"]})],
}


@pytest.mark.parametrize("kind", REQUESTS)
def test_lm_eval_refuses_requests_that_use_it(lm, kind):
    for arguments in REQUESTS[kind]:
        with pytest.raises(ArgumentError, match=SAID):
            getattr(lm, kind)([Instance(kind, {}, arguments, 0)])
    with pytest.raises(ArgumentError, match=SAID):
        lm.tok_encode("a [PAD]")


def test_the_server_refuses_bodies_that_use_it(padded):
    arguments = {"pretrained": str(padded), "framework": "torch", "device": "cpu"}
    model = ServedModel(open_model(parse_arguments(arguments)), ServerOptions(name="model"))

    async def ask(path, body):
        transport = httpx.ASGITransport(make_app(model))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(path, json=body)

    bodies = [
        ("/v1/completions", {"prompt": "a [PAD]"}, "the text"),
        ("/v1/completions", {"prompt": [5, PAD]}, "a list of token ids"),
        ("/generate", {"prompt": "a [PAD]"}, "the text"),
        ("/tokenize", {"prompt": "a [PAD]"}, "the text"),
        ("/tokenize", {"prompt": "[PAD]", "add_special_tokens": False}, "the text"),
    ]
    for path, body, what in bodies:
        answer = asyncio.run(ask(path, body))
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == "prompt", answer.text
        assert f"'[PAD]' of id {PAD}" in error["message"] and error["message"].startswith(what)
    answer = asyncio.run(ask("/v1/completions", {"prompt": [5, PAD + 1]}))
    assert "token ids must be from 0 to" in answer.json()["error"]["message"]


def test_commands_refuse_it_in_one_sentence(padded, tmp_path):
    (tmp_path / "text").write_text("a [PAD]")
    for command in ("score", "read"):
        save = ["--save", str(tmp_path / "state")] if command == "read" else []
        arguments = [command, str(padded), str(tmp_path / "text"), *save]
        done = CliRunner().invoke(app, [*arguments, "--framework", "torch"])
        assert isinstance(done.exception, BadInput), done.output
        assert f"uses the token '[PAD]' of id {PAD}" in str(done.exception)


def test_it_is_said_once_and_special_tokens_without_a_row_are_none(padded, caplog):
    caplog.set_level(logging.WARNING)
    tokenizer = bounded(load_tokenizer(padded), ROWS)
    (said,) = [r.getMessage() for r in caplog.records if "embedding" in r.getMessage()]
    assert f"'<extra>', {ROWS}; '[PAD]', {PAD}): texts that use them are refused" in said
    assert tokenizer.vocab_size == ROWS and tokenizer.pad_token is tokenizer.pad_token_id is None
    assert tokenizer.bos_token_id is not None and tokenizer.eos_token_id is not None
    plain = load_tokenizer(padded)
    assert bounded(plain, PAD + 1) is plain
    texts = ["a", TEXT, ""]
    assert tokenizer.encode_batch(texts) == plain.encode_batch(texts)
    assert tokenizer.boundaries == plain.boundaries
    with pytest.raises(ArgumentError, match="the text 'b <extra>' uses the token '<extra>'"):
        tokenizer.encode_batch(["a", "b <extra>"])


def test_a_tokenizer_of_another_model_is_refused(padded):
    tokenizer = load_tokenizer(padded)
    bounded(tokenizer, ROWS - ROWS // 64)  # a few trained tokens may lack a row
    rows = ROWS - ROWS // 64 - 1
    with pytest.raises(CheckpointError, match=f"ids up to {PAD}.*only {rows} entries"):
        bounded(tokenizer, rows)
    tokenizer.bos_token, tokenizer.bos_token_id = "[PAD]", PAD
    with pytest.raises(CheckpointError, match=rf"begins texts with '\[PAD\]' of id {PAD}"):
        bounded(tokenizer, ROWS)


def test_an_embedding_with_a_row_less(checkpoint, tmp_path):
    """Trained tokens, too, may lack a row, not only added ones."""
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    name = "model.embed_tokens.weight"
    save_file(weights | {name: weights[name][:-1].copy()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": ROWS - 1}))
    evaluator = griffin_eval.Evaluator(folder, framework="torch", device="cpu")
    assert np.isfinite(evaluator.score([TEXT])[0].total)
    token = load_tokenizer(folder).decode([ROWS - 1], skip_special_tokens=False)
    with pytest.raises(ArgumentError, match=f"of id {ROWS - 1}, but the model's embedding"):
        evaluator.score([token])
