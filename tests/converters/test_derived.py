"""Parameters that are parts of tensors, changed, or zeros: read in every way, against numpy."""

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from slow import examples

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.chunk_sums import ChunkSummer
from griffin_eval.converters.containers.orbax.reader import open_orbax
from griffin_eval.converters.containers.orbax.writer import OrbaxWriter
from griffin_eval.converters.containers.safetensors.reader import open_safetensors
from griffin_eval.converters.containers.torch_pt.reader import open_torch
from griffin_eval.converters.convert import convert_checkpoint
from griffin_eval.converters.files import TensorFile
from griffin_eval.converters.formats import FORMATS
from griffin_eval.converters.naming.ops import SAME, TRANSPOSE, Change
from griffin_eval.converters.naming.parameters import parameters_of
from griffin_eval.converters.naming.tables import Binding
from griffin_eval.converters.overrides import Overrides
from griffin_eval.converters.plan import make_plan
from griffin_eval.converters.tensors import numpy_dtype
from griffin_eval.errors import CheckpointError
from griffin_eval.layout import ParamSpec, param_specs

DTYPES = ("float32", "float16", "bfloat16", "float64")


def changed(values: np.ndarray, change: Change | None) -> np.ndarray:
    """In exact arithmetic but for the last step: long doubles hold every sum and product here."""
    if change is None:
        return values
    wide = values.astype(np.longdouble)
    wide = wide - 1 if change.name == "minus one" else wide * np.longdouble(change.factor)
    if values.dtype.name != "bfloat16":
        return wide.astype(values.dtype)
    return wide.astype(np.float64).astype(values.dtype)


