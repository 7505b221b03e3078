"""Models whose matrices stay quantised in memory, against the same ones dequantised."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from adapters import write_base
from flax import nnx
from gguf_files import candle, write_candle
from parity import BASE, relative_error, tokens, weights
from quantised import BITS, write_bitsandbytes, write_mlx
from slow import slow

from griffin_eval.arguments import FRAMEWORKS
from griffin_eval.config import PRESETS
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.codecs.decode import quantised
from griffin_eval.converters.overrides import Overrides
from griffin_eval.errors import ArgumentError
from griffin_eval.kernels.linear import quantised_jax, quantised_torch
from griffin_eval.model_jax import loading as jax_loading
from griffin_eval.model_torch import loading as torch_loading
from griffin_eval.runners.load import load_runners
from griffin_eval.sharding.mesh_jax import make_mesh

WIDE = dataclasses.replace(BASE, width=128, lru_width=128, mlp_width=192)
MLX = (4, 64, "bfloat16")  # bits, group, dtype
LOADING = {"torch": torch_loading, "jax": jax_loading}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    write_base(folder, WIDE)
    return folder


@pytest.fixture(scope="module")
def written(base, tmp_path_factory):
    """Return a function that returns a checkpoint quantised by bitsandbytes or MLX."""
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


def load(checkpoint, framework, dtype, quantised):
    loading = LOADING[framework]
    dtype = getattr(torch, dtype) if framework == "torch" else dtype
    return (loading.load_packed if quantised else loading.load)(checkpoint, dtype)


def matrices(model, framework):
    """Return the quantised matrices of a model, by canonical name."""
    if framework == "torch":
        weights = {f"{n}.weight": getattr(m, "weight", None) for n, m in model.named_modules()}
        kind = quantised_torch.QuantisedMatrix
    else:
        flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
        weights = {".".join(map(str, path)): value[...] for path, value in flat}
        kind = quantised_jax.QuantisedMatrix
    return {name: value for name, value in weights.items() if isinstance(value, kind)}


def logits(model, framework, ids):
    """Logits of a step of many rows, then of a step of few."""
    if framework == "torch":
        with torch.no_grad():
            lengths = torch.full((len(ids),), ids.shape[1] - 1)
            ids = torch.from_numpy(ids)
            first, state = model.step(ids[:, :-1], lengths, model.init_state(len(ids)))
            last, _ = model.step(ids[:, -1:], torch.ones_like(lengths), state)
            return model.logits(torch.cat([first, last], 1)).numpy()

    @nnx.jit
    def step(model, ids, state):
        hidden, state = model.step(ids, jnp.full(len(ids), ids.shape[1], jnp.int32), state)
        return model.logits(hidden), state

    first, state = step(model, jnp.asarray(ids[:, :-1], jnp.int32), model.init_state(len(ids)))
    last, _ = step(model, jnp.asarray(ids[:, -1:], jnp.int32), state)
    return np.concatenate([first, last], 1)


@pytest.mark.parametrize("framework", ["torch", slow("jax")])
@pytest.mark.parametrize("kind", ["nf4, double", slow("int8"), slow("fp4"), MLX], ids=str)
def test_numbers_are_those_of_the_dequantised_checkpoint(written, kind, framework):
    checkpoint = Checkpoint(written(kind))
    model = load(checkpoint, framework, "float32", quantised=True)
    found, stored = matrices(model, framework), quantised(checkpoint.container)
    assert found.keys() == stored.keys() and len(found) > 10
    assert ("model.embed_tokens.weight" in found) == (kind not in BITS)  # the tied head
    for name, matrix in found.items():
        expected = checkpoint.numpy(name).astype(np.float32)
        assert tuple(matrix.shape) == expected.shape
        # XLA may round a product and a sum of float32 once.
        tolerance = 2e-7 * np.abs(expected).max() if framework == "jax" else 0
        if "bfloat16" in str(matrix.rounded_to) or "float16" in str(matrix.rounded_to):
            tolerance = 0
        np.testing.assert_allclose(matrix.dense(), expected, rtol=0, atol=tolerance, err_msg=name)
        arrays = (matrix.elements, matrix.scales, matrix.shifts)
        held = 8 * sum(a.nbytes for a in arrays if a is not None) / expected.size
        assert held < stored[name].bits + 0.5  # scales in 8 bits are dequantised as they load
    ids = tokens(WIDE, 2, 20)
    plain = load(checkpoint, framework, "float32", quantised=False)
    expected = logits(plain, framework, ids)
    assert relative_error(logits(model, framework, ids), expected) < 2e-6


@pytest.mark.slow
def test_a_layer_is_the_most_that_a_step_of_jax_dequantises(tmp_path):
    config = dataclasses.replace(BASE, width=256, lru_width=256, mlp_width=512, num_layers=9)
    write_base(tmp_path / "base", config)
    write_bitsandbytes(tmp_path / "q", tmp_path / "base", torch.float32, **BITS["int8"])
    model = jax_loading.load_packed(Checkpoint(tmp_path / "q"), "float32")
    graph, params = nnx.split(model)

    def step(params, ids, lengths, state):
        model = nnx.merge(graph, params)
        hidden, state = model.step(ids, lengths, state)
        return model.logits(hidden), state

    found = matrices(model, "jax")
    layer = [4 * m.elements.size for name, m in found.items() if ".layers.0." in name]
    for length in (1, 40):
        ids, state = jnp.zeros((1, length), jnp.int32), model.init_state(1)
        lowered = jax.jit(step).lower(params, ids, jnp.array([length]), state)
        assert lowered.compile().memory_analysis().temp_size_in_bytes < sum(layer)


_MEMORY = """
import re, sys, torch
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.engine.memory import return_freed_memory
from griffin_eval.model_torch.loading import load, load_packed
def anonymous():
    return_freed_memory()  # how much the heap keeps depends on its layout
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
torch.set_grad_enabled(False)
torch.set_num_threads(1)
before = anonymous()
read = load_packed if sys.argv[2] == "quantised" else load
model = read(Checkpoint(sys.argv[1]), torch.float32)
state = model.init_state(1)
for length in (40, 1):
    hidden, state = model.step(torch.ones(1, length).long(), torch.tensor([length]), state)
    model.logits(hidden)
