"""What a conversion reads is never what --overwrite replaces."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_checkpoints import CONFIG, write_all
from typer.testing import CliRunner

from griffin_eval.cli.main import app
from griffin_eval.errors import ArgumentError
from griffin_eval.layout import param_specs


@pytest.fixture(scope="module")
def formats(tmp_path_factory):
    folder = tmp_path_factory.mktemp("formats")
    write_all(folder)
    return folder


def _file(formats: Path, root: Path) -> tuple[Path, Path, list[str]]:
    """A file whose config lies beside it."""
    folder = shutil.copytree(formats / "deepmind-torch", root / "folder")
    return folder / "model.pt", folder / "model.pt", []


def _step(formats: Path, root: Path) -> tuple[Path, Path, list[str]]:
    """A step of a training, whose config lies in the folder of the run."""
    step = shutil.copytree(formats / "griffin", root / "run" / "100")
    (step / "config.json").rename(root / "run" / "config.json")
    return step, step, []


def _run(formats: Path, root: Path) -> tuple[Path, Path, list[str]]:
    """A run, of which the last step is read."""
    step = shutil.copytree(formats / "griffin-orbax", root / "run" / "100")
    shutil.copy(step / "config.json", root / "run")
    return root / "run", step, []


def _adapter(formats: Path, root: Path) -> tuple[Path, Path, list[str]]:
    folder = root / "lora"
    folder.mkdir()
    module = "base_model.model.model.layers.0.mlp_block.up_proj"
    factors = {
        f"{module}.lora_A.weight": np.ones((1, CONFIG.width), "float32"),
        f"{module}.lora_B.weight": np.ones((CONFIG.mlp_width, 1), "float32"),
    }
    save_file(factors, folder / "adapter_model.safetensors")
    raw = {"peft_type": "LORA", "r": 1, "target_modules": r".*layers\.0\..*up_proj"}
    (folder / "adapter_config.json").write_text(json.dumps(raw))
    return formats / "source", folder, ["--adapter", str(folder)]


def _tokenizer(formats: Path, root: Path) -> tuple[Path, Path, list[str]]:
    """A tokenizer in the parent folder, as Google publishes it."""
    source = shutil.copytree(formats / "griffin", root / "model")
    (root / "tokenizer.json").write_text("{}")
    return source, root / "tokenizer.json", []


def _names(formats: Path, root: Path) -> tuple[Path, Path, list[str]]:
    table = root / "tables" / "names.toml"
    table.parent.mkdir()
    (table.parent / "config.json").write_text("{}")  # so that the folder may be overwritten
    rows = [f"foreign = {name!r}\ncanonical = {name!r}\n" for name in param_specs(CONFIG)]
    table.write_text("".join(f"[[tensor]]\n{row}" for row in rows))
    return formats / "griffin", table.parent, ["--names", str(table)]


@pytest.mark.parametrize("case", [_file, _step, _run, _adapter, _tokenizer, _names])
def test_what_is_read_is_not_overwritten(case: Callable[..., tuple], formats, tmp_path):
    source, destination, options = case(formats, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    arguments = ["convert", source, destination, "--to", "griffin", "--overwrite", *options]
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    assert isinstance(done.exception, ArgumentError), done.output
    assert "is not overwritten, since that would remove" in str(done.exception)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("to", ["hf", "deepmind-torch"])
def test_only_checkpoints_are_overwritten(to, formats, tmp_path):
    (tmp_path / "notes.md").write_text("years")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "old.pt").write_bytes((formats / "deepmind-torch" / "model.pt").read_bytes())

    def convert(name: str) -> BaseException | None:
        arguments = ["convert", formats / "source", tmp_path / name, "--to", to, "--overwrite"]
        return CliRunner().invoke(app, [str(a) for a in arguments]).exception

    for name in ("notes.md", "pipe"):
        assert "since it is no checkpoint's file: name another" in str(convert(name))
    assert (tmp_path / "notes.md").read_text() == "years" and (tmp_path / "pipe").is_fifo()
    assert convert("old.pt") is None and (tmp_path / "old.pt").is_dir()
