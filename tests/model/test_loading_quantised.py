"""Models whose matrices stay quantised, against the same ones dequantised."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from adapters import write_adapter, write_base
from flax import nnx
from parity import BASE, relative_error, tokens
from quantised import BITS, write_bitsandbytes, write_mlx
from safetensors.torch import save_file

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.codecs import bitsandbytes
from griffin_eval.converters.codecs.quantised import Dequantised
from griffin_eval.converters.containers.safetensors.reader import SafetensorsFolder
from griffin_eval.converters.overrides import Overrides
from griffin_eval.errors import ArgumentError
from griffin_eval.kernels.linear import packed_jax
from griffin_eval.kernels.linear.packed_jax import PackedMatrix
from griffin_eval.model_jax import loading as jax_loading
from griffin_eval.model_torch import loading as torch_loading
from griffin_eval.sharding.mesh_jax import make_mesh

WIDE = dataclasses.replace(BASE, width=128, lru_width=128, mlp_width=192)
MLX = [(bits, group, "bfloat16") for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
MLX += [(4, 64, "float32"), (8, 32, "float32"), (4, 64, "float16")]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    write_base(folder, WIDE)
    return folder


@pytest.fixture(scope="module")
def written(base, tmp_path_factory):
    """A checkpoint that bitsandbytes or MLX has quantised, by what they are told."""
    root = tmp_path_factory.mktemp("quantised")

    def get(kind):
        folder = root / str(kind)
        if not folder.exists():
            if kind in BITS:
                write_bitsandbytes(folder, base, torch.bfloat16, **BITS[kind])
            else:
                bits, group, dtype = kind
                write_mlx(folder, base, dtype, bits, group)
        return folder

    return get


def matrices(model):
    """The quantised matrices of a model in JAX, by canonical name."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    found = {".".join(map(str, path)): value[...] for path, value in flat}
    return {name: value for name, value in found.items() if isinstance(value, PackedMatrix)}


def jax_logits(model, ids):
    """Of a step of many rows, and of one of few."""

    @nnx.jit
    def step(model, ids, state):
        hidden, state = model.step(ids, jnp.full(len(ids), ids.shape[1], jnp.int32), state)
        return model.logits(hidden), state

    first, state = step(model, jnp.asarray(ids[:, :-1], jnp.int32), model.init_state(len(ids)))
    last, _ = step(model, jnp.asarray(ids[:, -1:], jnp.int32), state)
    return np.concatenate([first, last], 1)


def torch_logits(model, ids):
    lengths = torch.full((len(ids),), ids.shape[1])
    with torch.no_grad():
        hidden, _ = model.step(torch.from_numpy(ids), lengths, model.init_state(len(ids)))
        return model.logits(hidden).numpy()


def bits_of(array):
    return np.asarray(array).view(np.uint8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*BITS, *MLX])
def test_matrices_stay_as_in_the_file(written, kind):
    checkpoint = Checkpoint(written(kind))
    model = jax_loading.load_packed(checkpoint, "float32")
    found, container = matrices(model), checkpoint.container
    assert found.keys() == container.decoding.parameters.keys() and len(found) > 10
    assert ("model.embed_tokens.weight" in found) == (kind not in BITS)  # the tied head
    for name, packed in found.items():
        expected = checkpoint.numpy(name).astype(np.float32)
        assert np.array_equal(bits_of(packed.dense()), bits_of(expected)), name
        assert packed.shape == expected.shape and packed.dtype == jnp.float32
        elements = 8 * packed.elements.nbytes / expected.size
        assert elements == (kind[0] if kind not in BITS else 8 if kind == "int8" else 4)
        # Scales of scales are gone: they are at most half a bit an element.
        held = 8 * sum(leaf.nbytes for leaf in jax.tree.leaves(packed)) / expected.size
        assert held < container.bits(name) + 0.5
    ids = tokens(WIDE, 2, 20)
    found = jax_logits(model, ids)
    assert relative_error(found, jax_logits(jax_loading.load(checkpoint, "float32"), ids)) < 2e-6
    kept = torch_loading.load_packed(checkpoint, torch.float32)
    assert relative_error(found, torch_logits(kept, ids)) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", [*BITS, (8, 64, "bfloat16")])
def test_logits_in_16_bits(written, kind, dtype):
    checkpoint, ids = Checkpoint(written(kind)), tokens(WIDE, 2, 20)
    packed, plain = (
        jax_logits(load(checkpoint, dtype), ids)
        for load in (jax_loading.load_packed, jax_loading.load)
    )
    assert relative_error(packed, plain) < (2e-2 if dtype == "bfloat16" else 3e-3)