print(anonymous() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_that_of_the_file_and_a_layer(tmp_path):
    """The model has 12 layers of 6 MB each in float32, which are 1 MB quantised."""
    config = dataclasses.replace(BASE, width=256, lru_width=256, mlp_width=1536, num_layers=12)
    write_base(tmp_path / "base", config)
    write_mlx(tmp_path / "q", tmp_path / "base", "bfloat16", 4, 64)
    taken = {}
    for how in ("quantised", "plain"):
        done = subprocess.run(
            [sys.executable, "-c", _MEMORY, str(tmp_path / "q"), how],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        taken[how] = int(done.stdout)
    whole = 12 * 6 * 10**6
    assert taken["plain"] - taken["quantised"] > 0.6 * whole, taken


def test_refusals(written, base, tmp_path, monkeypatch):
    config = dataclasses.replace(BASE, width=64, lru_width=64, mlp_width=128)
    monkeypatch.setitem(PRESETS, "tiny", config)
    write_candle(tmp_path / "m.gguf", candle(weights(config), "Q4_0"))
    gguf = Checkpoint(tmp_path / "m.gguf", Overrides(preset="tiny"))
    quantised, mlx = written(MLX), Checkpoint(written(MLX))
    for framework in FRAMEWORKS:
        for checkpoint, options, message in (
            (Checkpoint(base), {}, "is not quantised; leave the argument out"),
            (gguf, {}, "m.gguf is GGUF: leave the argument out"),
            (mlx, {"tensor_parallel": 2}, "one device a replica, found tensor_parallel_size=2"),
        ):
            with pytest.raises(ArgumentError, match=message):
                load_runners(checkpoint, framework=framework, packed=True, **options)
    with pytest.raises(ArgumentError, match=r"runs on one device, found a mesh of 1"):
        jax_loading.load_packed(Checkpoint(quantised), device=make_mesh(jax.devices()[:1]))