def bits(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def assert_same(found: np.ndarray, expected: np.ndarray, change: Change | None) -> None:
    """Bit for bit where nothing is computed, and otherwise to one unit in the last place.

    The last bit of a computed value may depend on its place in the array: numpy's vector loops
    and the loops for what is left over round in other steps on some processors.
    """
    assert found.shape == expected.shape and found.dtype == expected.dtype
    if change is None:
        assert bits(found) == bits(expected)
        return
    low, high = (np.nextafter(expected, np.array(to, expected.dtype)) for to in (-np.inf, np.inf))
    both_nan = np.isnan(found) & np.isnan(expected)
    assert np.all(both_nan | ((low <= found) & (found <= high)))


def opened(folder: Path, kind: str, tensors: dict[str, np.ndarray]):
    """A container with these tensors."""
    folder.mkdir(parents=True)
    if kind == "safetensors":
        save_file(tensors, folder / "model.safetensors")
        return open_safetensors(folder)
    if kind == "torch":
        import torch

        from griffin_eval.converters.tensors import torch_tensor

        torch.save({n: torch_tensor(a.copy()) for n, a in tensors.items()}, folder / "a.pt")
        return open_torch(folder / "a.pt")
    specs = {n: (a.shape, a.dtype.name) for n, a in tensors.items()}
    with OrbaxWriter(folder, specs) as writer:
        for name, array in tensors.items():
            writer.write(name, [array])
    return open_orbax(folder)


@st.composite
def cases(draw):
    """A stored tensor, the bindings to it, and the arrays that they stand for."""
    rank = draw(st.integers(1, 3))
    shape = [draw(st.integers(1, 9)) for _ in range(rank)]
    axis = draw(st.integers(0, rank - 1))
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    change = draw(
        st.sampled_from(
            [None, Change("minus one"), Change("scale by", 0.5), Change("scale by", 0.3)]
        )
    )
    layers = draw(st.sampled_from([None, 1, 3]))
    dtype = np.dtype(getattr(ml_dtypes, name := draw(st.sampled_from(DTYPES)), name))
    parts = [(*shape[:axis], n, *shape[axis + 1 :]) for n in lengths]
    whole = (*shape[:axis], sum(lengths), *shape[axis + 1 :])
    numbers = np.random.default_rng(draw(st.integers(0, 99)))
    stored = (10 * numbers.normal(size=(layers or 1, *whole))).astype(np.float32).astype(dtype)
    bindings, expected = [], {}
    starts = np.cumsum([0, *lengths])
    for layer in range(layers or 1):
        specs = tuple(
            ParamSpec(name=f"model.layers.{layer}.p{i}", shape=part, axes=("x",) * rank)
            for i, part in enumerate(parts)
        )
        entry = None if layers is None else layer
        cut = axis if len(parts) > 1 else None
        bindings.append(
            Binding("t", stored.shape if layers else whole, specs, SAME, entry, cut, change)
        )
        for spec, a, b in zip(specs, starts, starts[1:], strict=False):
            part = np.take(stored[layer], range(a, b), axis)
            expected[spec.name] = changed(part, change)
    return (stored if layers else stored[0]), bindings, expected


@pytest.mark.parametrize("kind", ["safetensors", "torch", "orbax"])
@settings(max_examples=examples(25))
@given(case=cases(), data=st.data())
def test_what_is_derived_reads_in_every_way_as_numpy_makes_it(tmp_path_factory, kind, case, data):
    stored, bindings, expected = case
    change = bindings[0].change
    folder = tmp_path_factory.mktemp("derived") / "model"
    container = opened(folder, kind, {"t": stored})
    parameters = parameters_of(container.tensors, bindings)
    for name, values in expected.items():
        tensor = parameters[name].tensor
        assert tensor.shape == values.shape
        assert numpy_dtype(tensor.dtype) == values.dtype and tensor.nbytes == values.nbytes
        assert_same(tensor.numpy(), values, change)
        as_torch = tensor.torch().double().numpy()  # holds every value exactly
        assert_same(as_torch.astype(values.dtype), values, change)
        nbytes = data.draw(st.integers(1, 2 * values.nbytes))
        pieces = list(tensor.pieces(nbytes))
        assert all(piece.flags.c_contiguous for piece in pieces)
        assert_same(np.concatenate(pieces or [values[:0]]), values, change)
        assert all(len(piece) == 1 or piece.nbytes <= nbytes for piece in pieces)
        a, b = sorted(data.draw(st.integers(0, len(values) + 2)) for _ in range(2))
        assert_same(tensor.rows(a, b), values[a:b], change)
        region = []
        for n in values.shape:
            a, b = sorted(data.draw(st.integers(0, n)) for _ in range(2))
            region.append(slice(a, b))
        assert_same(tensor.read(tuple(region)), values[tuple(region)], change)
    container.close()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_minus_one_is_the_exact_difference_rounded_once_for_every_16_bit_number(dtype):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    values = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        values = values[np.isfinite(values)]
        found = Change("minus one").apply(values)
        exact = values.astype(np.longdouble) - 1
        nearest = np.abs(found.astype(np.longdouble) - exact)
        for towards in (-np.inf, np.inf):
            beside = np.nextafter(found, np.array(towards, dtype)).astype(np.longdouble)
            assert np.all(nearest <= np.abs(beside - exact))
    kept = (values >= 0.5) & (values <= 2)
    assert np.array_equal(found[kept].astype(np.float64), values[kept].astype(np.float64) - 1)


@given(st.floats(0.5, 2, width=32))
def test_minus_one_is_exact_between_a_half_and_two(value):
    found = Change("minus one").apply(np.array([value], np.float32))
    assert float(found[0]) == value - 1


def test_factors_are_of_the_width():
    assert Change("scale by", "sqrt(width)").of(2560).factor == math.sqrt(2560)
    assert Change("scale by", "1/sqrt(width)").of(2560).factor == 1 / math.sqrt(2560)
    assert Change("scale by", 3.0).of(2560).factor == 3.0


CONFIG = GriffinConfig(
    vocab_size=64,
    width=8,
    mlp_width=12,
    num_heads=2,
    num_layers=3,
    lru_width=8,
    gate_blocks=2,
    visible_keys=5,
    embedding_scale=False,
    logits_soft_cap=0.0,
)
GIVEN = {"visible_keys": 5, "embedding_scale": False, "logits_soft_cap": 0.0}
LAYER = "model.layers.{layer}."
TABLE = f"""
[[tensor]]
foreign = "l{{layer}}.xy"
canonical = [
    "{LAYER}temporal_block.linear_x.weight",
    "{LAYER}temporal_block.linear_y.weight",
]
op = "cut, transpose"
axis = 1

[[tensor]]
foreign = "l{{layer}}.qkv"
canonical = [
    "{LAYER}temporal_block.q_proj.weight",
    "{LAYER}temporal_block.k_proj.weight",
    "{LAYER}temporal_block.v_proj.weight",
]
op = "cut"

[[tensor]]
foreign = "norms"
canonical = "{LAYER}channel_pre_norm.weight"
op = "minus one"
stack = "0::1"

[[tensor]]
foreign = "gate_up"
canonical = ["{LAYER}mlp_block.gate_proj.weight", "{LAYER}mlp_block.up_proj.weight"]
op = "cut"
stack = "0::1"

[[tensor]]
foreign = "emb"
canonical = "model.embed_tokens.weight"
op = "scale by, transpose"
factor = 0.25

[[tensor]]
canonical = ["{LAYER}mlp_block.gate_proj.bias", "{LAYER}temporal_block.o_proj.bias"]
op = "absent means zeros"
"""


def model(dtype=np.float32) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], str]:
    """The parameters, the tensors that hold them, and the table that says how."""
    draw, table = np.random.default_rng(1), TABLE
    w = {
        name: draw.normal(size=spec.shape).astype(dtype)
        for name, spec in param_specs(CONFIG).items()
    }
    layers = [f"model.layers.{i}." for i in range(CONFIG.num_layers)]
    for layer in layers:
        w[layer + "mlp_block.gate_proj.bias"][:] = 0
    w["model.layers.2.temporal_block.o_proj.bias"][:] = 0
    norms = np.stack([w[layer + "channel_pre_norm.weight"] + 1 for layer in layers])
    tensors = {
        "norms": norms,
        "gate_up": np.stack(
            [
                np.vstack([w[f"{layer}mlp_block.{n}_proj.weight"] for n in ("gate", "up")])
                for layer in layers
            ]
        ),
        "emb": w["model.embed_tokens.weight"].T * 4,
        "l2.qkv": np.vstack([w[f"model.layers.2.temporal_block.{n}_proj.weight"] for n in "qkv"]),
    }
    for i in range(2):
        block = f"model.layers.{i}.temporal_block."
        tensors[f"l{i}.xy"] = np.hstack([w[f"{block}linear_{n}.weight"].T for n in "xy"])
    held = ("channel_pre_norm", "gate_proj", "up_proj.weight", "embed", "o_proj.bias")
    held += ("linear_x.weight", "linear_y.weight", "q_proj", "k_proj", "v_proj")
    for name, values in w.items():
        if not any(part in name for part in held):
            tensors[name] = values
            table += f'\n[[tensor]]\nforeign = "{name}"\ncanonical = "{name}"\n'
    for layer, norm in zip(layers, norms, strict=True):
        w[layer + "channel_pre_norm.weight"] = norm - 1
    return w, {n: np.ascontiguousarray(a) for n, a in tensors.items()}, table


