"""The model on several devices: what XLA does not split by itself.

`jax.set_mesh` says over which devices a function is compiled. XLA then splits all products by how
the weights lie (`griffin_eval.sharding`). Kernels are opaque to it: here they run in islands of
`jax.shard_map`, each device on its own channels or heads, without any communication.

On a mesh of the one axis ``time`` the whole model runs in such an island, each device on its own
part of the tokens of a document. There the recurrence, the convolution and attention need something
of the devices before: see `rglru` and `before`.
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
    """A mesh of JAX's devices, which splits the batch ``data`` times, and the weights over as many
    devices each."""
    shape = data, len(devices) // data
    return Mesh(np.array(devices).reshape(shape), (DATA, MODEL), axis_types=(AxisType.Auto,) * 2)


def make_time_mesh(devices: Sequence[Any]) -> Mesh:
    """A mesh of JAX's devices, which reads documents together, each a part of their tokens."""
    return Mesh(np.array(devices), (TIME,), axis_types=(AxisType.Auto,))


def param_sharding(mesh: Mesh, split: Split, spec: ParamSpec) -> NamedSharding:
    """How a parameter lies on a mesh."""
    return NamedSharding(mesh, PartitionSpec(*split.axes(spec)))


def training_sharding(mesh: Mesh, split: Split, spec: ParamSpec) -> NamedSharding:
    """How a parameter lies on a mesh between training steps."""
    return NamedSharding(mesh, PartitionSpec(*split.axes_in_training(spec, mesh.shape[DATA])))


def gathered(split: Split, spec: ParamSpec, value: Array) -> Array:
    """A parameter in training, whole in every replica: what is computed with."""
    if not _sizes():
        return value
    return jax.lax.with_sharding_constraint(value, PartitionSpec(*split.axes(spec)))


def axis_size(name: str) -> int:
    """Devices along an axis of the mesh that is set, 1 without one."""
    return _sizes().get(name, 1)


def summed(partial: Array, split: bool = True) -> Array:
    """The same array, whole on every device but for its rows: here XLA adds up what devices can
    only compute in part, if they do (so ``split`` says nothing). What these are called, `SUMS`,
    tells a training step what to keep that computes activations again."""
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
    """`griffin_eval.kernels.rglru.api.rglru`, each device with whole blocks of the gates, or with a
    part of the tokens."""
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
    """`griffin_eval.kernels.attention.api.local_attention`, each device with some of the heads, and
    with the keys that they need."""
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
    """What lies before the tokens of a step: what the state remembers, or on every device but the
    first of a document that is split along time, the last values of the device before.

    Args:
        past: remembered values [B, P, X].
        new: those of the tokens [B, T, X]; T >= P where a document is split.
    """
    devices, count, length = _devices_in_time(), past.shape[1], new.shape[1]
    if devices == 1 or not count:
        return past
    onwards = [(device, device + 1) for device in range(devices - 1)]
    received = jax.lax.ppermute(new[:, length - count :], TIME, onwards)
    return jnp.where(jax.lax.axis_index(TIME) == 0, past, received)


def _rglru_over_time(
    x: Array, gates: Gates, h0: Array, layout: dict[str, Any]
) -> tuple[Array, Array]:
    """The RG-LRU where each device has a part of the tokens. Each first reads its part from a state
    of zero. What that ends in, and how much is left of an earlier state, tells all devices the
    state before their part, from which they read it again. The last state is the same on all."""
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
    """A number of what attention gives, of each device its own: what needs it comes after."""
    if not _sizes():
        return y.ravel()[0]
    return jax.shard_map(
        lambda y: y.ravel()[0],
        in_specs=PartitionSpec(_axis(DATA, len(y)), None, _head_axis(q, keys)),
        out_specs=PartitionSpec(),
        check_vma=False,
    )(y)


def _head_axis(q: Array, keys: Array) -> str | None:
    """The axis of the mesh that splits the heads of queries, and with them those of keys if there
    are several; None if they lie whole."""
    several = keys.shape[-1] // q.shape[3]
    return _axis(MODEL, several if several > 1 else q.shape[2])


def _devices_in_time() -> int:
    """Devices that read a document together, each a part of its tokens; 1 outside an island."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape.get(TIME, 1) if mesh.are_all_axes_manual else 1


def _sizes() -> dict[str, int]:
    """Devices along each axis of the mesh that is set; none of one device, or inside an island."""
    mesh = jax.sharding.get_abstract_mesh()
    return dict(mesh.shape) if mesh.size > 1 and not mesh.are_all_axes_manual else {}


def _axis(name: str, count: int) -> str | None:
    """The axis of the mesh of that name, None if it does not divide so many heads, blocks or
    rows."""
    sizes = _sizes()
    return name if name in sizes and count % sizes[name] == 0 else None
