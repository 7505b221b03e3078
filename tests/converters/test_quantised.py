"""Quantised checkpoints, compared with the libraries that quantise them."""

import dataclasses
import json
import shutil
from itertools import product

import numpy as np
import pytest
import torch
from adapters import load_base, write_base
from parity import BASE
from quantised import (
    BITS,
    bits,
    bitsandbytes_weights,
    write_bitsandbytes,
    write_mlx,
)
from safetensors.torch import load_file, save_file
from slow import ci, slow
from typer.testing import CliRunner

from griffin_eval.cli.main import app
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.codecs import bitsandbytes
from griffin_eval.converters.codecs.decode import quantised
from griffin_eval.converters.containers.safetensors.reader import open_safetensors
from griffin_eval.errors import CheckpointError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    write_base(folder)
    return folder


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Write a base whose rows are whole blocks; bitsandbytes' AVX-512 kernel uses wrong scales
    for other rows."""
    folder = tmp_path_factory.mktemp("wide")
    write_base(folder, dataclasses.replace(BASE, width=64, lru_width=64, mlp_width=128))
    return folder


@pytest.fixture(scope="module")
def written(wide, tmp_path_factory):
    """Return a function that writes bitsandbytes' checkpoint of a kind in BITS and a dtype once."""
    root = tmp_path_factory.mktemp("bitsandbytes")

    def get(kind, dtype=torch.bfloat16):
        folder = root / f"{kind}-{dtype}"
        if not folder.exists():
            write_bitsandbytes(folder, wide, dtype, **BITS[kind])
        return folder

    return get


def run(*arguments, code=0):
    done = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "250"})
    assert done.exit_code == code, done.output
    return done.output


def expect_weights(checkpoint, expected):
    assert checkpoint.dtypes.keys() == expected.keys()
    for name, value in expected.items():
        assert f"torch.{checkpoint.dtypes[name]}" == str(value.dtype), name
        for found in (
            checkpoint.numpy(name),
            np.concatenate(list(checkpoint.pieces(name, 500))),
        ):
            assert found.shape == tuple(value.shape), name
            # bitsandbytes gives fp4's second zero a sign that depends on the processor.
            read = torch.from_numpy(found.copy().view(np.uint8)).view(value.dtype)
            assert torch.equal(read, value), name
        assert torch.equal(checkpoint.torch(name), value), name


@pytest.mark.parametrize(
    "kind, dtype",
    [
        ci(kind, dtype)
        if kind in ("nf4, double", "int8") and dtype == torch.bfloat16
        else slow(kind, dtype)
        for kind in BITS
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ],
)
def test_weights_are_those_that_bitsandbytes_dequantises(written, kind, dtype):
    folder = written(kind, dtype)
    checkpoint = Checkpoint(folder)
    expect_weights(checkpoint, bitsandbytes_weights(folder))
    dtypes = {checkpoint.dtypes[name] for name in quantised(checkpoint.container)}
    assert dtypes == {"float32" if kind == "int8" else str(dtype).removeprefix("torch.")}


@pytest.mark.parametrize("kind", ["nf4, double", "int8"])
def test_a_file_of_torch_save_is_read_as_well(written, tmp_path, kind):
    folder = written(kind)
    saved, out = tmp_path / "saved", tmp_path / "out"
    saved.mkdir()
    torch.save(load_file(folder / "model.safetensors"), saved / "pytorch_model.bin")
    shutil.copy(folder / "config.json", saved)
    expect_weights(Checkpoint(saved), bitsandbytes_weights(folder))
    run("convert", saved, out, "--to", "hf")
    assert "dequantised from bitsandbytes" in (out / "README.md").read_text()


def save_state(folder, name, packed, state):
    """Save one parameter as bitsandbytes does."""
    parts = {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}
    save_file({name: packed, **parts}, folder / "model.safetensors")


@pytest.mark.parametrize(
    "shape, block, kind, double",
    [
        ci((7, 33), 64, "nf4", False),  # rows start inside bytes, and the last block is partial
        ci((5, 13), 64, "nf4", True),
        slow((50, 70), 64, "fp4", True),
        slow((129, 130), 128, "nf4", True),  # several blocks of scales
        slow((64, 520), 64, "nf4", True),
        slow((3, 2), 1024, "nf4", False),
    ],
)
def test_any_shape_and_block_in_any_pieces(tmp_path, shape, block, kind, double):
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    packed, state = functional.quantize_4bit(
        weight, blocksize=block, compress_statistics=double, quant_type=kind
    )
    expected = bits(functional.dequantize_4bit(packed, state))
    save_state(tmp_path, "w", packed, state)
    read = bitsandbytes.decoded(open_safetensors(tmp_path).tensors)
    assert list(read) == ["w"]
    rows, row = shape[0], 2 * shape[1]
    for nbytes in (1, row, 3 * row, 1 << 20):
        pieces = list(read["w"].pieces(nbytes))
        assert len(pieces) == -(-rows // max(1, nbytes // row))
        assert np.array_equal(np.concatenate(pieces)[..., None].view(np.uint8), expected)
    for start, stop in product((0, 1, 2, rows - 1), (1, 2, rows, rows + 5)):
        part = read["w"].rows(start, stop)[..., None].view(np.uint8)
        assert np.array_equal(part, expected[start:stop])
    cut = (slice(1, 3), slice(1, 2))
    assert np.array_equal(read["w"].read(cut)[..., None].view(np.uint8), expected[cut])


MLX = [(bits, group, "bfloat16") for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64)]
MLX += [(4, 32, "float16"), (6, 32, "float32")]
MLX = [case if case in [(3, 64, "bfloat16"), (4, 32, "float16")] else slow(*case) for case in MLX]


