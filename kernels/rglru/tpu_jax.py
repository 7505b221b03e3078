"""The recurrences in JAX on a TPU. Rows have their own kernels; packed segments become one row,
whose gates plain JAX computes."""

from typing import Any

from jax import Array
from jaxtyping import Bool, Float, Int

from griffin_eval.kernels.rglru import plain_jax
from griffin_eval.kernels.rglru.reference import Gates
from griffin_eval.kernels.rglru.tpu import rglru as rglru_tpu
from griffin_eval.kernels.rglru.tpu import scan as scan_tpu


def unsupported(x: Array, gates: Gates | None, starts: Array | None) -> str | None:
    """Return the reason why these kernels cannot read x, or None."""
    try:
        scan_tpu.check_dtypes(x=x)
        if gates is not None and starts is None:
            rglru_tpu.check(x, gates)
    except NotImplementedError as error:
        return str(error)
    return None


def linear_scan(
    a: Float[Array, "B T D"],
    x: Float[Array, "B T D"],
    h0: Float[Array, "S D"],
    *,
    resets: Bool[Array, "B T"] | None = None,
    lengths: Int[Array, " S"] | None = None,
    starts: Int[Array, " S"] | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B T D"], Float[Array, "S D"]]:
    """See `griffin_eval.kernels.rglru.api.linear_scan`."""
    layout = {"resets": resets, "lengths": lengths}
    if starts is None:
        return scan_tpu.linear_scan(a, x, h0, interpret=interpret, **layout)
    return plain_jax.linear_scan(a, x, h0, starts=starts, scan=scan_tpu.rows(interpret), **layout)


def rglru(
    x: Float[Array, "B T L"],
    gates: Gates,
    h0: Float[Array, "S L"],
    *,
    resets: Bool[Array, "B T"] | None = None,
    lengths: Int[Array, " S"] | None = None,
    starts: Int[Array, " S"] | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B T L"], Float[Array, "S L"]]:
    """See `griffin_eval.kernels.rglru.api.rglru`."""
    if starts is None:
        return rglru_tpu.rglru(x, gates, h0, resets=resets, lengths=lengths, interpret=interpret)
    scan = scan_tpu.rows(interpret)
    return plain_jax.rglru(x, gates, h0, resets=resets, lengths=lengths, starts=starts, scan=scan)
