"""Checkpoints quantised, against the libraries that read them."""

import dataclasses
import json
import os
import shutil
import warnings

import ml_dtypes
import numpy as np
import pytest
import torch
from adapters import load_base, logits, write_adapter, write_base
from hypothesis import given
from hypothesis import strategies as st
from parity import BASE, relative_error, tokens, weights
from quantised import (
    BITS,
    bits,
    bitsandbytes_weights,
    load_bitsandbytes,
    write_bitsandbytes,
    write_mlx,
)
from safetensors.numpy import save_file
from safetensors.torch import load_file
from slow import fast, slow
from typer.testing import CliRunner

from griffin_eval.cli.main import app
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.codecs.encode import ENCODINGS
from griffin_eval.converters.codecs.encoding import bands
from griffin_eval.errors import BadInput
from griffin_eval.layout import ParamSpec

DTYPES = ("bfloat16", "float32", "float16")
KINDS = {"bnb-nf4": "nf4", "bnb-int8": "int8"}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A base with rows of whole blocks, by dtype."""
    root = tmp_path_factory.mktemp("wide")

    def get(dtype="bfloat16"):
        if not (root / dtype).exists():
            config = dataclasses.replace(BASE, width=64, lru_width=64, mlp_width=128)
            write_base(root / dtype, config, getattr(torch, dtype))
        return root / dtype

    return get


@pytest.fixture(scope="module")
def quantised(wide, tmp_path_factory):
    """A base quantised, by name and dtype, each once."""
    root = tmp_path_factory.mktemp("quantised")

    def get(name, dtype="bfloat16"):
        folder = root / f"{name}-{dtype}"
        if not folder.exists():
            run("convert", wide(dtype), folder, "--to", "hf", "--quantize", name)
        return folder

    return get


def run(*arguments, code=0):
    done = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "250"})
    assert done.exit_code == code, done.output
    return done.output


def refused(*arguments):
    """The sentence with which the command refuses."""
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert isinstance(done.exception, BadInput), done.output
    assert "\n" not in str(done.exception)
    return str(done.exception)


def matrix(draw, rows, columns, dtype, zeros=True):
    """Rows of several magnitudes, with blocks of zeros, of one value, and of tiny ones."""
    rng = np.random.default_rng(draw)
    scale = rng.choice([1e-30, 1e-9, 1e-4, 1, 300], (rows, 1))
    values = rng.standard_normal((rows, columns)) * scale
    flat = values.reshape(-1)
    for value in (0.0, -0.0, 1.5, -2.0, 1e-7):
        at = rng.integers(flat.size)
        flat[at : at + 130] = value
    return values.astype(getattr(ml_dtypes, dtype, dtype))


def encoded(name, rows, piece):
    """The parts of a matrix that come in pieces of so many rows, and what is read back."""
    spec = ParamSpec(name="x.weight", shape=rows.shape, axes=("out", "in"))
    encoding = ENCODINGS[name]
    assert encoding.takes(spec)
    pieces = (rows[i : i + piece] for i in range(0, len(rows), piece))
    done = [encoding.encode(band) for band in bands(pieces, encoding.together(spec))]
    constants = encoding.constants(spec, rows.dtype.name)
    parts = [np.concatenate(found) for found in zip(*(one.parts for one in done), strict=True)]
    stored = encoding.stored(spec, rows.dtype.name)
    tensors = dict(zip(stored, [*parts, *constants.values()], strict=True))
    for key, (shape, dtype) in stored.items():
        assert (tensors[key].size, tensors[key].dtype.name) == (np.prod(shape), dtype)
        tensors[key] = tensors[key].reshape(shape)
    return tensors, np.concatenate([one.values for one in done])


def same(found, expected):
    """Whether arrays, or tensors, are the same bit for bit."""
    if isinstance(expected, torch.Tensor):
        expected = bits(expected)
        return np.array_equal(np.ascontiguousarray(found)[..., None].view(np.uint8), expected)
    return found.dtype == expected.dtype and found.tobytes() == expected.tobytes()


def tensor(rows):
    if rows.dtype.name == "bfloat16":
        return torch.from_numpy(rows.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(rows)


# Arguments of `matrix`, the number of rows of a piece before its dtype.
any_matrix = given(
    st.integers(0, 1 << 30),
    st.integers(1, 40),
    st.integers(1, 200),
    st.integers(1, 40),
    st.sampled_from(DTYPES),
)


@pytest.mark.slow
@any_matrix
def test_nf4_is_what_bitsandbytes_gives(seed, rows, columns, piece, dtype):
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = matrix(seed, rows, columns, dtype)
    packed, state = functional.quantize_4bit(tensor(weight), quant_type="nf4")
    expected = {"x.weight": packed} | {
        f"x.weight.{key}": value for key, value in state.as_dict(packed=True).items()
    }
    found, read = encoded("bnb-nf4", weight, piece)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert same(found[name], value), name
    if columns % 64 == 0:
        assert same(read, functional.dequantize_4bit(packed, state))


@pytest.mark.slow
@any_matrix
def test_int8_is_what_bitsandbytes_gives(seed, rows, columns, piece, dtype):
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = matrix(seed, rows, columns, dtype)
    numbers, scales, _ = functional.int8_vectorwise_quant(tensor(weight))
    found, read = encoded("bnb-int8", weight, piece)
    assert same(found["x.weight"], numbers)
    assert same(found["x.SCB"], scales)
    assert same(read, functional.int8_vectorwise_dequant(numbers, scales))


@pytest.mark.slow
@given(
    st.integers(0, 1 << 30),
    st.integers(1, 40),
    st.integers(1, 4),
    st.integers(1, 40),
    st.sampled_from(DTYPES),
    st.sampled_from((4, 8)),
)
def test_affine_is_what_mlx_gives(seed, rows, groups, piece, dtype, width):
    mx = pytest.importorskip("mlx.core")
    weight = matrix(seed, rows, 64 * groups, dtype)
    if dtype == "bfloat16":
        given = mx.array(weight.view(np.uint16)).view(mx.bfloat16)
    else:
        given = mx.array(weight)
    expected = mx.quantize(given, group_size=64, bits=width)
    found, read = encoded(f"mlx-{width}", weight, piece)
    for (name, value), other in zip(found.items(), expected, strict=True):
        assert same(value, of_mlx(mx, other)), name
    assert same(read, of_mlx(mx, mx.dequantize(*expected, group_size=64, bits=width)))


def of_mlx(mx, array):
    if array.dtype == mx.bfloat16:
        return np.array(array.view(mx.uint16)).view(ml_dtypes.bfloat16)
    return np.array(array)


@pytest.mark.parametrize("name", fast(["mlx-4"], list(ENCODINGS)))
def test_what_is_written_is_read_back(wide, quantised, name):
    folder = quantised(name)
    assert " bits an element" in run("inspect", folder)
    assert "parameters are as its manifest says" in run("verify", folder)
    checkpoint, source = Checkpoint(folder), Checkpoint(wide())
    taken = checkpoint.container.decoding.parameters
    assert taken
    for spec_name, dtype in source.dtypes.items():
        if spec_name in taken:
            continue
        assert checkpoint.dtypes[spec_name] == dtype
        assert same(checkpoint.numpy(spec_name), source.numpy(spec_name))
    entries = json.loads((folder / "griffin_manifest.json").read_text())
    assert entries["quantised"] == name
    assert entries["source"]["path"] == str(wide())
    for spec_name, entry in entries["tensors"].items():
        assert entry.get("quantised_from") == ("bfloat16" if spec_name in taken else None)
        assert entry["dtype"] == checkpoint.dtypes[spec_name]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, dtype",
    [
        ("bnb-nf4", "bfloat16"),
        ("bnb-int8", "float16"),
        slow("bnb-nf4", "float16"),
        slow("bnb-nf4", "float32"),
    ],
)
def test_files_are_those_that_transformers_writes(wide, quantised, tmp_path, name, dtype):
    """In 8 bits for float16 alone: it rounds to that first."""
    write_bitsandbytes(tmp_path / "theirs", wide(dtype), "auto", **BITS[KINDS[name]])
    ours, theirs = (
        load_file(folder / "model.safetensors")
        for folder in (quantised(name, dtype), tmp_path / "theirs")
    )
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert ours[key].dtype == value.dtype and ours[key].shape == value.shape, key
        assert torch.equal(ours[key].view(torch.uint8), value.view(torch.uint8)), key
    stated, expected = (
        json.loads((folder / "config.json").read_text())["quantization_config"]
        for folder in (quantised(name, dtype), tmp_path / "theirs")
    )
    compute = dtype if name == "bnb-nf4" else "float32"  # transformers' default is float32
    assert stated == expected | {"bnb_4bit_compute_dtype": compute}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, dtype",
    [("bnb-nf4", "float32"), *(slow(name, "bfloat16") for name in KINDS)],
)
def test_transformers_loads_it(quantised, name, dtype):
    expected = bitsandbytes_weights(quantised(name, dtype))
    checkpoint = Checkpoint(quantised(name, dtype))
    assert checkpoint.dtypes.keys() == expected.keys()
    for key, value in expected.items():
        assert same(checkpoint.numpy(key), value), key
    if (name, dtype) != ("bnb-nf4", "float32"):  # others round activations
        return
    ids = tokens(BASE, 2, 2 * BASE.visible_keys + 3)
    found = ours(checkpoint, ids)
    assert relative_error(found, logits(load_bitsandbytes(quantised(name, dtype)), ids)) < 2e-5


def ours(checkpoint, ids):
    from griffin_eval.model_torch.loading import load

    model = load(checkpoint)
    with torch.no_grad():
        hidden, _ = model.step(
            torch.from_numpy(ids), torch.full((len(ids),), ids.shape[1]), model.init_state(len(ids))
        )
        return model.logits(hidden).numpy()


@pytest.mark.parametrize("width", (4, 8))
@pytest.mark.parametrize("dtype", fast(["bfloat16"], DTYPES))
def test_files_are_those_that_mlx_writes(wide, quantised, tmp_path, width, dtype):
    write_mlx(tmp_path / "theirs", wide(dtype), dtype, width, 64)
    folder = quantised(f"mlx-{width}", dtype)
    ours, theirs = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "theirs"))
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert ours[key].dtype == value.dtype and ours[key].shape == value.shape, key
        assert torch.equal(ours[key].view(torch.uint8), value.view(torch.uint8)), key
    stated, expected = (
        json.loads((f / "config.json").read_text()) for f in (folder, tmp_path / "theirs")
    )
    for key in ("quantization", "quantization_config"):
        assert stated[key] == expected[key]


@pytest.mark.parametrize("width", fast([4], (4, 8)))
def test_mlx_lm_loads_it(quantised, tmp_path, width):
    """Its own model, of the quantised weights and of the dequantised ones."""
    mx = pytest.importorskip("mlx.core")
    mlx_lm = pytest.importorskip("mlx_lm.utils")
    folder = quantised(f"mlx-{width}", "float32")
    run("convert", folder, tmp_path / "plain", "--to", "hf")
    ids = mx.array(tokens(BASE, 2, 2 * BASE.visible_keys + 3))
    found, expected = (
        np.array(mlx_lm.load_model(path)[0](ids)) for path in (folder, tmp_path / "plain")
    )
    assert relative_error(found, expected) < 2e-5
    # Its norms add 1e-5 where the config says 1e-6, so that it is near ours only.
    assert relative_error(found, ours(Checkpoint(folder), np.array(ids))) < 2e-2


@pytest.mark.slow
def test_mlx_lm_runs_one_dtype_of_16_bits_alone(wide, quantised, tmp_path, caplog):
    """Its recurrence asserts that decays have the dtype of what they decay."""
    mx = pytest.importorskip("mlx.core")
    mlx_lm = pytest.importorskip("mlx_lm.utils")
    ids = mx.array(tokens(BASE, 1, 5))
    folder = quantised("mlx-4")
    logits = np.array(mlx_lm.load_model(folder)[0](ids).astype(mx.float32))
    assert np.isfinite(logits).all()
    assert not caplog.messages
    command = ("convert", wide("float32"), tmp_path / "mixed", "--to", "hf", "--quantize", "mlx-4")
    run(*command, "--dtype", "bfloat16")
    (said,) = caplog.messages
    assert "mlx_lm reads this file but cannot run it, since recurrent_param is float32" in said
    assert said.endswith("--dtype bfloat16,recurrent_param=bfloat16 gives one that it runs")
    with pytest.raises(AssertionError):
        mlx_lm.load_model(tmp_path / "mixed")[0](ids)


@pytest.mark.slow
def test_adapters_are_merged_before(wide, tmp_path):
    write_adapter(tmp_path / "adapter", wide("float32"), target_modules=["linear_x", "q_proj"])
    run(
        "convert",
        wide("float32"),
        tmp_path / "merged",
        "--to",
        "hf",
        "--adapter",
        tmp_path / "adapter",
    )
    once = (tmp_path / "once", "--to", "hf", "--quantize", "bnb-nf4")
    run("convert", wide("float32"), *once, "--adapter", tmp_path / "adapter")
    run("convert", tmp_path / "merged", tmp_path / "twice", *once[1:])
    assert "are the same bit for bit" in run("verify", tmp_path / "once", tmp_path / "twice")
    run("verify", tmp_path / "once")


def test_dtype_is_that_which_is_quantised(wide, quantised, tmp_path):
    run(
        *("convert", wide("float32"), tmp_path / "out", "--to", "hf", "--quantize", "mlx-4"),
        *("--dtype", "bfloat16,recurrent_param=bfloat16"),
    )
    assert "are the same bit for bit" in run("verify", tmp_path / "out", quantised("mlx-4"))


@pytest.mark.slow
def test_shards_and_what_is_planned(wide, quantised, tmp_path):
    flags = ("--to", "hf", "--quantize", "bnb-nf4", "--max-shard-size", "3KB")
    plan = run("convert", wide(), tmp_path / "out", *flags, "--dry-run")
    assert "model.layers.0.temporal_block.linear_x.weight.absmax" in plan
    run("convert", wide(), tmp_path / "out", *flags)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 20
    assert "are the same bit for bit" in run("verify", tmp_path / "out", quantised("bnb-nf4"))
    stored = sum(len(v.numpy().tobytes()) for v in _tensors(tmp_path / "out").values())
    assert f"disk: {stored} bytes" in plan


def _tensors(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= {n: t.view(torch.uint8) for n, t in load_file(file).items() if t.ndim}
        found |= {n: t for n, t in load_file(file).items() if not t.ndim}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("after", fast([25], range(1, 42, 4)))
def test_resumed_where_parts_of_a_parameter_are_in_several_files(
    wide, quantised, tmp_path, monkeypatch, after
):
    from griffin_eval.converters.output import journal

    add, count = journal.Journal.add, 0

    def stop(self, *arguments):
        nonlocal count
        add(self, *arguments)
        count += 1
        if count == after:
            raise KeyboardInterrupt

    flags = ("--to", "hf", "--quantize", "bnb-nf4", "--max-shard-size", "1KB", "--resume")
    with monkeypatch.context() as patched:
        patched.setattr(journal.Journal, "add", stop)
        CliRunner().invoke(app, ["convert", str(wide()), str(tmp_path / "out"), *flags])
    assert not (tmp_path / "out").exists()
    run("convert", wide(), tmp_path / "out", *flags)
    assert "are the same bit for bit" in run("verify", tmp_path / "out", quantised("bnb-nf4"))
    run("verify", tmp_path / "out")


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--to", "griffin", "--quantize", "bnb-nf4"), "--quantize bnb-nf4 goes with --to hf"),
        (("--to", "hf", "--quantize", "bnb-nf5"), "did you mean 'bnb-nf4'"),
        (("--to", "hf", "--quantize", "bnb-nf4", "--dtype", "float64"), "is float64, and only"),
    ],
)
def test_refusals(wide, tmp_path, flags, message):
    assert message in refused("convert", wide(), tmp_path / "out", *flags)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("name", ("bnb-nf4", "mlx-8"))
def test_what_is_quantised_is_not_quantised_again(quantised, tmp_path, name):
    flags = ("--to", "hf", "--quantize", "bnb-int8")
    assert "is quantised already" in refused("convert", quantised(name), tmp_path / "out", *flags)


def test_rows_that_are_no_groups(tmp_path):
    write_base(tmp_path / "narrow")
    flags = ("--to", "hf", "--quantize")
    found = refused("convert", tmp_path / "narrow", tmp_path / "out", *flags, "mlx-4")
    assert "no matrix of this model has rows of whole groups" in found
    run("convert", tmp_path / "narrow", tmp_path / "out", *flags, "bnb-nf4")
    run("verify", tmp_path / "out")


def test_complex_gates_are_refused(tmp_path):
    config = dataclasses.replace(BASE, complex_gates=True)
    (tmp_path / "complex").mkdir()
    save_file(weights(config), tmp_path / "complex/model.safetensors")
    raw = {"model_type": "griffin", **dataclasses.asdict(config)}
    (tmp_path / "complex/config.json").write_text(json.dumps(raw))
    flags = ("--to", "hf", "--quantize", "mlx-8")
    assert "complex_gates" in refused("convert", tmp_path / "complex", tmp_path / "out", *flags)


def test_values_that_are_not_finite_are_named(wide, tmp_path):
    shutil.copytree(wide("float32"), tmp_path / "broken")
    tensors = {k: v.numpy() for k, v in load_file(tmp_path / "broken/model.safetensors").items()}
    name = "model.layers.1.mlp_block.up_proj.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][3, 5] = np.inf
    save_file(tensors, tmp_path / "broken/model.safetensors", {"format": "pt"})
    flags = ("--to", "hf", "--quantize", "bnb-nf4")
    found = refused("convert", tmp_path / "broken", tmp_path / "out", *flags)
    assert f"{name}: 1 values are NaN or infinite" in found
    assert not (tmp_path / "out").exists()


def test_plain_conversions_load(wide, quantised, tmp_path):
    """What was quantised converts back to what transformers loads without any library."""
    run("convert", quantised("mlx-4"), tmp_path / "out", "--to", "hf")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = dict(load_base(tmp_path / "out").named_parameters())
    checkpoint = Checkpoint(quantised("mlx-4"))
    for name, value in loaded.items():
        assert same(checkpoint.numpy(name), value.detach()), name