@pytest.mark.slow
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize(
    "shape, block, kind",
    [
        ((7, 34), 64, "nf4"),  # blocks go on from row to row, and the last one is cut off
        ((50, 70), 64, "fp4"),
        ((129, 130), 128, "nf4"),
        ((64, 520), 64, "nf4"),
        ((30, 128), 256, "fp4"),
        ((3, 2), 1024, "nf4"),
    ],
)
def test_rows_of_any_length(tmp_path, shape, block, kind, double):
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    elements, state = functional.quantize_4bit(
        weight, blocksize=block, compress_statistics=double, quant_type=kind
    )
    parts = {f"w.{key}": value for key, value in state.as_dict(packed=True).items()}
    save_file({"w": elements, **parts}, tmp_path / "model.safetensors")
    container = SafetensorsFolder(tmp_path)
    decoding = bitsandbytes.find(container)
    assert decoding is not None
    rows = decoding.parameters["w"].packed_rows()
    arrays = map(jnp.asarray, (rows.elements, rows.scales))
    bfloat16 = jnp.dtype("bfloat16")
    packed = PackedMatrix(kind, 4, *arrays, None, jnp.asarray(rows.code), bfloat16, bfloat16)
    expected = bits_of(Dequantised(container, decoding).numpy("w"))
    assert packed.shape == shape
    assert np.array_equal(bits_of(packed.dense()), expected)
    some = np.array([shape[0] - 1, 0, 1])
    assert np.array_equal(bits_of(packed[jnp.asarray(some)]), expected[some])


def test_what_has_no_rows_of_whole_bytes_is_dequantised(tmp_path):
    functional = pytest.importorskip("bitsandbytes.functional")
    elements, state = functional.quantize_4bit(torch.randn(6, 33), quant_type="nf4")
    parts = {f"w.{key}": value for key, value in state.as_dict(packed=True).items()}
    save_file({"w": elements, **parts}, tmp_path / "model.safetensors")
    decoding = bitsandbytes.find(SafetensorsFolder(tmp_path))
    assert decoding is not None and decoding.parameters["w"].packed_rows() is None


@pytest.mark.slow
def test_matrices_that_an_adapter_changes_are_dequantised(written, base, tmp_path):
    write_adapter(tmp_path / "adapter", base, target_modules=["linear_x", "down_proj"])
    overrides = Overrides(adapters=((tmp_path / "adapter", 1.0),))
    checkpoint, plain = Checkpoint(written("nf4"), overrides), Checkpoint(written("nf4"))
    model, ids = jax_loading.load_packed(checkpoint, "float32"), tokens(WIDE, 2, 20)
    changed = set(matrices(jax_loading.load_packed(plain))) - set(matrices(model))
    assert {name.split(".")[-2] for name in changed} == {"linear_x", "down_proj"}
    found, merged = jax_logits(model, ids), jax_loading.load(checkpoint, "float32")
    assert relative_error(found, jax_logits(merged, ids)) < 2e-6
    assert relative_error(found, jax_logits(jax_loading.load(plain, "float32"), ids)) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [True, False])
def test_a_layer_is_the_most_that_a_step_dequantises(tmp_path, kernel, monkeypatch):
    if not kernel:
        monkeypatch.setattr(packed_jax, "_missing", lambda: "no compiler")
    config = dataclasses.replace(BASE, width=256, lru_width=256, mlp_width=512, num_layers=9)
    write_base(tmp_path / "base", config)
    write_bitsandbytes(tmp_path / "q", tmp_path / "base", torch.float32, **BITS["int8"])
    checkpoint = Checkpoint(tmp_path / "q")
    model = jax_loading.load_packed(checkpoint, "float32")
    graph, params = nnx.split(model)

    def step(params, ids, lengths, state):
        model = nnx.merge(graph, params)
        hidden, state = model.step(ids, lengths, state)
        return model.logits(hidden), state

    layer = [4 * m.elements.size for n, m in matrices(model).items() if ".layers.0." in n]
    for length in (1, 40):
        ids, state = jnp.zeros((1, length), jnp.int32), model.init_state(1)
        lowered = jax.jit(step).lower(params, ids, jnp.array([length]), state)
        memory = lowered.compile().memory_analysis()
        if kernel and length == 1:
            assert memory.temp_size_in_bytes < max(layer)
        else:
            assert max(layer) < memory.temp_size_in_bytes < sum(layer)


@pytest.mark.slow
def test_where_nothing_can_stay_quantised(written):
    checkpoint = Checkpoint(written("nf4"))
    with pytest.raises(ArgumentError, match=r"runs on one device, found a mesh of 1"):
        jax_loading.load_packed(checkpoint, device=make_mesh(jax.devices()[:1]))
    with pytest.raises(ArgumentError, match=r"a CPU or a CUDA device, found meta: add device=cpu"):
        torch_loading.load_packed(checkpoint, device=torch.device("meta"))
    checkpoint = Checkpoint(written((3, 64, "bfloat16")))
    with pytest.raises(
        ArgumentError, match=r"on cuda:0: no kernel for model\.embed_tokens\.weight"
    ):
        torch_loading.load_packed(checkpoint, device=torch.device("cuda", 0))
