"""Shared parts of the TPU kernels: a block of time and channels in VMEM, and the scan over it.

Time is divided into eight segments, one for each sublane of a register: step j of all eight is one
strided load. The first pass over a block computes the effect of each segment on a state that enters
it (product of a, h from zero); the second pass knows that state and writes h. Nothing is
transposed, and all lanes of a register work in every instruction.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

SUBLANES, LANES = 8, 128
TILE = 16  # steps handled at once outside the scan: one packed register of bfloat16

Ref = Any


class Columns:
    """[R, L] float32 in VMEM as L / 128 columns, each of eight segments one row apart.

    This makes the pitch of the segments odd, so that a strided load meets no memory bank twice.
    """

    def __init__(self, ref: Ref, lanes: int):
        self.ref = ref
        self.count = lanes // LANES
        self.stride = ref.shape[0] // self.count
        self.pitch = self.stride // SUBLANES
        self.steps = self.pitch - 1

    @staticmethod
    def scratch(rows: int, lanes: int) -> Any:
        """Return the scratch memory of a block; ``rows`` is a multiple of 128."""
        return pltpu.VMEM((lanes // LANES * (rows + SUBLANES), LANES), jnp.float32)

    def step(self, column: int, j: Array) -> Any:
        """Return the index of step j of all segments."""
        return pl.ds(column * self.stride + j, SUBLANES, stride=self.pitch), slice(None)

    def _tile(self, column: int, k: Array) -> Any:
        row = k * TILE + lax.div(k, self.steps // TILE)
        return pl.ds(column * self.stride + row, TILE), slice(None)

    def put(self, k: Array, value: Array) -> None:
        """Store the [16, L] of tile k."""
        for c in range(self.count):
            self.ref[self._tile(c, k)] = value[:, c * LANES : (c + 1) * LANES]

    def get(self, k: Array) -> Array:
        """Load the [16, L] of tile k."""
        return jnp.concatenate([self.ref[self._tile(c, k)] for c in range(self.count)], 1)


def scan(a: Columns, x: Columns, state: Ref, *, reverse: bool = False, unroll: int = 8) -> None:
    """Scan a block in place.

    Forward: h_t = a_t h_{t-1} + x_t. Reverse: g_t = x_t + c_{t+1} with c_t = a_t g_t as the state.

    Args:
        a: Decay.
        x: Input, overwritten by h or g.
        state: [1, L] h before the first step, or c after the last; overwritten by the state at the
            other end.
        unroll: Number of unrolled steps in the loops.
    """
    columns = range(x.count)

    def advance(c: int, j: Array, h: Array) -> tuple[Array, Array, Array]:
        at = x.step(c, x.steps - 1 - j if reverse else j)
        a_t, x_t = a.ref[at], x.ref[at]
        if reverse:
            g = x_t + h
            return a_t, a_t * g, g
        h = a_t * h + x_t
        return a_t, h, h

    def effect(j: Array, carry: list) -> list:
        new = []
        for c in columns:
            product, h = carry[c]
            a_t, h, _ = advance(c, j, h)
            new.append((product * a_t, h))
        return new

    def write(j: Array, carry: list) -> list:
        new = []
        for c in columns:
            _, h, out = advance(c, j, carry[c])
            x.ref[x.step(c, x.steps - 1 - j if reverse else j)] = out
            new.append(h)
        return new

    lanes = [pl.ds(c * LANES, LANES) for c in columns]
    zeros = jnp.zeros((SUBLANES, LANES), jnp.float32)
    effects: list = lax.fori_loop(
        0, x.steps, effect, [(zeros + 1.0, zeros)] * x.count, unroll=unroll
    )
    entering = [
        _entering(effects[c][0], effects[c][1], state[:, lanes[c]], reverse) for c in columns
    ]
    leaving = lax.fori_loop(0, x.steps, write, entering, unroll=unroll)
    for c in columns:
        state[:, lanes[c]] = leaving[c][:1] if reverse else leaving[c][-1:]


def _entering(product: Array, h: Array, state: Array, reverse: bool) -> Array:
    """Return the states that enter the segments, [8, 128], from effects and the first state."""
    order = range(SUBLANES)
    row = lax.broadcasted_iota(jnp.int32, h.shape, 0)
    entering = jnp.zeros_like(h)
    for s in reversed(order) if reverse else order:
        entering = jnp.where(row == s, state, entering)
        state = product[s : s + 1] * state + h[s : s + 1]
    return entering


class Tile:
    """Sixteen steps of a block, with masks for starts of documents and padding.

    Attributes:
        k: Number of the tile.
        rows: Index of its steps in the block.
        starts: [16, 1] bool, or None if no document starts.
        padding: [16, 1] bool, or None without padding.
    """

    def __init__(self, k: Array, starts: Array | None, padding: Array | None):
        self.k = k
        self.rows = pl.ds(pl.multiple_of(k * TILE, TILE), TILE)
        self.starts = starts
        self.padding = padding

    def read(self, ref: Ref) -> Array:
        """Read [16, L] float32 from a [R, L] reference."""
        return ref[self.rows, :].astype(jnp.float32)

    def at_starts(self, value: float, array: Array) -> Array:
        """Set a value where documents start."""
        return array if self.starts is None else jnp.where(self.starts, value, array)

    def at_padding(self, value: float, array: Array) -> Array:
        """Set a value at padding."""
        return array if self.padding is None else jnp.where(self.padding, value, array)


class Blocks(NamedTuple):
    """The division of a [B, T, D] array: the grid is (channels, batch, time), time innermost.

    A block may extend past the array: values read there are never used, writes there are dropped.
    """

    batch: int
    time: int
    width: int
    rows: int
    lanes: int
    reverse: bool = False
    interpret: Any = False

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        *,
        interpret: Any,
        lanes: int | None = None,
        max_rows: int = 512,
        reverse: bool = False,
    ) -> "Blocks":
        """Return blocks of at most ``max_rows`` rows, by default with the lanes of least waste."""
        batch, time, width = shape
        rows = round_up(pl.cdiv(time, pl.cdiv(time, max_rows)), SUBLANES * TILE)
        lanes = lanes or min((512, 384, 256, 128), key=lambda n: round_up(width, n))
        return cls(batch, time, width, rows, lanes, reverse, interpret)

    @property
    def steps(self) -> int:
        return pl.cdiv(self.time, self.rows)

    @property
    def grid(self) -> tuple[int, int, int]:
        return pl.cdiv(self.width, self.lanes), self.batch, self.steps

    def _order(self, t: Array) -> Array:
        return self.steps - 1 - t if self.reverse else t

    def sequence(self) -> pl.BlockSpec:
        """Return the spec of [R, L] of [B, T, D]."""
        return pl.BlockSpec((None, self.rows, self.lanes), lambda i, b, t: (b, self._order(t), i))

    def before(self) -> pl.BlockSpec:
        """Return the spec of [16, L] of [B, T, D], the steps before a block (any for the first)."""
        tiles = self.rows // TILE
        return pl.BlockSpec(
            (None, TILE, self.lanes),
            lambda i, b, t: (b, jnp.maximum(self._order(t) * tiles - 1, 0), i),
        )

    def states(self) -> pl.BlockSpec:
        """Return the spec of [min(B, 8), L] of [B, D]; `row` is a program's row in it."""
        rows = min(self.batch, SUBLANES)
        return pl.BlockSpec((rows, self.lanes), lambda i, b, t: (lax.div(b, rows), i))

    def row(self) -> Any:
        """Return the index of a program's row in a block of `states`."""
        return pl.ds(lax.rem(pl.program_id(1), min(self.batch, SUBLANES)), 1), slice(None)

    def state_before(self, before: Ref, h0: Ref) -> Array:
        """Return the state before a program's block, [1, L] float32."""
        first = self._order(pl.program_id(2)) == 0
        return jnp.where(first, h0[self.row()], before[TILE - 1 :, :].astype(jnp.float32))

    def state(self) -> Any:
        """Return the scratch memory of a state, [1, L]."""
        return pltpu.VMEM((1, self.lanes), jnp.float32)

    def lengths(self, lengths: Array | None) -> pl.BlockSpec | None:
        """Return the spec of [B] in SMEM."""
        return None if lengths is None else pl.BlockSpec(memory_space=pltpu.SMEM)

    def words(self, words: Array | None) -> pl.BlockSpec | None:
        """Return the spec of [R / 16] words from `pack`."""
        if words is None:
            return None
        return pl.BlockSpec(
            (None, None, self.rows // TILE),
            lambda i, b, t: (b * self.steps + self._order(t), 0, 0),
            memory_space=pltpu.SMEM,
        )

    def pack(self, flags: Array | None) -> Array | None:
        """Pack [B, T] bool into [B * steps, 1, R / 16] int32, one bit each."""
        if flags is None:
            return None
        padded = jnp.pad(flags, ((0, 0), (0, self.steps * self.rows - self.time)))
        bits = padded.reshape(self.batch * self.steps, 1, self.rows // TILE, TILE).astype(jnp.int32)
        return (bits << jnp.arange(TILE, dtype=jnp.int32).reshape(1, 1, 1, TILE)).sum(-1)

    def count(self, lengths: Ref | None) -> Any:
        """Return the number of steps to read of a program's block; None if all blocks are full."""
        if lengths is None and self.time % self.rows == 0:
            return None
        length = self.time if lengths is None else lengths[pl.program_id(1)]
        return length - self._order(pl.program_id(2)) * self.rows

    @contextmanager
    def carry(self, state: Ref, first: Ref, last: Ref) -> Iterator[None]:
        """Take the state from ``first`` before the first block, and store the final one in
        ``last``."""
        row = self.row()

        @pl.when(pl.program_id(2) == 0)
        def _() -> None:
            state[...] = first[row]

        yield

        @pl.when(pl.program_id(2) == self.steps - 1)
        def _() -> None:
            last[row] = state[...]

    def each_tile(
        self,
        visit: Callable[[Tile, Any], Any],
        count: Any = None,
        words: Ref | None = None,
        carry: Any = None,
    ) -> Any:
        """Visit the tiles of a block in order, and return the result of the last visit.

        Args:
            visit: Function of a `Tile` and the result of the previous visit.
            count: Number of steps to read; all by default.
            words: Bits of `pack`, or None if no document starts.
            carry: Argument of the first visit.
        """
        step = lax.broadcasted_iota(jnp.int32, (TILE, 1), 0)
        tiles = self.rows // TILE

        def body(masked: bool) -> Callable:
            def tile(k: Array, carry: Any) -> Any:
                starts = None if words is None else (words[k] >> step) & 1 == 1
                return visit(Tile(k, starts, k * TILE + step >= count if masked else None), carry)

            return tile

        if count is None:
            return lax.fori_loop(0, tiles, body(False), carry, unroll=1 if self.interpret else 4)
        whole = jnp.clip(lax.div(count, TILE), 0, tiles)
        carry = lax.fori_loop(0, whole, body(False), carry)
        return lax.fori_loop(whole, tiles, body(True), carry)

    def scan(self, a: Columns, x: Columns, state: Ref) -> None:
        """Call `scan` in the direction of time, or against it."""
        scan(a, x, state, reverse=self.reverse, unroll=1 if self.interpret else 8)

    def call(self, kernel: Callable, **arguments: Any) -> Callable[..., tuple[Array, ...]]:
        """Return `pl.pallas_call` over the grid."""
        call = pl.pallas_call(
            kernel,
            grid=self.grid,
            interpret=self.interpret,
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary", "arbitrary")
            ),
            **arguments,
        )
        return lambda *arrays: tuple(call(*arrays))


def previous(h: Array, before: Array) -> Array:
    """Shift [16, L] h of a tile by one step; the first row is ``before``, [1, L]."""
    row = lax.broadcasted_iota(jnp.int32, h.shape, 0)
    return jnp.where(row == 0, before, pltpu.roll(h, 1, 0))


def check_dtypes(**arrays: Array) -> None:
    """Raise NotImplementedError unless all are float32 or bfloat16."""
    wrong = [
        f"{name} is {array.dtype}"
        for name, array in arrays.items()
        if array.dtype not in (jnp.float32, jnp.bfloat16)
    ]
    if wrong:
        raise NotImplementedError(
            f"the TPU kernel takes float32 and bfloat16, but {', '.join(wrong)}"
        )


def round_up(n: int, multiple: int) -> int:
    return pl.cdiv(n, multiple) * multiple
