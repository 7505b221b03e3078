"""``python -m benchmarks.convert``: its sources, its rows, and how it ends."""

import dataclasses
import sys

import pytest
import typer
from benchmark import benchmark
from parity import BASE
from typer.testing import CliRunner

import griffin_eval
from benchmarks.convert import run, sources
from benchmarks.convert.__main__ import bench_convert
from griffin_eval.config import PRESETS
from griffin_eval.errors import BadInput

TINY = dataclasses.replace(
    BASE,
    width=256,
    lru_width=256,
    mlp_width=256,
    num_heads=1,
    gate_blocks=1,
    vocab_size=512,
    num_layers=2,
    block_pattern=("recurrent", "local_attention"),
)
SCHEMES = {
    "bnb-nf4": "bitsandbytes nf4 in blocks of 64",
    "bnb-fp4": "bitsandbytes fp4 in blocks of 64",
    "bnb-int8": "bitsandbytes int8",
    "mlx-4": "MLX affine, 4 bits in groups of 64",
    "mlx-8": "MLX affine, 8 bits in groups of 64",
}


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", TINY)


@pytest.mark.slow
def test_every_direction_has_a_row_of_each_interpreter(tmp_path):
    pythons = "--python", sys.executable, "--python", sys.executable
    done = benchmark("convert", tmp_path, "--preset", "mqa-100m", "--rounds", 1, *pythons)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("griffin")]
    names = [row.split("  ")[0] for row in rows]
    assert names == [
        f"{route}, python {number}"
        for route in ("griffin to griffin-orbax", "griffin-orbax to griffin")
        for number in (1, 2)
    ]
    for row in rows:
        cells = [cell.strip() for cell in row.split("  ") if "(" in cell]
        seconds, limit, ratio = (float(cell.split()[0]) for cell in cells)
        assert ratio == pytest.approx(seconds / limit, rel=0.05)


@pytest.mark.parametrize("kind", [*sources.ENCODED, "gguf-Q4_0", "gguf-Q6_K", "gguf-BF16"])
def test_sources_are_what_their_codec_reads(kind, tmp_path, tiny):
    if kind in SCHEMES:
        sources.write_encoded("tiny", kind, tmp_path / "source")
    else:
        sources.write_gguf("tiny", kind.removeprefix("gguf-"), tmp_path / "source")
    checkpoint = griffin_eval.open_checkpoint(tmp_path / "source")
    assert SCHEMES.get(kind, "GGUF") in checkpoint.container.layout
    assert checkpoint.config == TINY
    griffin_eval.convert(checkpoint, tmp_path / "output", to="griffin")


@pytest.mark.slow
def test_dequantising_is_measured_beside_a_plain_conversion(tmp_path, tiny, capsys):
    names = ["LoRA of rank 16, merged", "bnb-fp4 dequantised", "GGUF Q8_0 dequantised"]
    every = run.conversions_with_limits("tiny", tmp_path)
    chosen = [conversion for conversion in every if conversion.name in names]
    assert run.run(chosen, tmp_path, 1, [sys.executable])
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == names
    limits = [[cell.strip() for cell in row if cell.strip()][4] for row in rows]
    assert limits == ["1.3", "2.5", "2.5"]
    assert {path.name for path in tmp_path.iterdir()} == {
        *("adapter", "griffin", "bnb-fp4", "gguf-Q8_0")
    }


@pytest.mark.slow
def test_a_conversion_that_fails_is_a_row(tmp_path, tiny, capsys):
    every = run.conversions_with_limits("tiny", tmp_path)
    chosen = [conversion for conversion in every if conversion.source == "gguf-Q8_0"]
    (tmp_path / "gguf-Q8_0").mkdir()
    (tmp_path / "gguf-Q8_0" / "model.gguf").write_bytes(b"GGUF")
    assert not run.run(chosen, tmp_path, 1, [sys.executable])
    assert "GGUF Q8_0 dequantised: failed: griffin-eval: " in capsys.readouterr().out


def test_a_library_that_is_missing_is_left_out(tmp_path, tiny, capsys, monkeypatch):
    monkeypatch.setitem(
        run.PEERS, "theirs", run.PEERS["Orbax's save"]._replace(modules=("no_one",))
    )
    conversion = run.Conversion(
        "griffin to x, theirs", "griffin", lambda path: None, (), peer="theirs"
    )
    assert run.run([conversion], tmp_path, 1, [sys.executable])
    assert "griffin to x, theirs is left out: no_one not installed" in capsys.readouterr().out


def test_bad_input_is_one_sentence(tmp_path):
    app = typer.Typer()
    app.command()(bench_convert)
    for options, sentence in (
        (("--preset", "griffin"), "unknown preset 'griffin'"),
        (("--chunks", "model=2"), "--chunks needs --to"),
        (("--to", "griffin", "--chunks", "model=2"), "--chunks is for formats in chunks"),
        (("--to", "griffin", "--limits"), "--limits does not go with --to"),
        (("--python", "/no/python"), "--python /no/python: no griffin-eval is installed"),
    ):
        error = CliRunner().invoke(app, [str(tmp_path / "out"), *options]).exception
        assert isinstance(error, BadInput) and sentence in str(error), options
        assert not (tmp_path / "out").exists()
