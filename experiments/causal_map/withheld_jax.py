"""Readings of the JAX model from which something is withheld, for
`experiments.causal_map.withheld`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from experiments.causal_map.withheld import Withheld
from griffin_eval.kernels.attention.plain_jax import QUERY_BLOCK, QueryBlock, attend
from griffin_eval.model_jax.blocks import RecurrentBlock


def reader(runner: Any) -> Callable[[np.ndarray, np.ndarray, Withheld], Array]:
    """A function that reads documents from their beginning.

    Args:
        runner: a `griffin_eval.runners.jax_runner.JaxRunner`, which is left as it is.

    Returns:
        It takes int32 [R, T] tokens, int32 [R] lengths and what is withheld, and gives hidden
        vectors [R T, W] for the runner.
    """
    graph, params = nnx.split(runner.model)
    return functools.partial(_read, graph, params)


@jax.jit(static_argnums=0)
def _read(graph: Any, params: Any, tokens: Array, lengths: Array, withheld: Withheld) -> Array:
    model = nnx.merge(graph, params)
    state = model.init_state(*tokens.shape)
    for index, block in enumerate(model.model.layers):
        temporal: Any = block.temporal_block
        if isinstance(temporal, RecurrentBlock):
            conv: Any = _Changed(temporal.conv_1d, functools.partial(_convolve, index, withheld))
            rg_lru: Any = _Changed(temporal.rg_lru, functools.partial(_recur, index, withheld))
            temporal.conv_1d, temporal.rg_lru = conv, rg_lru
        else:
            changed: Any = _Changed(temporal, functools.partial(_look, index, withheld))
            block.temporal_block = changed
    hidden, _ = model.step(tokens, lengths, state)
    return hidden.reshape(-1, hidden.shape[-1])


class _Changed(nnx.Module):
    """A part of a layer in whose place ``function`` of it and its arguments is called."""

    def __init__(self, module: nnx.Module, function: Callable[..., Any]):
        self.module, self.function = module, function

    def __call__(self, *arguments: Any) -> Any:
        return self.function(self.module, *arguments)


def _convolve(layer: int, now: Withheld, module: Any, x: Array, context: Any, past: Array) -> Any:
    y, after = module(x, context, past)
    t = jnp.arange(x.shape[1])[None]
    fact = (t >= now.first[:, None]) & (t < now.end[:, None])
    without, _ = module(jnp.where(fact[..., None], 0, x), context, past)
    lost = now.conv[:, layer, None] & (t >= now.end[:, None])
    return jnp.where(lost[..., None], without, y), after


def _recur(layer: int, now: Withheld, module: Any, x: Array, context: Any, h0: Array) -> Any:
    y, h = module(x, context, h0)
    # As if the fact's tokens were not there: then what is before and after them joins.
    length, size, t = x.shape[1], (now.end - now.first)[:, None], jnp.arange(x.shape[1])[None]
    kept = jnp.where(t < now.first[:, None], t, jnp.minimum(t + size, length - 1))
    layout = context.layout._replace(lengths=jnp.maximum(context.layout.lengths - size[:, 0], 1))
    positions = jnp.take_along_axis(context.positions, kept, 1)
    shorter = context._replace(positions=positions, layout=layout)
    without, _ = module(jnp.take_along_axis(x, kept[..., None], 1), shorter, h0)
    place = jnp.where(t < now.end[:, None], jnp.minimum(t, now.first[:, None] - 1), t - size)
    without = jnp.take_along_axis(without, jnp.maximum(place, 0)[..., None], 1)
    without = jnp.where((place < 0)[..., None], 0, without)  # nothing was read before the fact
    return jnp.where(now.h[:, layer, None, None], without, y), h


def _look(layer: int, now: Withheld, module: Any, x: Array, context: Any, state: Any) -> Any:
    layout: Any = _HidingLayout(context.layout, layer, now)
    return module(x, context._replace(layout=layout), state)


class _HidingLayout:
    """A layout of padded rows that start a document, some of which do not see some keys."""

    def __init__(self, layout: Any, layer: int, now: Withheld):
        self.layout, self.layer, self.now = layout, layer, now

    def attend(self, q: Array, k: Array, v: Array, max_age: Array, state: Any) -> Any:
        y, after = self.layout.attend(q, k, v, max_age, state)
        now, mixed = self.now, []
        s = jnp.arange(q.shape[1])[None, None]
        ofs = now.first[:, None, None], now.end[:, None, None], now.after[:, None, None]
        low, high = now.ages[:, None, None, 0], now.ages[:, None, None, 1]
        most = jnp.minimum(max_age, state.k.shape[1])
        for begin in range(0, q.shape[1], QUERY_BLOCK):
            t = s[0, 0, begin : begin + QUERY_BLOCK][None, :, None]
            age = t - s
            hidden = (s >= ofs[0]) & (s < ofs[1]) & (t >= ofs[2]) & (age >= low) & (age < high)
            seen = (age >= 0) & (age <= most[:, begin : begin + QUERY_BLOCK, None]) & ~hidden
            mixed.append(attend(QueryBlock(q[:, begin : begin + QUERY_BLOCK], k, v, seen)))
        without = jnp.concatenate(mixed, 1).reshape(y.shape)
        return jnp.where(now.keys[:, self.layer, None, None], without, y), after
