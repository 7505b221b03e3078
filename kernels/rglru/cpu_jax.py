"""The recurrences in JAX on a CPU, in float32, by compiled kernels that XLA calls."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, ShapeDtypeStruct
from jaxtyping import Bool, Float, Int

from griffin_eval.kernels.cpu import compiled
from griffin_eval.kernels.rglru.reference import C, Gates


def unsupported(x: Array, gates: Gates | None, starts: Array | None) -> str | None:
    """Return the reason why these kernels cannot read x, or None."""
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"the compiled kernels take float32, bfloat16 or float16, not {x.dtype}"
    return compiled.missing_in_jax(_error)


def _error() -> float:
    one = np.ones((1, 1), np.float32)
    where = np.zeros(1, np.int32), np.ones(1, np.int32), np.zeros(1, bool)
    h, _ = _scan(one[None], one[None], one, *where)
    return abs(float(h[0, 0, 0]) - 2)


def linear_scan(
    a: Float[Array, "B T D"],
    x: Float[Array, "B T D"],
    h0: Float[Array, "S D"],
    *,
    resets: Bool[Array, "B T"] | None = None,
    lengths: Int[Array, " S"] | None = None,
    starts: Int[Array, " S"] | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "S D"]]:
    """See `griffin_eval.kernels.rglru.api.linear_scan`."""
    layout = _layout(x, resets, lengths, starts)
    h, last = _scan(*(v.astype(jnp.float32) for v in (a, x, h0)), *layout)
    return h.astype(x.dtype), last


def rglru(
    x: Float[Array, "B T L"],
    gates: Gates,
    h0: Float[Array, "S L"],
    *,
    resets: Bool[Array, "B T"] | None = None,
    lengths: Int[Array, " S"] | None = None,
    starts: Int[Array, " S"] | None = None,
    c: float = C,
) -> tuple[Float[Array, "B T L"], Float[Array, "S L"]]:
    """See `griffin_eval.kernels.rglru.api.rglru`."""
    h, last = _gated(
        x.astype(jnp.float32),
        gates.input_weight.astype(jnp.float32),
        gates.recurrent_weight.astype(jnp.float32),
        gates.input_bias.astype(jnp.float32).reshape(-1),
        gates.recurrent_bias.astype(jnp.float32).reshape(-1),
        -c * jax.nn.softplus(gates.recurrent_param.astype(jnp.float32)),
        h0.astype(jnp.float32),
        *_layout(x, resets, lengths, starts),
    )
    return h.astype(x.dtype), last


def from_products(x: Array, *arrays: Array) -> Array:
    """Return h [B, T, L] from x, gate `products`, biases and decay; not differentiable."""
    h0 = jnp.zeros((len(x), x.shape[2]), jnp.float32)
    return _call("gated", (x, h0), *_layout(x, None, None, None), x, *arrays, h0, over=3)[0]


def _layout(
    x: Array, resets: Array | None, lengths: Array | None, starts: Array | None
) -> tuple[Any, Any, Any]:
    """Return starts, lengths and resets as the kernels take them."""
    batch, time, _ = x.shape
    if lengths is None:
        lengths = jnp.full((batch,), time)
    if starts is None:
        starts = jnp.arange(batch) * time
        lengths = jnp.minimum(lengths, time)  # more would be tokens of the next row
    if resets is None:
        resets = jnp.zeros((batch, time), bool)
    return starts.astype(jnp.int32), lengths.astype(jnp.int32), resets.reshape(-1)


def _call(
    name: str, outputs: tuple[Any, ...], *arrays: Any, over: int | None = None
) -> tuple[Array, ...]:
    """Call a kernel whose results have the shapes of ``outputs``; the first result may overwrite
    the array number ``over``."""
    shapes = [ShapeDtypeStruct(array.shape, jnp.float32) for array in outputs]
    aliases = {} if over is None else {over: 0}
    call = jax.ffi.ffi_call(
        f"griffin_{name}", shapes, vmap_method="sequential", input_output_aliases=aliases
    )
    return tuple(call(*arrays))


@jax.custom_vjp
def _scan(a, x, h0, starts, lengths, resets):
    return _call("scan", (x, h0), starts, lengths, resets, a, x, h0, over=4)


def _scan_forward(a, x, h0, *layout):
    h, last = _call("scan", (x, h0), *layout, a, x, h0)
    return (h, last), (a, h0, h, layout)


def _scan_backward(saved, grads):
    a, h0, h, layout = saved
    da, dx, dh0 = _call("scan_backward", (a, h, h0), *layout, a, h0, h, *grads)
    return da, dx, dh0, None, None, None


_scan.defvjp(_scan_forward, _scan_backward)


@jax.custom_vjp
def _gated(x, input_weight, recurrent_weight, input_bias, recurrent_bias, decay, h0, *layout):
    both = products(x, input_weight, recurrent_weight)
    arrays = (*layout, x, *both, input_bias, recurrent_bias, decay, h0)
    return _call("gated", (x, h0), *arrays, over=3)


def _gated_forward(x, input_weight, recurrent_weight, *rest):
    biases_decay_h0, layout = rest[:4], rest[4:]
    both = products(x, input_weight, recurrent_weight)
    h, last = _call("gated", (x, rest[3]), *layout, x, *both, *biases_decay_h0)
    return (h, last), ((x, input_weight, recurrent_weight, *rest), h)


def _gated_backward(saved, grads):
    (x, input_weight, recurrent_weight, input_bias, recurrent_bias, decay, h0, *layout), h = saved
    both = products(x, input_weight, recurrent_weight)
    dx, dinput, drecurrent, ddecay, dh0 = _call(
        "gated_backward",
        (x, *both, decay, h0),
        *(*layout, x, *both, input_bias, recurrent_bias, decay, h0, h, *grads),
    )
    blocks = _blocks(x, input_weight)
    through = jnp.einsum("gno,gio->ngi", dinput, input_weight)
    through = through + jnp.einsum("gno,gio->ngi", drecurrent, recurrent_weight)
    return (
        dx + through.reshape(x.shape),
        jnp.einsum("ngi,gno->gio", blocks, dinput),
        jnp.einsum("ngi,gno->gio", blocks, drecurrent),
        dinput.sum(1).reshape(-1),
        drecurrent.sum(1).reshape(-1),
        ddecay,
        dh0,
        None,
        None,
        None,
    )


def products(x, *weights):
    """Return the products of each of the gates' weights [G, I, O] with x [B, T, L], [G, B T, O]."""
    return [jnp.einsum("ngi,gio->gno", _blocks(x, weight), weight) for weight in weights]


def _blocks(x, weight):
    return x.reshape(-1, weight.shape[0], weight.shape[1])


_gated.defvjp(_gated_forward, _gated_backward)
