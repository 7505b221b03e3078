"""A text is read once; requests go on from its state as if it had been read before them."""

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fixtures_engine import continuations, random_ids, scores, small_runner
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from parity import BASE
from safetensors.numpy import load_file, save_file
from slow import ci, examples, slow
from typer.testing import CliRunner

import griffin_eval
from griffin_eval import Evaluator, convert
from griffin_eval.cli.main import app
from griffin_eval.config import ADDED
from griffin_eval.engine.generation import Prompt
from griffin_eval.engine.limits import Limits
from griffin_eval.engine.reading import read
from griffin_eval.engine.tree import Scorable
from griffin_eval.errors import ArgumentError, CheckpointError
from griffin_eval.lm.model import GriffinLM
from griffin_eval.states import saved_state
from griffin_eval.states.saved_state import SavedState, origin_of, read_state, shapes_of

CHECKPOINT = Path(griffin_eval.__file__).parent / "checkpoints" / "bytes_griffin"
LIMITS = Limits(32, 4)
BOOK = "The cat sat on the mat, and the dog sat on the cat. " * 9
BOOK = BOOK.strip()  # lm-eval moves white space to the text that follows
PAIRS = [(" Then the", " mouse came."), ("", " A second book"), ("\n", "the mat ")]
SAVED = Path("book.state")


def answers(lm, pairs):
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    rolling = [Instance("loglikelihood_rolling", {}, (pair[1],), i) for i, pair in enumerate(pairs)]
    return lm.loglikelihood(requests), lm.loglikelihood_rolling(rolling)


def texts(lm, prompts):
    how = {"max_gen_toks": 8, "until": []}
    return lm.generate_until([Instance("generate_until", {}, (p, how), 0) for p in prompts])


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    """Return the file of a state that a framework has saved, by the framework's name."""
    folder = tmp_path_factory.mktemp("states")

    class Files(dict):
        def __missing__(self, framework):
            self[framework] = folder / f"{framework}.state"
            model = Evaluator(CHECKPOINT, framework=framework, dtype="float32")
            model.read(BOOK).save(self[framework])
            return self[framework]

    return Files()


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ("torch", "torch"),
        ci("jax", "torch"),
        slow("torch", "jax"),  # test_the_stock_commands has it in .ci/run
        slow("jax", "jax"),
    ],
)
def test_requests_go_on_in_either_framework(writer, reader, states):
    # Bytes are tokens here, so that the ids of a whole are those of its parts.
    whole = GriffinLM(str(CHECKPOINT), reader, dtype="float32")
    after = GriffinLM(str(CHECKPOINT), reader, dtype="float32", state=str(states[writer]))
    expected, _ = answers(whole, [(BOOK + context, text) for context, text in PAIRS])
    found, rolling = answers(after, PAIRS)
    for (mine, greedy), (theirs, also) in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5) and greedy == also
    documents, _ = answers(whole, [(BOOK, text) for _, text in PAIRS])
    assert rolling == [pytest.approx(theirs, rel=1e-5) for theirs, _ in documents]
    prompts = ["", " Then the", " A"]
    assert texts(after, prompts) == texts(whole, [BOOK + prompt for prompt in prompts])
    assert after.stats.tokens_computed < whole.stats.tokens_computed / 2


@functools.cache
def two_runners(framework, kind):
    changed = {"griffin": {}, "two heads of keys": {"num_kv_heads": 2}}
    config = dataclasses.replace(BASE, **changed.get(kind, {"block_pattern": (kind,)}))
    return small_runner(framework, config), small_runner.__wrapped__(framework, config)


@pytest.mark.parametrize("framework", ["torch", slow("jax")])
@pytest.mark.parametrize("kind", ["griffin", "global_attention", slow("two heads of keys")])
@settings(max_examples=examples(3))
@given(count=st.integers(2, 90), own=st.integers(1, 40), seed=st.integers(0, 99))
def test_any_cut_gives_the_scores_of_the_whole(framework, kind, count, own, seed):
    runner, after = two_runners(framework, kind)
    ids = np.array(random_ids(count + own, seed), np.int32)
    facts = {"bos": False, "text": "", "framework": framework}
    origin = origin_of(runner.config, "", None, runner.dtype, ids[:count], **facts)
    saved = SavedState(origin, read(runner, ids[:count], limits=LIMITS))
    assert shapes_of(runner.config, count - 1) == {n: t.shape for n, t in saved.tensors.items()}
    after.start_from(saved)
    (found,) = scores(after, [Scorable(ids[count - 1 :], 1)])
    (whole,) = scores(runner, [Scorable(ids, count)])
    np.testing.assert_allclose(found.logprobs, whole.logprobs, rtol=1e-4, atol=1e-5)
    assert continuations(after, [Prompt(ids[count - 1 :], 5)]) == continuations(
        runner, [Prompt(ids, 5)]
    )