@pytest.mark.parametrize("bits, group, dtype", MLX)
def test_weights_are_those_that_mlx_dequantises(wide, tmp_path, bits, group, dtype):
    expected = write_mlx(tmp_path / "mlx", wide, dtype, bits, group)
    checkpoint = Checkpoint(tmp_path / "mlx")
    assert checkpoint.dtypes.keys() == expected.keys()
    assert set(checkpoint.dtypes.values()) == {dtype}
    for name, value in expected.items():
        for nbytes in (1, 300, 1 << 20):
            found = np.concatenate(list(checkpoint.pieces(name, nbytes)))
            assert found.shape == value.shape, name
            assert np.array_equal(found.view(np.uint8), value.view(np.uint8)), name
        assert np.array_equal(checkpoint.numpy(name).view(np.uint8), value.view(np.uint8)), name
    parameters = quantised(checkpoint.container)
    assert any("linear" in name or "proj" in name for name in parameters)
    width = 32 if dtype == "float32" else 16
    assert {facts.bits for facts in parameters.values()} == {bits + 2 * width / group}


def test_commands_with_a_checkpoint_of_mlx(base, tmp_path):
    write_mlx(tmp_path / "mlx", base, "bfloat16", 4, 32)
    facts = json.loads(run("inspect", tmp_path / "mlx", "--json"))
    assert facts["quantised"]["schemes"]["MLX affine, 4 bits in groups of 32"]["bits"] == 5
    run("convert", tmp_path / "mlx", tmp_path / "out", "--to", "hf")
    assert "are the same bit for bit" in run("verify", tmp_path / "mlx", tmp_path / "out")
    assert "quantization" not in json.loads((tmp_path / "out" / "config.json").read_text())
    load_base(tmp_path / "out")


@pytest.fixture(scope="module")
def mlx(base, tmp_path_factory):
    """Write a checkpoint of MLX in 4 bits."""
    folder = tmp_path_factory.mktemp("written") / "mlx"
    write_mlx(folder, base, "float16", 4, 32)
    return folder


def settings(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config["quantization"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


def test_modules_with_bits_of_their_own(base, tmp_path):
    expected = write_mlx(tmp_path / "mlx", base, "float16", 8, 32)
    settings(tmp_path / "mlx", bits=4, **{module: {"bits": 8} for module in modules(tmp_path)})
    checkpoint = Checkpoint(tmp_path / "mlx")
    for name, value in expected.items():
        assert np.array_equal(checkpoint.numpy(name), value)


def modules(root):
    names = load_file(root / "mlx" / "model.safetensors")
    return [name.removesuffix(".scales") for name in names if name.endswith(".scales")]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"bits": 8}, "scales of shape|no groups of"),
        ({"bits": 7}, "has bits 7 in the config"),
        ({"group_size": 64}, "scales of shape|no groups of"),
        ({"group_size": -32}, "has group_size -32"),
        ({"mode": "mxfp4"}, "in the mode 'mxfp4', and only 'affine' is read"),
    ],
)
def test_settings_of_mlx_that_do_not_fit(mlx, tmp_path, changes, message):
    shutil.copytree(mlx, tmp_path / "mlx")
    settings(tmp_path / "mlx", **changes)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path / "mlx")
    run("inspect", tmp_path / "mlx", code=1)


@pytest.mark.parametrize(
    "part, value, message",
    [
        ("biases", None, "has scales, but no biases"),
        ("scales", None, "is U32"),
        ("biases", torch.zeros(32, 1), "has biases of float32"),
        ("biases", torch.zeros(31, 1).half(), r"has biases of shape \(31, 1\), expected \(32, 1\)"),
        ("weight", torch.zeros(32, 4), "is float32, .32, 4., expected a matrix of U32"),
        ("weight", torch.zeros(32, 5, dtype=torch.uint32), "has rows of 160 bits, no groups"),
        ("weight", torch.zeros(32, 8, dtype=torch.uint32), "has scales of shape"),
    ],
)
def test_damaged_parts_of_mlx_are_named(mlx, tmp_path, part, value, message):
    change = without(f"{X}.{part}") if value is None else put(f"{X}.{part}", value)
    expect_refusal(mlx, tmp_path, change, message)


X = "model.layers.0.temporal_block.linear_x"
STATE = f"{X}.weight.quant_state.bitsandbytes__nf4"


def edit(**changes):
    """Return a function that changes the quantisation state of one parameter."""

    def change(tensors):
        state = json.loads(bytes(tensors[STATE].tolist())) | changes
        text = json.dumps({key: value for key, value in state.items() if value != "absent"})
        tensors[STATE] = torch.tensor(list(text.encode()), dtype=torch.uint8)

    return change


