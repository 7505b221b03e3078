"""The recurrence and the RG-LRU for torch on a CUDA device, in Triton, forward and backward.

Memory traffic decides the speed. One kernel computes the RG-LRU after its two products: sigmoids,
decay, multiplier and recurrence. The backward pass keeps only x and h and recomputes products,
gates and decays, so that neither a_t nor a gate is ever stored.

The products W_a x_t and W_x x_t are one batched matrix product of cuBLAS with a float32 result. In
a kernel that goes through time, only the few programs of the recurrence would compute them, each
with a block of weights that exceeds a multiprocessor's memory (2 x 256 x 256), and twice in the
three phases of `triton_kernels`; and the backward pass needs sums over all columns of a block (for
x) and over all tokens (for the weights), which are matrix products again. The price is a float32
array of 2D, written and read once per pass. In bfloat16 the products are exact before they are
summed in float32, as in the models, at the speed of the matrix units.
"""

import functools
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from griffin_eval.errors import MissingExtraError
from griffin_eval.kernels.devices import multiprocessors
from griffin_eval.kernels.rglru.reference import C, Gates
from griffin_eval.kernels.rglru.shapes import check_rglru, check_scan

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_COLUMNS = 64  # approximate columns of a program; the kernels tune them
_SHORTEST = 64  # smallest number of tokens of a chunk: a state costs as much as three of them
_ROUND = 16  # divisor of a chunk's number of tokens


def linear_scan(
    a: Float[Tensor, "B T D"],
    x: Float[Tensor, "B T D"],
    h0: Float[Tensor, "S D"] | None = None,
    *,
    resets: Bool[Tensor, "B T"] | None = None,
    lengths: Int[Tensor, " S"] | None = None,
    starts: Int[Tensor, " S"] | None = None,
    chunks: int | None = None,
) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "S D"]]:
    """Compute h_t = a_t h_{t-1} + x_t (equation 4), in float32.

    Arguments and results are those of `griffin_eval.kernels.rglru.api.linear_scan`, with a, x and
    h0 in float32, bfloat16 or float16. Lengths and starts are not checked. Padding of h and of
    gradients is 0. Time is divided into ``chunks``, by default `time_chunks`.

    Raises:
        ArgumentError: Shapes do not match.
        NotImplementedError: A dtype is not supported, or there is no CUDA device.
        MissingExtraError: triton is not installed.
    """
    check_scan(x, a, h0, resets, lengths, starts)
    _check_dtypes(a=a, x=x, h0=h0)
    layout = _layout(x, resets, lengths, starts, chunks)
    return _LinearScan.apply(a, x, h0, layout)  # type: ignore[no-any-return]


def rglru(
    x: Float[Tensor, "B T L"],
    gates: Gates,
    h0: Float[Tensor, "S L"] | None = None,
    *,
    resets: Bool[Tensor, "B T"] | None = None,
    lengths: Int[Tensor, " S"] | None = None,
    starts: Int[Tensor, " S"] | None = None,
    chunks: int | None = None,
) -> tuple[Float[Tensor, "B T L"], Float[Tensor, "S L"]]:
    """Compute the RG-LRU (section 2.4, equations 1 to 4), its gates in float32.

    Arguments and results are those of `griffin_eval.kernels.rglru.api.rglru`, with x and parameters
    in float32, bfloat16 or float16, and ``chunks`` as in `linear_scan`. The derivative of sqrt is
    at most 1000.

    Raises:
        As `linear_scan`, and NotImplementedError for the complex gates of appendix B.
    """
    if gates.imaginary_param is not None:
        raise NotImplementedError("the Triton kernels have no complex gates")
    check_rglru(x, gates, h0, resets, lengths, starts)
    _check_dtypes(x=x, h0=h0, **gates._asdict())
    layout = _layout(x, resets, lengths, starts, chunks, gates=True)
    return _RGLRU.apply(x, h0, layout, *gates[:5])  # type: ignore[no-any-return]


