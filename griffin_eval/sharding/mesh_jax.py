"""JAX models on a mesh of devices: the operations that XLA does not split by itself.

`jax.set_mesh` sets the devices that a function is compiled for. XLA then splits all matrix products
by the shardings of the weights (`griffin_eval.sharding`). Kernels are opaque to it: here they run
inside `jax.shard_map`, each device on its own channels or heads, without communication.

On a mesh with the single axis ``time``, the whole model runs inside `jax.shard_map`, each device on
its own part of a document's tokens. The recurrence, the convolution and attention then need values
from earlier devices: see `rglru` and `before`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from griffin_eval.kernels.attention import api as attention_api
from griffin_eval.kernels.rglru import api as rglru_api
from griffin_eval.kernels.rglru import plain_jax as plain_rglru
from griffin_eval.kernels.rglru.reference import Gates
from griffin_eval.layout import ParamSpec
from griffin_eval.sharding.split import DATA, MODEL, TIME, Split

SUMS = "sums"


def make_mesh(devices: Sequence[Any], data: int = 1) -> Mesh:
    """Return a mesh that splits the batch into ``data`` parts and the weights over the devices of
    each."""
    shape = data, len(devices) // data
    return Mesh(np.array(devices).reshape(shape), (DATA, MODEL), axis_types=(AxisType.Auto,) * 2)


def make_time_mesh(devices: Sequence[Any]) -> Mesh:
    """Return a mesh that splits the tokens of documents over devices."""
    return Mesh(np.array(devices), (TIME,), axis_types=(AxisType.Auto,))


def param_sharding(mesh: Mesh, split: Split, spec: ParamSpec) -> NamedSharding:
    """Return the sharding of a parameter on a mesh."""
    return NamedSharding(mesh, PartitionSpec(*split.axes(spec)))


def training_sharding(mesh: Mesh, split: Split, spec: ParamSpec) -> NamedSharding:
    """Return the sharding of a parameter on a mesh between training steps."""
    return NamedSharding(mesh, PartitionSpec(*split.axes_in_training(spec, mesh.shape[DATA])))


def gathered(split: Split, spec: ParamSpec, value: Array) -> Array:
    """Return a training parameter with its width gathered over the replicas, for computation."""
    if not _sizes():
        return value
    return jax.lax.with_sharding_constraint(value, PartitionSpec(*split.axes(spec)))


def axis_size(name: str) -> int:
    """Return the number of devices along an axis of the current mesh; 1 without a mesh."""
    return _sizes().get(name, 1)


def summed(partial: Array, split: bool = True) -> Array:
    """Return an array of partial sums, summed over devices and split by rows only.

    XLA knows which arrays are partial, so ``split`` is ignored. The checkpoint name `SUMS` lets a
    training step that recomputes activations keep these arrays.
    """
    partial = checkpoint_name(partial, SUMS)
    if not _sizes():
        return partial
    rows = PartitionSpec(_axis(DATA, len(partial)))
    return jax.lax.with_sharding_constraint(partial, rows)


def rglru(
    x: Array,
    gates: Gates,
    h0: Array,
    *,
    resets: Array,
    lengths: Array,
    starts: Array | None,
    c: float,
) -> tuple[Array, Array]:
    """Run `griffin_eval.kernels.rglru.api.rglru` with whole gate blocks on each device, or with a
    part of the tokens on each."""
    if _devices_in_time() > 1:
        return _rglru_over_time(x, gates, h0, {"resets": resets, "lengths": lengths, "c": c})
    if not _sizes():
        return rglru_api.rglru(x, gates, h0, resets=resets, lengths=lengths, starts=starts, c=c)
    real, blocks = gates.imaginary_param is None, len(gates.input_weight)
    split = _axis(MODEL, blocks) if real else None
    rows = _axis(DATA, len(x))
    tokens, channels = PartitionSpec(rows, None, split), PartitionSpec(split)
    states = PartitionSpec(rows, split)

    def island(x: Array, gates: Gates, h0: Array, layout: dict[str, Any]) -> tuple[Array, Array]:
        return rglru_api.rglru(x, gates, h0, **layout, c=c)

    layout = {"resets": resets, "lengths": lengths, "starts": starts}
    specs = jax.tree.map(lambda _: PartitionSpec(rows), layout)
    return jax.shard_map(
        island,
        in_specs=(tokens, jax.tree.map(lambda _: channels, gates), states, specs),
        out_specs=(tokens, states),
        check_vma=False,
    )(x, gates, h0, layout)


def local_attention(q: Array, keys: Array, values: Array, max_age: Array, **layout: Any) -> Array:
    """Run `griffin_eval.kernels.attention.api.local_attention` with some of the heads, and the keys
    that they need, on each device."""
    if not _sizes():
        return attention_api.local_attention(q, keys, values, max_age, **layout)
    split, rows = _head_axis(q, keys), _axis(DATA, len(q))
    by_row = PartitionSpec(rows)
    of_keys = split if keys.shape[-1] > q.shape[3] else None
    past = layout.pop("past")

    def island(
        q: Array, keys: Array, values: Array, max_age: Array, layout: dict[str, Any]
    ) -> Array:
        return attention_api.local_attention(q, keys, values, max_age, past=past, **layout)

    specs = jax.tree.map(lambda x: by_row if jnp.ndim(x) else PartitionSpec(), layout)
    kept = joined = by_row
    if of_keys:
        kept = PartitionSpec(rows, None, of_keys)
        joined = PartitionSpec(rows, of_keys) if keys.ndim == 2 else kept
        if remembered := layout.get("remembered"):
            specs["remembered"] = remembered._replace(keys=kept, values=kept, rows=by_row)
    return jax.shard_map(
        island,
        in_specs=(PartitionSpec(rows, None, split), joined, joined, by_row, specs),
        out_specs=PartitionSpec(rows, None, split),
        check_vma=False,
    )(q, keys, values, max_age, layout)


def before(past: Array, new: Array) -> Array:
    """Return the values before the tokens of a step: ``past`` [B, P, X] of the state or, if a
    document is split along time, on all devices but the first the last P values of the previous
    device. ``new`` [B, T, X] are those of the tokens; T >= P if a document is split."""
    devices, count, length = _devices_in_time(), past.shape[1], new.shape[1]
    if devices == 1 or not count:
        return past
    onwards = [(device, device + 1) for device in range(devices - 1)]
    received = jax.lax.ppermute(new[:, length - count :], TIME, onwards)
    return jnp.where(jax.lax.axis_index(TIME) == 0, past, received)


def _rglru_over_time(
    x: Array, gates: Gates, h0: Array, layout: dict[str, Any]
) -> tuple[Array, Array]:
    """Run the RG-LRU with a part of the tokens on each device.

    Each device first reads its part from a zero state. From the final states and total decays of
    all parts, it computes the state before its part, and reads the part again from there. The last
    state is equal on all devices.
    """
    first, here = jax.lax.axis_index(TIME) == 0, jax.lax.axis_index(TIME)
    start = jnp.where(first, h0, jnp.zeros_like(h0))
    _, last = rglru_api.rglru(x, gates, start, starts=None, **layout)
    decay = plain_rglru.total_decay(x, gates, **layout).astype(last.dtype)
    decays, ends = jax.lax.all_gather(jnp.stack([decay, last]), TIME, axis=1)
    state, mine = ends[0], h0
    for device in range(1, len(ends)):
        mine = jnp.where(here == device, state, mine)
        state = decays[device] * state + ends[device]
    y, _ = rglru_api.rglru(x, gates, mine, starts=None, **layout)
    return y, state


def first_number(y: Array, q: Array, keys: Array) -> Array:
    """Return one element of attention's result on each device, to order what depends on it."""
    if not _sizes():
        return y.ravel()[0]
    return jax.shard_map(
        lambda y: y.ravel()[0],
        in_specs=PartitionSpec(_axis(DATA, len(y)), None, _head_axis(q, keys)),
        out_specs=PartitionSpec(),
        check_vma=False,
    )(y)


def _head_axis(q: Array, keys: Array) -> str | None:
    """Return the mesh axis that splits the heads of queries, and of keys if there are several; None
    if they are not split."""
    several = keys.shape[-1] // q.shape[3]
    return _axis(MODEL, several if several > 1 else q.shape[2])


def _devices_in_time() -> int:
    """Return the number of devices that split a document along time; 1 outside `jax.shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape.get(TIME, 1) if mesh.are_all_axes_manual else 1


def _sizes() -> dict[str, int]:
    """Return the current mesh's sizes; empty for one device or inside `jax.shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    return dict(mesh.shape) if mesh.size > 1 and not mesh.are_all_axes_manual else {}


def _axis(name: str, count: int) -> str | None:
    """Return the name of a mesh axis if it exists and divides the count; otherwise None."""
    sizes = _sizes()
    return name if name in sizes and count % sizes[name] == 0 else None