def test_a_model_is_converted_and_its_parts_are_read_and_checked(tmp_path, monkeypatch):
    w, tensors, table = model()
    (tmp_path / "map.toml").write_text(table)
    opened(tmp_path / "model", "safetensors", tensors).close()
    overrides = Overrides(names=tmp_path / "map.toml", **GIVEN)
    checkpoint = Checkpoint(tmp_path / "model", overrides)
    assert checkpoint.config == CONFIG
    asked, read = [], TensorFile._read_into
    monkeypatch.setattr(
        TensorFile, "_read_into", lambda s, out, at: asked.append(len(out)) or read(s, out, at)
    )
    pieces = b"".join(
        map(bits, checkpoint.pieces("model.layers.2.temporal_block.k_proj.weight", 64))
    )
    assert pieces == bits(w["model.layers.2.temporal_block.k_proj.weight"])
    assert asked == [64, 64]  # no more than the keys, in two pieces
    plan = make_plan(checkpoint, FORMATS["griffin"])
    convert_checkpoint(plan, tmp_path / "out")
    converted = Checkpoint(tmp_path / "out")
    for name, values in w.items():
        for source in (checkpoint, converted):
            assert bits(source.numpy(name)) == bits(values), name
            parts = source.parts(name)
            half = tuple(slice(n // 3, n) for n in values.shape)
            assert bits(parts.numpy(half)) == bits(values[half])
            assert np.array_equal(parts.torch(half).numpy(), values[half])
        sums = ChunkSummer(values.shape, tuple(max(1, n // 2) for n in values.shape))
        for piece in checkpoint.pieces(name, 100):
            sums.update(piece)
        whole = tuple(slice(0, n) for n in values.shape)
        assert sums.result().check(values, whole) == ([], values.nbytes)


def test_a_damaged_tensor_is_found_whichever_of_its_parts_is_read(tmp_path):
    _, tensors, table = model()
    (tmp_path / "map.toml").write_text(table)
    opened(tmp_path / "model", "torch", tensors).close()
    path = tmp_path / "model" / "a.pt"
    content = bytearray(path.read_bytes())
    at = content.find(tensors["l2.qkv"].tobytes())
    content[at] ^= 1  # of the queries
    path.write_bytes(content)
    checkpoint = Checkpoint(path, Overrides(names=tmp_path / "map.toml", **GIVEN))
    for part in "qkv":
        with pytest.raises(CheckpointError, match="l2.qkv has the CRC-32"):
            list(checkpoint.pieces(f"model.layers.2.temporal_block.{part}_proj.weight"))
    list(checkpoint.pieces("model.layers.2.mlp_block.up_proj.weight"))


def test_layouts_apply_to_each_part_of_what_is_cut():
    spec = param_specs(CONFIG)["model.layers.0.temporal_block.linear_x.weight"]
    binding = Binding("t", (8, 16), (spec, spec), TRANSPOSE, cut=1)
    assert binding.part_shapes() == [(8, 8), (8, 8)]