def time_chunks(
    segments: int, longest: int, width: int, processors: int, *, gates: bool = False
) -> int:
    """Return the number of time chunks for which the programs fill the device.

    It is one if segments and columns alone fill it, so that each array is read once; otherwise
    inputs are read twice. The scan waits for memory: it is divided below two programs per
    multiprocessor, into eight. The RG-LRU also waits for arithmetic, and is fastest with at least
    nineteen.

    Args:
        segments: Number of independent recurrences.
        longest: Upper bound of their tokens.
        width: Number of columns, D.
        processors: Number of multiprocessors of the device.
        gates: Whether decays are computed from gates.
    """
    programs = segments * -(-width // _COLUMNS)
    fewest, wanted = (15, 19) if gates else (2, 8)
    if not programs or programs >= fewest * processors:
        return 1
    return max(1, min(-(-wanted * processors // programs), longest // _SHORTEST))


def unsupported(x: Tensor, gates: Gates | None, starts: Tensor | None) -> str | None:
    """Return the reason why these kernels cannot read x, or None."""
    if not x.is_cuda:
        return f"the Triton kernels need a CUDA device, and x is on {x.device}"
    if x.dtype not in DTYPES:
        return f"the Triton kernels take float32, bfloat16 or float16, not {x.dtype}"
    if gates is not None and gates.imaginary_param is not None:
        return "the Triton kernels have no complex gates"
    if find_spec("triton") is None:
        return str(MissingExtraError("triton", "torch"))
    return None


class _Layout(NamedTuple):
    """The positions of tokens, and their division among programs."""

    resets: Tensor | None
    starts: Tensor | None
    lengths: Tensor | None
    segments: int
    tokens: int
    rows: int  # tokens of a row
    width: int
    chunks: int
    chunk: int  # tokens of a chunk

    @property
    def bucket(self) -> int:
        """The tuning key: the magnitude of the number of programs if time is long."""
        return min((self.segments * self.chunks).bit_length(), 8) if self.chunk > _ROUND else 0

    def empty(self, like: Tensor, *shape: int) -> Tensor:
        """Return a tensor for a result of the kernels, which write only tokens: padding is 0."""
        padded = self.starts is not None or self.lengths is not None
        return (like.new_zeros if padded else like.new_empty)(shape or like.shape)

    def states(self, like: Tensor) -> Tensor:
        """Return a tensor for the states of every chunk, [S, chunks, D], float32."""
        shape = (self.segments, self.chunks, self.width)
        return torch.empty(shape, dtype=torch.float32, device=like.device)

    def launch(self, kernel: Any, **arguments: Any) -> None:
        kernel[lambda config: (self.segments, -(-self.width // config["BLOCK"]), self.chunks)](
            **arguments,
            resets=self.resets,
            starts=self.starts,
            lengths=self.lengths,
            tokens=self.tokens,
            rows=self.rows,
            width=self.width,
            chunk=self.chunk,
            bucket=self.bucket,
            enable_fp_fusion=True,
        )

    def scan_chunks(
        self, product: Tensor, end: Tensor, first: Tensor | None, reverse: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the initial states of all chunks, and the state after the last one."""
        states, last = torch.empty_like(end), torch.empty_like(end[:, 0])
        _kernels().scan_chunks[self.segments, -(-self.width // 32)](
            product,
            end,
            first,
            states,
            last,
            self.width,
            self.chunks,
            REVERSE=reverse,
            STEPS=16,
            BLOCK=32,
            num_warps=1,
            enable_fp_fusion=True,
        )
        return states, last


class _LinearScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a: Tensor, x: Tensor, h0: Tensor | None, layout: _Layout):
        step = _plain(a)
        h, last = _forward(layout, x.contiguous(), _float32(h0), step)
        ctx.save_for_backward(a, h, h0)
        ctx.layout = layout
        return h, last

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # type: ignore[override]
        a, h, h0 = ctx.saved_tensors
        da, dx = ctx.layout.empty(a), ctx.layout.empty(h)
        found = {"da": da, "dx": dx, **_NO_GATE_GRADIENTS}
        dh0 = _backward(ctx.layout, h, _float32(h0), grads, {**_plain(a), "x": None}, found)
        return da, dx, None if h0 is None else dh0.to(h0.dtype), None


class _RGLRU(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx, x: Tensor, h0: Tensor | None, layout: _Layout, *gates: Tensor):
        x = x.contiguous()
        h, last = _forward(layout, x, _float32(h0), _gated(x, Gates(*gates)))
        ctx.save_for_backward(x, h, h0, *gates)
        ctx.layout = layout
        return h, last

    @staticmethod
    @once_differentiable
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, *grads: Tensor):  # type: ignore[override]
        x, h, h0, *saved = ctx.saved_tensors
        layout, gates = ctx.layout, Gates(*saved)
        blocks, weight = _blocks(x, gates), _weight(gates)
        dtype = torch.promote_types(x.dtype, weight.dtype)
        dx = layout.empty(x.to(dtype))
        dgates = layout.empty(dx, blocks.shape[0], layout.tokens, weight.shape[2])
        sums = [layout.states(x) for _ in range(3)]
        dh0 = _backward(
            layout,
            h,
            _float32(h0),
            grads,
            {**_gated(x, gates), "x": x},
            {"da": None, "dx": dx, "dgates": dgates}
            | dict(zip(("dslope", "drecurrent_bias", "dinput_bias"), sums, strict=True)),
        )
        # The gradients of the products continue to x and to the weights.
        _blocks(dx, gates).baddbmm_(dgates, weight.mT.to(dtype))
        dweight = _product(blocks.mT, dgates)
        drecurrent, dinput = dweight.chunk(2, -1)
        dslope, drecurrent_bias, dinput_bias = (s.sum((0, 1)) for s in sums)
        found = Gates(
            dslope * C * torch.sigmoid(gates.recurrent_param.float()),
            dinput,
            dinput_bias,
            drecurrent,
            drecurrent_bias,
        )
        dgates = (d.reshape(p.shape).to(p.dtype) for d, p in zip(found[:5], gates[:5], strict=True))
        return dx.to(x.dtype), None if h0 is None else dh0.to(h0.dtype), None, *dgates


_NO_GATE_GRADIENTS = dict.fromkeys(("dgates", "dslope", "drecurrent_bias", "dinput_bias"))


def _plain(a: Tensor) -> dict[str, Any]:
    """Return the kernels' arguments for a step with a given decay a_t."""
    nothing = dict.fromkeys(("gates", "slope", "recurrent_bias", "input_bias"))
    return {"a": a.contiguous(), "GATE": 1, **nothing}


def _gated(x: Tensor, gates: Gates) -> dict[str, Any]:
    """Return the kernels' arguments for a step with gates: products, biases and slope."""
    return {
        "a": None,
        "GATE": gates.input_weight.shape[2],
        "gates": _product(_blocks(x, gates), _weight(gates)),
        "slope": C * torch.nn.functional.softplus(gates.recurrent_param.float()),
        "recurrent_bias": _float32(gates.recurrent_bias),
        "input_bias": _float32(gates.input_bias),
    }


def _forward(
    layout: _Layout, x: Tensor, h0: Tensor | None, step: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    h = layout.empty(x)
    run = functools.partial(layout.launch, _kernels().forward, x=x, **step)
    with torch.cuda.device_of(x):
        last = layout.states(x)
        if layout.chunks == 1:
            run(h0=h0, h=h, last=last, product=None)
            return h, last[:, 0]
        product = torch.empty_like(last)
        run(h0=None, h=None, last=last, product=product)
        states, end = layout.scan_chunks(product, last, h0, reverse=False)
        run(h0=states, h=h, last=None, product=None)
        return h, end


def _backward(
    layout: _Layout,
    h: Tensor,
    h0: Tensor | None,
    grads: tuple[Tensor, ...],
    step: dict[str, Any],
    results: dict[str, Tensor | None],
) -> Tensor:
    """Write the kernel's results into the tensors of ``results``; return the gradient of h0."""
    dh, dlast = (g.contiguous() for g in grads)
    run = functools.partial(layout.launch, _kernels().backward, h=h, h0=h0, dh=dh, **step)
    with torch.cuda.device_of(h):
        if layout.chunks == 1:
            before = layout.states(h)
            run(after=dlast, before=before, product=None, **results)
            return before[:, 0]
        product, end = layout.states(h), layout.states(h)
        run(after=None, before=end, product=product, **dict.fromkeys(results))
        states, dh0 = layout.scan_chunks(product, end, dlast, reverse=True)
        run(after=states, before=end, product=None, **results)
        return dh0


def _float32(array: Tensor | None) -> Tensor | None:
    return None if array is None else array.float().contiguous()


def _weight(gates: Gates) -> Tensor:
    """Concatenate both matrices of every block, [G, L / G, 2 L / G]: W_a, then W_x."""
    return torch.cat([gates.recurrent_weight, gates.input_weight], -1)


def _blocks(x: Tensor, gates: Gates) -> Tensor:
    """Return a view of [B, T, L] by block, [G, B T, L / G]."""
    groups, size, _ = gates.input_weight.shape
    return x.view(-1, groups, size).transpose(0, 1)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """Compute x y for every block, accumulated and returned in float32."""
    if x.dtype == y.dtype != torch.float32 and x.is_cuda:
        return torch.bmm(x, y, out_dtype=torch.float32)
    return torch.bmm(x.float(), y.float())


def _layout(
    x: Tensor,
    resets: Tensor | None,
    lengths: Tensor | None,
    starts: Tensor | None,
    chunks: int | None,
    gates: bool = False,
) -> _Layout:
    kernels = _kernels()
    if not (x.is_cuda or kernels.INTERPRETED):
        raise NotImplementedError(f"the Triton kernels need a CUDA device, and x is on {x.device}")
    batch, rows, width = x.shape
    segments = batch if starts is None else len(starts)
    if chunks is None:
        # Packed segments are shorter than their row, so most of many chunks would be empty.
        many = gates and starts is None
        chunks = time_chunks(segments, rows, width, multiprocessors(x.device), gates=many)
    return _Layout(
        resets=None if resets is None else resets.contiguous().view(torch.uint8),
        starts=None if starts is None else starts.contiguous(),
        lengths=None if lengths is None else lengths.contiguous(),
        segments=segments,
        tokens=batch * rows,
        rows=rows,
        width=width,
        chunks=chunks,
        chunk=-(-rows // (chunks * _ROUND)) * _ROUND,
    )


@functools.cache
def _kernels() -> ModuleType:
    try:
        from griffin_eval.kernels.rglru import triton_kernels
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise MissingExtraError("triton", "torch") from None
    return triton_kernels


def _check_dtypes(**arrays: Tensor | None) -> None:
    wrong = [
        f"{name} is {array.dtype}"
        for name, array in arrays.items()
        if array is not None and array.dtype not in DTYPES
    ]
    if wrong:
        raise NotImplementedError(
            "the Triton kernels take float32, bfloat16 and float16: " + "; ".join(wrong)
        )
