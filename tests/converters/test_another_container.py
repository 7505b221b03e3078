"""A new container needs a folder of code and a line in a registry; here it stores .npy files."""

import dataclasses
import json

import numpy as np
import pytest
from parity import BASE, weights
from safetensors.numpy import save_file
from typer.testing import CliRunner

from griffin_eval import convert, verify
from griffin_eval.cli.main import app
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.configs.huggingface import to_huggingface
from griffin_eval.converters.containers.container import Container, ContainerKind, Writer
from griffin_eval.converters.containers.registry import CONTAINERS
from griffin_eval.converters.formats import FORMATS, Format
from griffin_eval.converters.naming.tables import CANONICAL
from griffin_eval.converters.tensors import FLOATS, in_memory

CONFIG = dataclasses.replace(
    BASE,
    vocab_size=11,
    width=8,
    mlp_width=6,
    lru_width=8,
    block_pattern=("recurrent", "local_attention"),
    num_layers=2,
)


def open_npy(folder):
    """Open a folder with one memory-mapped file for each tensor."""
    arrays = {f.stem: np.load(f, mmap_mode="r") for f in sorted(folder.glob("*.npy"))}
    tensors = {name: in_memory(array) for name, array in arrays.items()}
    return Container(tensors, "a file per tensor", lambda: folder.glob("*.npy"))


class NpyWriter(Writer):
    def __init__(self, folder, specs):
        super().__init__(folder, specs, FLOATS)
        self.folder = folder

    def _write(self, name, shape, dtype, chunks):
        flat = [np.array(chunk).reshape(-1) for chunk in chunks]
        assert {part.dtype.name for part in flat} == {dtype}
        np.save(self.folder / f"{name}.npy", np.concatenate(flat).reshape(shape))

    def _finish(self):
        pass

    def _release(self):
        pass


NPY = ContainerKind(
    noun="a folder of .npy files",
    looks_like=lambda path: any(path.glob("*.npy")),
    recognises=lambda names: any(name.endswith(".npy") for name in names),
    weight_files=lambda names, where: [name for name in names if name.endswith(".npy")],
    open=lambda path, item: open_npy(path),
    output_files=lambda specs, size: {name: f"{name}.npy" for name in specs},
    open_writer=lambda folder, specs, size, parts: NpyWriter(folder, specs),
)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    summary = "a folder of .npy files, canonical names"
    monkeypatch.setitem(CONTAINERS, "npy", NPY)
    monkeypatch.setitem(FORMATS, "npy", Format("npy", "npy", CANONICAL, "", summary))


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    save_file(weights(CONFIG), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(to_huggingface(CONFIG)))
    return folder


@pytest.mark.parametrize("other", FORMATS)
def test_conversions_to_it_and_from_it(source, tmp_path, other):
    original = Checkpoint(source)
    convert(original, tmp_path / "other", to=other)
    convert(tmp_path / "other", tmp_path / "npy", to="npy")
    written = Checkpoint(tmp_path / "npy")
    assert written.format is FORMATS["npy"]
    assert written.inspection.layout == "a file per tensor"
    convert(written, tmp_path / "back", to=other)
    for folder in ("npy", "back"):
        assert verify(original, tmp_path / folder).same
    for name, expected in weights(CONFIG).items():
        assert np.array_equal(np.load(tmp_path / "npy" / f"{name}.npy"), expected)


def test_commands(source, tmp_path):
    def run(*arguments):
        done = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "250"})
        assert done.exit_code == 0, done.output
        return done.output

    plan = run("convert", source, tmp_path / "npy", "--to", "npy", "--dry-run")
    assert "model.embed_tokens.weight.npy" in plan
    run("convert", source, tmp_path / "npy", "--to", "npy")
    assert json.loads(run("inspect", tmp_path / "npy", "--json"))["format"] == "npy"
    assert "are the same bit for bit" in run("verify", source, tmp_path / "npy")
    (tmp_path / "npy" / "config.json").unlink()  # the conversion does not need it
    said = f"--visible-keys {CONFIG.visible_keys} --embedding-scale --logits-soft-cap 30".split()
    run("convert", tmp_path / "npy", tmp_path / "hf", "--to", "hf", *said)
