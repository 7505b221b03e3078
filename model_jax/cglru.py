"""The complex-gated recurrence of appendix B."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Complex, Float

from griffin_eval.config import GriffinConfig
from griffin_eval.kernels.rglru.api import linear_scan
from griffin_eval.kernels.rglru.plain_jax import block_diagonal, bounded_sqrt
from griffin_eval.kernels.rglru.reference import C
from griffin_eval.layout import Scope
from griffin_eval.model_jax.chunks import Chunk
from griffin_eval.model_jax.layers import _like, wide


class CGLRU(nnx.Module):
    """Complex-gated linear recurrent unit (appendix B), in float32 or wider throughout.

    The first half of x, h and the states is the real parts of Z = L / 2 channels, the second half
    the imaginary parts.
    """

    def __init__(self, config: GriffinConfig, params: Scope):
        self.recurrent_param = params("recurrent_param")
        self.imaginary_param = params("imaginary_param")
        self.input_gate_weight = params("input_gate_weight")
        self.input_gate_bias = params("input_gate_bias")
        self.recurrent_gate_weight = params("recurrent_gate_weight")
        self.recurrent_gate_bias = params("recurrent_gate_bias")

    def __call__(
        self, x: Float[Array, "B T L"], chunk: Chunk, h0: Float[Array, "S L"]
    ) -> tuple[Float[Array, "B T L"], Float[Array, "S L"]]:
        x_t = wide(x)
        # r_t = sigma(W_a x_t + b_a), i_t = sigma(W_x x_t + b_x), real, of all of x_t
        r_t = jax.nn.sigmoid(
            block_diagonal(x_t, self.recurrent_gate_weight[...], self.recurrent_gate_bias[...])
        )
        i_t = jax.nn.sigmoid(
            block_diagonal(x_t, self.input_gate_weight[...], self.input_gate_bias[...])
        )
        # log a_t = (-c softplus(Lambda) + i theta) r_t
        log_a = -C * _like(jax.nn.softplus(wide(self.recurrent_param[...])), x) * r_t
        angle = _like(wide(self.imaginary_param[...]), x) * r_t
        # h_t = a_t h_{t-1} + sqrt(1 - |a_t|^2) (i_t x_t); a document starts with h_t = i_t x_t.
        radius, starts = jnp.exp(log_a), chunk.positions == 0
        a_t = lax.complex(radius * jnp.cos(angle), radius * jnp.sin(angle))
        multiplier = bounded_sqrt(-jnp.expm1(2 * log_a))
        multiplier = jnp.where(starts[:, :, None], 1.0, multiplier)
        gated = jnp.concatenate([multiplier * i_t] * 2, -1) * x_t
        layout = chunk.layout
        h, last = linear_scan(
            a_t,
            _joined(gated),
            _joined(h0),
            resets=starts,
            lengths=layout.lengths,
            starts=layout.starts,
        )
        return _halves(h).astype(x.dtype), _halves(last)


def _joined(halves: Float[Array, "*N L"]) -> Complex[Array, "*N Z"]:
    """Complex numbers, from their real parts and, behind these, their imaginary parts."""
    return lax.complex(*jnp.split(halves, 2, -1))


def _halves(numbers: Complex[Array, "*N Z"]) -> Float[Array, "*N L"]:
    """The reverse of `_joined`."""
    return jnp.concatenate([numbers.real, numbers.imag], -1)
