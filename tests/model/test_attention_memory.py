"""Memory of local attention is linear in the tokens of a step: nothing of T x T is ever made."""

import weakref
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
import torch
from flax import nnx
from parity import BASE
from slow import slow
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from griffin_eval.kernels.attention import cpu_jax, cpu_torch, plain_jax, plain_torch
from griffin_eval.model_jax import griffin as jax_griffin
from griffin_eval.model_torch import griffin as torch_griffin

# Narrow, so that scores of T x T would be most of the memory.
CONFIG = replace(BASE, block_pattern=("local_attention",), num_layers=1, visible_keys=64)
LENGTHS = (1024, 2048, 4096)


class Peak(TorchDispatchMode):
    """The most bytes that were in memory at once, of what operations made."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._owned: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage):
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._owned:
            return
        self._owned.add(key)
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key, nbytes)

    def _free(self, key, nbytes):
        self._owned.discard(key)
        self.now -= nbytes


def torch_peak(length: int) -> int:
    """Bytes that a step needs beside its weights, state and tokens."""
    model = torch_griffin.initialize(CONFIG).requires_grad_(False)
    tokens, state = torch.zeros(1, length, dtype=torch.int64), model.init_state(1)
    with Peak() as memory:
        model.step(tokens, torch.tensor([length]), state)
    return memory.peak


def jax_peak(length: int) -> int:
    """Bytes of temporaries that the compiler sets aside for a step."""
    graph, params = nnx.split(jax_griffin.initialize(CONFIG))
    tokens, lengths = jnp.zeros((1, length), jnp.int32), jnp.full(1, length, jnp.int32)
    state = nnx.merge(graph, params).init_state(1)

    def step(params, tokens, lengths, state):
        return nnx.merge(graph, params).step(tokens, lengths, state)

    compiled = jax.jit(step).lower(params, tokens, lengths, state).compile()
    return compiled.memory_analysis().temp_size_in_bytes


PEAKS = {"torch": (torch_peak, plain_torch), "jax": (jax_peak, plain_jax)}


@pytest.fixture
def plainly(monkeypatch):
    """As where there is no compiled kernel."""
    for module in (cpu_torch, cpu_jax):
        monkeypatch.setattr(module, "unsupported", lambda *arrays: "not asked for")


@pytest.mark.parametrize("ours", ["torch", slow("jax")])
def test_memory_is_linear_in_the_tokens_of_a_step(ours, record_property):
    _check_linear(ours, record_property)


@pytest.mark.parametrize("ours", ["torch", slow("jax")])
def test_memory_is_linear_without_the_kernel_too(ours, plainly, record_property):
    _check_linear(ours, record_property)


def _check_linear(ours, record_property):
    peaks = [PEAKS[ours][0](length) for length in LENGTHS]
    record_property("peaks", dict(zip(LENGTHS, peaks, strict=True)))
    first, second = peaks[1] - peaks[0], peaks[2] - peaks[1]
    assert 0 < second < 2.1 * first, peaks  # for twice as many more tokens
    assert peaks[-1] < LENGTHS[-1] ** 2, peaks  # less than one byte for each pair of tokens


@pytest.mark.slow
def test_a_gradient_keeps_no_scores():
    """What a training step needs more for a wider window is less than the scores of one step."""
    length, narrow, wide = 2048, 64, 1024

    def peak(keys):
        graph, params = nnx.split(jax_griffin.initialize(replace(CONFIG, visible_keys=keys)))
        tokens, lengths = jnp.zeros((1, length), jnp.int32), jnp.full(1, length, jnp.int32)

        def loss(params):
            model = nnx.merge(graph, params)
            return jnp.square(model.step(tokens, lengths, model.init_state(1))[0]).sum()

        compiled = jax.jit(jax.grad(loss)).lower(params).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    scores = CONFIG.num_heads * length * (wide - narrow) * 4
    assert 0 < peak(wide) - peak(narrow) < scores / 4
