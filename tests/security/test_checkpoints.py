"""No code in a checkpoint's folder runs, and no name in it reaches the terminal unescaped."""

import json
import os
import subprocess
import sys
from pathlib import Path

import commands
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import CONFIG, write_source
from typer.testing import CliRunner

import griffin_eval
from griffin_eval.cli.main import app
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.formats import FORMATS
from griffin_eval.converters.source.hub import choose
from griffin_eval.errors import CheckpointError
from griffin_eval.text.load import load_tokenizer

PLANTED = "import pathlib\npathlib.Path({ran!r}).touch()\n"
NAMES = ("modeling_evil", "configuration_evil", "tokenization_evil", "torch", "json", "conftest")


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """Return a checkpoint that refers to its own code, and the file that the code would create."""
    folder, ran = tmp_path / "model", tmp_path / "ran"
    write_source(folder)
    for name in NAMES:
        (folder / f"{name}.py").write_text(PLANTED.format(ran=str(ran)))
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "configuration_evil.E", "AutoModelForCausalLM": "modeling_evil.E"}
    tokenizers = {"AutoTokenizer": ["tokenization_evil.E", "tokenization_evil.E"]}
    both = {"auto_map": classes | tokenizers, "trust_remote_code": True}
    (folder / "config.json").write_text(json.dumps(config | both))
    (folder / "tokenizer_config.json").write_text(json.dumps(both | {"tokenizer_class": "E"}))
    vocabulary = {token: i for i, token in enumerate("abcdefgh")} | {"<unk>": 8}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return folder, ran


def invoke(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def test_code_beside_the_weights_is_never_run(hostile, tmp_path, monkeypatch):
    folder, ran = hostile
    monkeypatch.chdir(folder)
    assert invoke("inspect", folder).exit_code == 0
    for name in FORMATS:
        done = invoke("convert", folder, tmp_path / name, "--to", name)
        assert done.exit_code == 0, done.output
        assert not [*(tmp_path / name).rglob("*.py")]
        assert invoke("verify", folder, tmp_path / name).exit_code == 0
    with pytest.raises(CheckpointError, match="tokenizer"):  # transformers has no class E
        load_tokenizer(folder)
    for framework in ("torch", "jax"):
        griffin_eval.load(Checkpoint(folder).path, framework=framework)
    assert not ran.exists()


def test_programs_import_nothing_from_the_folder_that_the_user_is_in(hostile):
    folder, ran = hostile
    environment = {name: each for name, each in os.environ.items() if name != "PYTHONSAFEPATH"}
    program = Path(sys.executable).with_name("griffin-eval")
    done = subprocess.run(
        [program, "inspect", "."], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not ran.exists()


def test_no_python_is_fetched_from_the_hub():
    files = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer.model"]
    code = ["modeling_evil.py", "model.py", "setup.sh", "training_args.bin", "tokenizer.pkl"]
    folder, wanted = choose(files + code, "", "somebody/model")
    assert (folder, sorted(wanted)) == ("", sorted(files))


def test_names_of_tensors_are_shown_as_they_are_and_steer_no_terminal(tmp_path):
    name = "evil[/red]\x1b[2J\r[link=file:///etc]x\x9b"
    write_source(folder := tmp_path / "model")
    tensors = load_file(folder / "model.safetensors") | {name: np.zeros(CONFIG.width, np.float32)}
    save_file(tensors, folder / "model.safetensors")
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)
    for arguments in (["inspect", folder], ["convert", folder, tmp_path / "to", "--to", "hf"]):
        done = commands.griffin_eval(*arguments)
        said = done.stdout + done.stderr
        assert done.returncode in (1, 2) and "Traceback" not in said
        assert shown in said and not set(said) & set("\x1b\x9b\r")
