"""Peak memory: pieces of two tensors, and whole tensors only where a layout changes."""

import dataclasses
import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from slow import ci, slow
from typer.testing import CliRunner

from griffin_eval import convert, verify
from griffin_eval.cli.main import app
from griffin_eval.config import GriffinConfig
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.containers.orbax.writer import OrbaxWriter
from griffin_eval.converters.convert import convert_checkpoint
from griffin_eval.converters.formats import FORMATS
from griffin_eval.converters.plan import make_plan
from griffin_eval.converters.tensors import PIECE_BYTES, LazyTensor
from griffin_eval.layout import param_specs

# Run the command line and print its peak anonymous memory.
_WATCHED = """
import re, sys, threading, time
seen = []
def watch():
    while True:
        status = open("/proc/self/status").read()
        seen.append(int(re.search(r"RssAnon:\\s+(\\d+)", status)[1]) * 1024)
        time.sleep(0.001)
threading.Thread(target=watch, daemon=True).start()
from griffin_eval.cli.main import app
app(standalone_mode=False)
print(max(seen))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Write a bfloat16 model whose largest tensors, the MLP's, have 40 MB."""
    config = GriffinConfig(
        vocab_size=20_000,
        width=512,
        mlp_width=20_000,
        num_heads=2,
        num_layers=2,
        lru_width=512,
        gate_blocks=2,
        block_pattern=("recurrent", "local_attention"),
        visible_keys=9,
        embedding_scale=True,
        logits_soft_cap=30.0,
    )
    rng = np.random.default_rng(0)
    weights = {
        spec.name: (rng.random(spec.shape, np.float32) - 0.5).astype(ml_dtypes.bfloat16)
        for spec in param_specs(config).values()
    }
    folder = tmp_path_factory.mktemp("model")
    save_file(weights, folder / "model.safetensors")
    raw = {"model_type": "griffin", **dataclasses.asdict(config)}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@pytest.fixture(scope="module")
def flax(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("flax") / "out"
    convert(model, folder, to="deepmind-flax")
    return folder


def peak(source, target, destination, *options) -> int:
    arguments = ["convert", source, destination, "--to", target, *options]
    done = subprocess.run(
        [sys.executable, "-c", _WATCHED, *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    ("target", "options", "megabytes"),
    [
        slow("griffin", (), 110),
        slow("griffin", ("--dtype", "float32"), 230),
        ci("deepmind-flax", (), 430),
        slow("griffin-orbax", (), 320),
    ],
    ids=str,
)
def test_memory_of_writing(model, tmp_path, target, options, megabytes):
    """Limits include 50 to 180 MB for Python and libraries, and up to 50 MB for thread timing."""
    assert peak(model, target, tmp_path / "out", *options) <= megabytes * 10**6


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("target, megabytes", [("griffin", 280), ("deepmind-torch", 560)])
def test_memory_of_reading_orbax(flax, tmp_path, target, megabytes):
    assert peak(flax, target, tmp_path / "out") <= megabytes * 10**6


def test_verify_reads_no_more_than_pieces_of_a_tensor_of_orbax(tmp_path, monkeypatch):
    config = GriffinConfig(
        **{"vocab_size": 3 * PIECE_BYTES // 32, "width": 8, "mlp_width": 8, "num_heads": 1},
        **{"num_layers": 1, "lru_width": 8, "gate_blocks": 1, "block_pattern": ("recurrent",)},
    )
    specs = {n.replace(".", "/"): (s.shape, "float32") for n, s in param_specs(config).items()}
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        with OrbaxWriter(tmp_path / name, specs) as writer:
            for tensor, (shape, _) in specs.items():
                writer.write(tensor, [np.ones(shape, np.float32)])
        raw = {"model_type": "griffin", **dataclasses.asdict(config)}
        (tmp_path / name / "config.json").write_text(json.dumps(raw))
    largest, read = [], LazyTensor.rows

    def noted(self, start, stop):
        array = read(self, start, stop)
        largest.append(array.nbytes)
        return array

    monkeypatch.setattr(LazyTensor, "rows", noted)
    assert verify(tmp_path / "one", tmp_path / "other").same
    assert PIECE_BYTES <= max(largest) <= 2 * PIECE_BYTES


def test_a_dry_run_says_it_all(model, tmp_path):
    arguments = ["convert", model, tmp_path / "out", "--to", "hf", "--max-shard-size", "50MB"]
    done = CliRunner().invoke(app, [*map(str, arguments), "--dry-run"], env={"COLUMNS": "250"})
    assert done.exit_code == 0, done.output
    plan = make_plan(Checkpoint(model), FORMATS["hf"])
    assert f"disk: {plan.nbytes} bytes\n" in done.output
    convert_checkpoint(plan, tmp_path / "out", max_shard_size=50 * 10**6)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    rows = {
        r[0]: r[-1] for line in done.output.splitlines() if (r := line.strip("│ ").split(" │ "))
    }
    rows = {name.strip(): file.strip() for name, file in rows.items()}
    for name, file in index["weight_map"].items():
        assert rows[name] == file
    assert f"in {len(set(index['weight_map'].values()))} files" in done.output
