"""``bench convert --limits``: what is measured beside what, and the figures that come of it."""

import dataclasses
import io
import json

import pytest
from parity import BASE
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import conversion_limits as limits
from benchmarks.convert import conversions
from griffin_eval import config
from griffin_eval.cli.main import app
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.errors import ArgumentError

TINY = dataclasses.replace(BASE, width=256, lru_width=256, mlp_width=256, num_heads=1)
TINY = dataclasses.replace(
    TINY, vocab_size=4096, gate_blocks=1, block_pattern=("recurrent", "local_attention")
)
TINY = dataclasses.replace(TINY, num_layers=2)
LARGEST = 4096 * 256  # elements, the embedding
SCHEMES = {
    "bnb-nf4": "bitsandbytes nf4 in blocks of 64",
    "bnb-fp4": "bitsandbytes fp4 in blocks of 64",
    "bnb-int8": "bitsandbytes int8",
    "mlx-4": "MLX affine, 4 bits in groups of 64",
    "mlx-8": "MLX affine, 8 bits in groups of 64",
    **{f"gguf-{kind}": f"{kind} in blocks of" for kind in limits.GGUF if kind[0] == "Q"},
}


@pytest.fixture
def here(monkeypatch):
    """Conversions in this process, with times and memory that are made up.

    Returns:
        The folder that was read, whether it is the plain conversion's, and the dtypes and shapes
        that were written, of each measured conversion.
    """
    seen = []

    def measure(way, source, destination, target, mesh=None):
        conversions.WAYS[way](str(source), str(destination), target)
        plain = source.name == limits.PLAIN
        if destination.name == limits.OUTPUT:
            written = Checkpoint(destination)
            facts = {n: (t.shape, t.dtype) for n, t in written.container.tensors.items()}
            written.close()
            seen.append((source.name, plain, facts))
        others = sum(name == source.name for name, _, _ in seen)
        return {"seconds": 2.0 if plain else 2.0 + others, "bytes": 10**8}

    monkeypatch.setattr(limits, "measure", measure)
    monkeypatch.setitem(config.PRESETS, "tiny", TINY)
    return seen


def rows(text):
    """The cells of each row, by what was measured."""
    found = {}
    for line in text.splitlines()[2:]:
        found[line[:24].strip()] = [line[i : i + 21].strip() for i in range(24, 150, 21)]
    return found


@pytest.mark.slow
def test_every_codec_is_measured_beside_a_plain_conversion_to_the_same_tensors(tmp_path, here):
    out = io.StringIO()
    limits.run(Console(file=out, width=160), "tiny", tmp_path, 3)
    found = rows(out.getvalue())
    named = {name.replace("gguf-", "GGUF ") + " dequantised" for name in SCHEMES}
    named |= {"a LoRA of rank 16 merged", "GGUF F16 dequantised", "GGUF BF16 dequantised"}
    assert found.keys() == named
    for what, (own, plain, times, limit, memory, most) in found.items():
        assert own == "4.00 (3.00-5.00)", what
        assert plain == "2.00 (2.00-2.00)" and times == "2.00 (1.50-2.50)"
        assert limit == ("1.3" if "LoRA" in what else "2.5") and most == "400"
        nbytes = LARGEST * (4 if what.startswith("GGUF Q") else 2)
        assert memory == f"{(10**8 - nbytes) / 1e6:+.0f}"
    for number in range(0, len(here), 6):
        turn = here[number : number + 6]
        assert [plain for _, plain, _ in turn] == [True, False, False, True, True, False]
        assert len({name for name, plain, _ in turn if not plain}) == 1
        assert all(facts == turn[0][2] for *_, facts in turn)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("adapter", "griffin", "gguf-F16", "gguf-BF16"),
        *SCHEMES,
    }
    for name, scheme in SCHEMES.items():
        checkpoint = Checkpoint(tmp_path / name)
        assert scheme in checkpoint.container.describe()
        checkpoint.close()


@pytest.mark.slow
def test_what_only_hf_holds_is_left_out_for_other_models(tmp_path, here, monkeypatch):
    monkeypatch.setitem(config.PRESETS, "tiny", dataclasses.replace(TINY, embedding_scale=False))
    monkeypatch.setattr(limits, "GGUF", ("Q8_0",))
    out = io.StringIO()
    limits.run(Console(file=out, width=160), "tiny", tmp_path, 1)
    _, *measured = rows(out.getvalue())
    assert measured == ["a LoRA of rank 16 merged", "GGUF Q8_0 dequantised"]
    assert "MLX is left out: their files" in out.getvalue()


@pytest.mark.slow
def test_a_conversion_that_fails_is_a_row_and_the_exit_code(tmp_path, here, monkeypatch):
    monkeypatch.setattr(limits, "GGUF", ("Q8_0",))
    folder = tmp_path / "gguf-Q8_0"
    folder.mkdir()
    (folder / "model.gguf").write_bytes(b"GGUF")
    (folder / "config.json").write_text(json.dumps({}))
    out = io.StringIO()
    with pytest.raises(SystemExit) as ended:
        limits.run(Console(file=out, width=160), "tiny", tmp_path, 1)
    assert ended.value.code == 1
    *others, last = out.getvalue().splitlines()
    assert last.startswith("GGUF Q8_0 dequantised: failed: ") and len(others) == 8


def test_limits_and_one_format_do_not_go_together(tmp_path):
    asked = ["bench", "convert", str(tmp_path), "--limits", "--to", "hf"]
    error = CliRunner().invoke(app, asked).exception
    assert isinstance(error, ArgumentError) and "--limits does not go with --to" in str(error)
