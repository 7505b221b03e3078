"""The recurrences in PyTorch on a CPU, in float32, by compiled kernels."""

import ctypes
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from griffin_eval.kernels.cpu import compiled
from griffin_eval.kernels.rglru.reference import C, Gates

# Kinds of `griffin_rglru` and their arrays. All are float32 but starts and lengths [S], int32, and
# resets [N], uint8. D columns, N tokens, S segments in ascending order; the gates' products with x
# are [G, N, D / G]; decay = -c softplus(Λ).
SCAN = 0  # starts lengths resets a x -> h last; at the call `last` holds the initial states
SCAN_BACKWARD = 1  # starts lengths resets a h0 h dh dlast -> da dx dh0
GATED = 2  # starts lengths resets x input recurrent input_bias recurrent_bias decay -> h last
GATED_BACKWARD = 3  # arrays of GATED, h0 h dh dlast -> dx dinput drecurrent ddecay dh0

TILE = 1024  # tokens whose gate products are stored at a time


def unsupported(x: Tensor, gates: Gates | None, starts: Tensor | None) -> str | None:
    """Return the reason why these kernels cannot read x, or None."""
    if x.device.type != "cpu":
        return f"the compiled kernels run on a CPU, and x is on {x.device}"
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the compiled kernels take float32, bfloat16 or float16, not {x.dtype}"
    if torch.compiler.is_compiling():
        return "torch.compile cannot look into the compiled kernels"
    return compiled.missing()


def linear_scan(
    a: Float[Tensor, "B T D"],
    x: Float[Tensor, "B T D"],
    h0: Float[Tensor, "S D"],
    *,
    resets: Bool[Tensor, "B T"] | None = None,
    lengths: Int[Tensor, " S"] | None = None,
    starts: Int[Tensor, " S"] | None = None,
) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "S D"]]:
    """See `griffin_eval.kernels.rglru.api.linear_scan`."""
    flat = _flat(x)
    h, last = _Scan.apply(_flat(a), flat, _dense(h0), *layout(x, resets, lengths, starts))
    return h.view(x.shape).to(x.dtype), last


def rglru(
    x: Float[Tensor, "B T L"],
    gates: Gates,
    h0: Float[Tensor, "S L"],
    *,
    resets: Bool[Tensor, "B T"] | None = None,
    lengths: Int[Tensor, " S"] | None = None,
    starts: Int[Tensor, " S"] | None = None,
    c: float = C,
) -> tuple[Float[Tensor, "B T L"], Float[Tensor, "S L"]]:
    """See `griffin_eval.kernels.rglru.api.rglru`."""
    h, last = _Gated.apply(
        _flat(x),
        _dense(gates.input_weight),
        _dense(gates.recurrent_weight),
        _dense(gates.input_bias).flatten(),
        _dense(gates.recurrent_bias).flatten(),
        -c * F.softplus(gates.recurrent_param.float()),
        _dense(h0),
        *layout(x, resets, lengths, starts),
    )
    return h.view(x.shape).to(x.dtype), last


def _flat(x: Tensor) -> Tensor:
    return _dense(x).view(-1, x.shape[2])


def _dense(x: Tensor) -> Tensor:
    return x.float().contiguous()


def layout(
    x: Tensor,
    resets: Tensor | None = None,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Return starts, lengths and resets as the kernels take them, with None for defaults."""
    batch, time, _ = x.shape
    if starts is None and lengths is not None:
        lengths = lengths.clamp(max=time)  # more would be tokens of the next row
        starts = torch.arange(batch, dtype=torch.int32, device=x.device) * time
    return (
        None if starts is None else starts.to(torch.int32).contiguous(),
        None if lengths is None else lengths.to(torch.int32).contiguous(),
        None if resets is None else resets.contiguous().view(torch.uint8),
    )


def run(
    kind: int,
    into: Sequence[Tensor | None],
    out: Sequence[Tensor],
    states: int,
    gates: int = 0,
    part: tuple[int, int] | None = None,
) -> None:
    """Call a kernel of cpu.c. The fourth array of ``into`` is [N, D]; ``part`` is a token range."""
    assert into[3] is not None
    tokens, width = into[3].shape
    low, high = part or (0, tokens)
    sizes = (ctypes.c_int64 * 6)(tokens, width, gates, states, low, high)
    pointers = [
        (ctypes.c_void_p * len(arrays))(
            *[None if array is None else array.data_ptr() for array in arrays]
        )
        for arrays in (into, out)
    ]
    library = compiled.library_for_torch()
    assert library is not None
    library.griffin_rglru(kind, sizes, *pointers, torch.get_num_threads())


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, x, h0, *where: Tensor | None) -> tuple[Tensor, Tensor]:
        h, last = torch.empty_like(x), h0.clone()
        run(SCAN, [*where, a, x], [h, last], len(h0))
        ctx.save_for_backward(a, h0, h, *where)
        return h, last

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # type: ignore[override]
        a, h0, h, *where = ctx.saved_tensors
        da, dx, dh0 = torch.empty_like(a), torch.empty_like(a), torch.empty_like(h0)
        into = [*where, a, h0, h, *(grad.contiguous() for grad in grads)]
        run(SCAN_BACKWARD, into, [da, dx, dh0], len(h0))
        return da, dx, dh0, None, None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(
        ctx, x, input_weight, recurrent_weight, input_bias, recurrent_bias, decay, h0, *where
    ) -> tuple[Tensor, Tensor]:
        h, last = torch.empty_like(x), h0.clone()
        weights, biases = (input_weight, recurrent_weight), (input_bias, recurrent_bias)
        blocks = _blocks(x, input_weight)
        # Tiles keep the products in a cache until they are read.
        for low in range(0, len(x), TILE):
            high = min(low + TILE, len(x))
            products = [torch.bmm(blocks[:, low:high], weight) for weight in weights]
            into = [*where, x, *products, *biases, decay]
            run(GATED, into, [h, last], len(h0), len(input_weight), (low, high))
        ctx.save_for_backward(x, *weights, *biases, decay, h0, h, *where)
        return h, last

    @staticmethod
    @once_differentiable
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, *grads: Tensor):  # type: ignore[override]
        x, input_weight, recurrent_weight, *rest = ctx.saved_tensors
        input_bias, recurrent_bias, decay, h0, h, *where = rest
        blocks = _blocks(x, input_weight)
        products = [torch.bmm(blocks, weight) for weight in (input_weight, recurrent_weight)]
        dx, dinput, drecurrent, ddecay, dh0 = (
            torch.empty_like(like) for like in (x, *products, decay, h0)
        )
        into = [*where, x, *products, input_bias, recurrent_bias, decay, h0, h]
        into += [grad.contiguous() for grad in grads]
        run(
            GATED_BACKWARD,
            into,
            [dx, dinput, drecurrent, ddecay, dh0],
            len(h0),
            len(input_weight),
        )
        through = _blocks(dx, input_weight)  # a view
        through.baddbmm_(dinput, input_weight.transpose(1, 2))
        through.baddbmm_(drecurrent, recurrent_weight.transpose(1, 2))
        return (
            dx,
            torch.bmm(blocks.transpose(1, 2), dinput),
            torch.bmm(blocks.transpose(1, 2), drecurrent),
            dinput.sum(1).flatten(),
            drecurrent.sum(1).flatten(),
            ddecay,
            dh0,
            None,
            None,
            None,
        )


def _blocks(x: Tensor, weight: Tensor) -> Tensor:
    """Reshape [N, L] to [G, N, L / G]."""
    return x.view(len(x), weight.shape[0], -1).transpose(0, 1)