@pytest.mark.parametrize("dtype", ["bfloat16", slow("float16")])
def test_narrow_states_are_saved_exactly(dtype, tmp_path):
    model = Evaluator(CHECKPOINT, framework="torch", dtype=dtype)
    model.read(BOOK).save(tmp_path / SAVED)
    after = Evaluator(CHECKPOINT, framework="torch", dtype=dtype, state=tmp_path / SAVED)
    again = read_state(tmp_path / SAVED)
    assert again.sha256 == model.read(BOOK).sha256
    (found,) = after.score([" Then"])
    (whole,) = model.score([BOOK + " Then"])
    np.testing.assert_allclose(found.logprobs, whole.logprobs[-5:], atol=0.05)


def test_what_differs_is_named(states, checkpoint):
    for arguments, sentence in (
        ({"dtype": "bfloat16"}, r"dtype \(float32, here bfloat16\)"),
        ({"window": 4}, r"attention_window|visible_keys|window"),
        ({"logits_soft_cap": 5.0}, "logits_soft_cap"),
        ({"max_length": 50}, "leave max_length= out"),
        ({"add_bos_token": True}, "leave add_bos_token= out"),
        ({"pretrained": str(checkpoint)}, "was read by another model: it differs in"),
    ):
        common = {"pretrained": str(CHECKPOINT), "dtype": "float32", "state": str(states["torch"])}
        with pytest.raises(ArgumentError, match=sentence):
            GriffinLM(**common | arguments)


def test_a_state_from_before_a_field_of_the_config_means_its_default(tmp_path, states):
    state = read_state(states["torch"])
    known = {name: value for name, value in state.origin.config.items() if name not in ADDED}
    older = state._replace(origin=state.origin._replace(config=known))
    older.save(tmp_path / SAVED)
    (found,) = Evaluator(
        CHECKPOINT, dtype="float32", framework="torch", state=tmp_path / SAVED
    ).score([" Then"])
    (right,) = Evaluator(
        CHECKPOINT, dtype="float32", framework="torch", state=states["torch"]
    ).score([" Then"])
    np.testing.assert_array_equal(found.logprobs, right.logprobs)
    changed = state._replace(
        origin=state.origin._replace(config=state.origin.config | {"num_kv_heads": 4})
    )
    changed.save(tmp_path / SAVED)
    with pytest.raises(ArgumentError, match=r"num_kv_heads \(4, here 1\)"):
        Evaluator(CHECKPOINT, dtype="float32", framework="torch", state=tmp_path / SAVED)


def test_weights_that_were_trained_on_are_named(tmp_path, states):
    convert(CHECKPOINT, tmp_path / "one", to="griffin", dtype="float32")
    Evaluator(tmp_path / "one").read(BOOK).save(tmp_path / SAVED)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    (tmp_path / "two" / "griffin_manifest.json").unlink()
    tensors = load_file(tmp_path / "two" / "model.safetensors")
    tensors["model.final_norm.weight"] += 1e-3
    save_file(tensors, tmp_path / "two" / "model.safetensors")
    with pytest.raises(ArgumentError, match="was read with other weights"):
        Evaluator(tmp_path / "two", state=tmp_path / SAVED)


@settings(max_examples=examples(60))
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_noticed(where, bit, states):
    content = bytearray(states["torch"].read_bytes())
    content[int(where * len(content))] ^= 1 << bit
    damaged = states["torch"].with_name("damaged.state")
    damaged.write_bytes(content)
    with pytest.raises(CheckpointError):
        read_state(damaged)


TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "[{{ m.role }}]{{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}[model]{% endif %}"
)


