"""``python -m benchmarks.convert``: sources, rows and exit codes."""

import sys

import pytest
import typer
from benchmark import benchmark
from typer.testing import CliRunner

from benchmarks.convert.__main__ import bench_convert
from griffin_eval.errors import BadInput


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
        seconds, _, limit, ratio = (float(cell.split()[0]) for cell in cells)
        assert ratio == pytest.approx(seconds / limit, rel=0.05)


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
