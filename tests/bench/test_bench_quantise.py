"""What quantising is measured to cost: ``bench quantize``, and encodings in ``bench convert``."""

import dataclasses
import io
import json
import re

import numpy as np
import pytest
from parity import BASE
from rich.console import Console
from slow import fast
from typer.testing import CliRunner

from griffin_eval import config
from griffin_eval.bench import convert
from griffin_eval.checkpoints import folder
from griffin_eval.cli.main import app
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.codecs.encode import ENCODINGS
from griffin_eval.crosscheck.logits import divergence, log_softmax
from griffin_eval.layout import param_specs


@pytest.fixture
def checkpoint():
    return Checkpoint(folder("bytes_griffin"))


@pytest.mark.parametrize("name", fast(["mlx-4"], ENCODINGS))
def test_groups_are_quantised_as_conversions_do_it(checkpoint, tmp_path, name):
    from griffin_eval.bench.quantisation import quantised

    source, out = str(checkpoint.folder), str(tmp_path / "out")
    done = CliRunner().invoke(app, ["convert", source, out, "--to", "hf", "--quantize", name])
    assert done.exit_code == 0, done.output
    written = Checkpoint(tmp_path / "out")
    for key in written.container.decoding.parameters:
        spec = param_specs(checkpoint.config)[key]
        found = quantised(checkpoint.numpy(key), spec, ENCODINGS[name])
        assert np.array_equal(found, written.numpy(key).astype(np.float32)), key


def test_what_is_no_matrix_is_near_itself(checkpoint):
    from griffin_eval.bench.quantisation import quantised

    for spec in param_specs(checkpoint.config).values():
        value = checkpoint.numpy(spec.name).astype(np.float32)
        eight, four = (quantised(value, spec, ENCODINGS[name]) for name in ("mlx-8", "mlx-4"))
        step = (value.max() - value.min()) / 255
        assert np.abs(eight - value).max() <= 1.01 * step
        assert np.abs(four - value).max() <= 1.01 * 17 * step


@pytest.mark.slow
def test_costs_are_those_of_a_quantised_model(tmp_path):
    """The row of what --quantize takes, against transformers' own model of the quantised file."""
    import torch
    from adapters import load_base

    command = ["bench", "quantize", "--checkpoints", "bytes_griffin", "--tokens", "300", "--json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    rows = {(row["group"], row["encoding"]): row for row in json.loads(done.stdout)}
    assert {name for _, name in rows} == set(ENCODINGS)
    assert ("RG-LRU: Λ", "bnb-nf4") in rows
    whole, source = tmp_path / "whole", str(folder("bytes_griffin"))
    for out, flags in (
        (whole, ["--dtype", "float32"]),
        (tmp_path / "q", ["--quantize", "mlx-4"]),
        (tmp_path / "plain", ["--dtype", "float32"]),
    ):
        given = str(tmp_path / "q") if out.name == "plain" else source
        done = CliRunner().invoke(app, ["convert", given, str(out), "--to", "hf", *flags])
        assert done.exit_code == 0, done.output
    from pydoc_data.topics import topics

    from griffin_eval.text.load import load_tokenizer

    text = "\n\n".join(topics[topic] for topic in sorted(topics))
    ids = np.array([[2, *load_tokenizer(whole).encode(text[:600])]])[:, :301]
    logits = []
    for path in (whole, tmp_path / "plain"):
        with torch.no_grad():
            logits.append(
                load_base(path, torch.float32)(torch.tensor(ids[:, :-1])).logits[0].numpy()
            )
    kl = divergence(*logits)
    bits = [-log_softmax(x)[np.arange(300), ids[0, 1:]].mean() / np.log(2) for x in logits]
    row = rows["what --quantize takes", "mlx-4"]
    assert row["kl"] == pytest.approx(kl.mean(), rel=1e-3)
    assert row["largest_kl"] == pytest.approx(kl.max(), rel=1e-3)
    assert row["bits"] == pytest.approx(bits[0], rel=1e-4)
    assert row["more_bits"] == pytest.approx(bits[1] - bits[0], abs=1e-4)


@pytest.mark.slow
def test_bench_convert_has_the_encodings(tmp_path, monkeypatch):
    tiny = dataclasses.replace(BASE, width=64, lru_width=64, mlp_width=128)
    monkeypatch.setitem(config.PRESETS, "tiny", tiny)
    routes = [convert.Route("hf", name, way=convert.QUANTISE) for name in ENCODINGS]
    assert set(routes) <= set(convert._routes(["hf"]))
    monkeypatch.setattr(convert, "_routes", lambda names: iter(routes))
    out = io.StringIO()
    convert.run(Console(file=out, width=200), "tiny", tmp_path, 1)
    lines = {line[:62].strip(): line[62:].split() for line in out.getvalue().splitlines()[2:]}
    assert list(lines) == [str(route) for route in routes]
    for cells in lines.values():
        assert len(cells) == 6 and re.fullmatch(r"\d+\.\d\d", cells[0]), cells