def test_chats_go_on_from_what_the_user_has_said(tmp_path):
    convert(CHECKPOINT, tmp_path / "model", to="hf", dtype="float32")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    Evaluator(tmp_path / "model", framework="torch").read(BOOK, chat=True).save(tmp_path / SAVED)
    after = GriffinLM(str(tmp_path / "model"), "torch", state=str(tmp_path / SAVED))
    whole = GriffinLM(str(tmp_path / "model"), "torch")
    asked = [{"role": "user", "content": "Who sat? "}]
    told = [{"role": "user", "content": f"{BOOK}\n\nWho sat?"}]
    prompt = after.apply_chat_template(asked)
    assert prompt == "Who sat?\n[model]" and whole.apply_chat_template(told).endswith(prompt)
    assert texts(after, [prompt]) == texts(whole, [whole.apply_chat_template(told)])
    with pytest.raises(ArgumentError, match="'system' comes first"):
        after.apply_chat_template([{"role": "system", "content": "a"}, *asked])
    Evaluator(tmp_path / "model", framework="torch").read(BOOK).save(tmp_path / "plain.state")
    plain = GriffinLM(str(tmp_path / "model"), "torch", state=str(tmp_path / "plain.state"))
    with pytest.raises(ArgumentError, match="griffin-eval read --chat"):
        plain.apply_chat_template(asked)
    with pytest.raises(ArgumentError, match="has no chat template"):
        Evaluator(CHECKPOINT, framework="torch").read(BOOK, chat=True)


def test_files_that_are_no_states_are_refused(states, tmp_path, monkeypatch):
    save_file({"a": np.ones(2)}, tmp_path / "other.safetensors")
    (tmp_path / "text").write_text("no state")
    for name in ("other.safetensors", "text", "missing", "."):
        with pytest.raises(CheckpointError, match=r"no saved state|no safetensors|cannot be read"):
            read_state(tmp_path / name)
    # Hashes that fit: a message would show half a character, or two lines.
    state = read_state(states["torch"])
    for name in ("weights_sha256", "tokens_sha256"):
        state._replace(origin=state.origin._replace(**{name: "\ud800\n"})).save(tmp_path / "state")
        with pytest.raises(CheckpointError, match=f"metadata are not.*{name} is") as refused:
            read_state(tmp_path / "state")
        assert str(refused.value).isprintable()
    monkeypatch.setattr(saved_state, "LAYOUT", 3)
    with pytest.raises(CheckpointError, match="has layout 2, and this version reads 3"):
        read_state(states["torch"])


def test_only_a_saved_state_is_replaced(states, tmp_path, monkeypatch):
    """Which is known before anything is opened: there is no such checkpoint."""
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(BOOK)
    save_file({"a": np.ones(2)}, "model.safetensors")
    Path("book.state").write_bytes(states["torch"].read_bytes())
    Path("cut.state").write_bytes(states["torch"].read_bytes()[:99])
    Path("folder").mkdir()
    Path("link").symlink_to("book.state")
    os.mkfifo("pipe")

    def refusal(save: str) -> str:
        command = ["read", "nowhere", "book.txt", "--save", save]
        return str(CliRunner().invoke(app, command).exception)

    files = ("book.txt", "model.safetensors", "cut.state")
    found = dict.fromkeys(files, "a file that is no saved state")
    found |= dict.fromkeys(("folder", ".", "", "/"), "a folder")
    found |= {"link": "a link", "pipe": "a device or a pipe"}
    for save, what in found.items():
        assert f"an earlier saved state, found {what}; name another file" in refusal(save)
    assert "book.txt is no folder: name another path" in refusal("book.txt/state")
    for save in ("book.state", "new.state", "new/state"):
        assert "no such folder: 'nowhere'" in refusal(save)


@pytest.mark.ci
def test_the_stock_commands(tmp_path):
    convert(CHECKPOINT, tmp_path / "model", to="hf", dtype="float32")
    (tmp_path / "book.txt").write_text(BOOK)
    here = Path(sys.executable).parent
    command = [here / "griffin-eval", "read", "model", "book.txt", "--save", "book.state"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and f"after {len(BOOK) + 1} tokens" in done.stdout, done.stderr
    arguments = "pretrained=model,framework=jax,state=book.state"
    command = [here / "lm_eval", "--model", "griffin", "--model_args", arguments]
    command += ["--tasks", "griffin_pydoc_choice", "--limit", "2", "--output_path", "out"]
    done = subprocess.run(
        [*command, "--device", "cpu"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    state = read_state(tmp_path / "book.state")
    (results,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(results.read_text())["config"]["model_state"] == state.sha256