def without(name):
    return lambda tensors: tensors.pop(name)


def put(name, value):
    return lambda tensors: tensors.__setitem__(name, value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change, message",
    [
        (without(f"{X}.weight.absmax"), f"'{X}.weight' lacks its 'absmax'"),
        (without(f"{X}.weight.nested_quant_map"), "lacks its 'nested_quant_map'"),
        (without(f"{X}.weight"), "has no weight"),
        (put(STATE.replace("nf4", "fp4"), torch.zeros(3, dtype=torch.uint8)), "has 2 of the"),
        (put(STATE, torch.zeros(9, dtype=torch.uint8)), "has a state that is no JSON"),
        (put(STATE, torch.zeros(20_000, dtype=torch.uint8)), "a state of 20000 bytes"),
        (edit(shape=[32, -32]), r"a state with shape \[32, -32\]"),
        (edit(shape=[1 << 40, 1 << 40]), "bytes, but shape"),
        (edit(shape=[64, 66]), "has 2048 bytes, but shape .64, 66. needs 2112 bytes"),
        (edit(shape=[32, 128]), r"of another shape .*is \(32, 128\), expected \(64, 64\)"),
        (edit(dtype="int8"), "a state with dtype 'int8'"),
        (edit(blocksize=-64), "blocksize -64"),
        (edit(blocksize=128), r"has 'absmax' of U8, \(64,\), expected U8, \(32,\)"),
        (edit(quant_type="fp4"), "has quant_type 'fp4', expected 'nf4'"),
        (edit(nested_blocksize="absent"), "nested_blocksize None"),
        (edit(nested_offset=float("nan")), "nested_offset nan"),
        (put(f"{X}.weight.quant_map", torch.zeros(16)), "a quant_map that is not that of nf4"),
        (put(f"{X}.weight", torch.zeros(2, 1024, dtype=torch.uint8)), "expected packed elements"),
        (put(f"{X}.SCB", torch.zeros(32)), "expected a matrix of I8"),
    ],
)
def test_damaged_parts_of_4_bits_are_named(written, tmp_path, change, message):
    expect_refusal(written("nf4, double"), tmp_path, change, message)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change, message",
    [
        (without(f"{X}.SCB"), "of a dtype other than .* is I8"),
        (put(f"{X}.SCB", torch.zeros(31)), r"has SCB of float32, \(31,\), expected float32"),
        (put(f"{X}.weight_format", torch.ones((), dtype=torch.uint8)), "has weight_format"),
        (without(f"{X}.weight"), "is not there, but has an SCB"),
    ],
)
def test_damaged_parts_of_8_bits_are_named(written, tmp_path, change, message):
    expect_refusal(written("int8"), tmp_path, change, message)


def expect_refusal(source, tmp_path, change, message):
    folder = tmp_path / "changed"
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message) as refused:
        Checkpoint(folder)
    assert "\n" not in str(refused.value)
    run("inspect", folder, code=1)


@pytest.mark.parametrize(
    "stated, message",
    [
        ({"quant_method": "gptq", "bits": 4}, "is quantised with GPTQ, which is not read"),
        ({"quant_method": "awq"}, "with AWQ, which is not read"),
        ({"quant_method": "torchao"}, "with torchao, which is not read"),
        ({"quant_method": "compressed-tensors"}, "with compressed-tensors"),
        ({"quant_method": "hqq"}, "with 'hqq', which is not read"),
        ({"quant_method": ["awq"]}, r"with \['awq'\], which is not read"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "but no tensor is: remove that"),
        ([4], r"quantization_config is \[4\], expected an object"),
    ],
)
def test_what_config_json_says_of_quantisation(base, tmp_path, stated, message):
    folder = tmp_path / "changed"
    shutil.copytree(base, folder)
    config = json.loads((base / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(folder)


def test_mlx_may_be_named_as_the_method(mlx, tmp_path):
    """Some tools state MLX's settings in transformers' key for quantisation methods."""
    folder = shutil.copytree(mlx, tmp_path / "mlx")
    config = json.loads((mlx / "config.json").read_text())
    stated = config.pop("quantization")
    config["quantization_config"] = stated | {"quant_method": "mlx"}
    (folder / "config.json").write_text(json.dumps(config))
    one, other = Checkpoint(mlx), Checkpoint(folder)
    for name in one.dtypes:
        assert one.numpy(name).tobytes() == other.numpy(name).tobytes()


@pytest.mark.parametrize(
    "name, kind",
    [
        (f"{X}.qweight", "AWQ"),
        (f"{X}.g_idx", "GPTQ"),
        (f"{X}.weight_packed", "compressed-tensors"),
        (f"{X}.weight_scale_inv", "FP8"),
    ],
)
def test_kinds_told_by_names_of_tensors(base, tmp_path, name, kind):
    change = put(name, torch.zeros(2, dtype=torch.int32))
    expect_refusal(base, tmp_path, change, f"is quantised with {kind}, which is not read")
