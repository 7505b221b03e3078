"""Documents that are continued token by token, without copying their keys and values every step."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from griffin_eval.model_jax.griffin import Griffin
from griffin_eval.model_jax.layouts import DecodeLayout
from griffin_eval.model_jax.state import State

DECODE_STEPS_PER_COMPACTION = 64  # also the spare slots of each layer's state


class DecodingState(NamedTuple):
    """The states of B documents, each with spare slots behind its keys, values and convolution
    inputs.

    Valid entries are a window of the slots: a step writes its own entry behind the window and the
    window moves on by one slot. When the spare slots are used up, the next step first moves the
    window back to slot 0.

    Every method consumes the object and returns the next one: only that may be used from then on.

    Attributes:
        rows: the states, with the spare slots.
        offset: the slot at which the windows begin, 0 to `DECODE_STEPS_PER_COMPACTION`.
    """

    rows: State
    offset: Int[Array, ""]

    @classmethod
    def start(cls, model: Griffin, batch: int, capacity: int | None = None) -> "DecodingState":
        """The state of B rows before their first token.

        Args:
            model: that continues them.
            batch: rows, B.
            capacity: the most tokens of a document, prompt included; see `Griffin.init_state`.
        """

        def with_spare_slots(leaf: Array) -> Array:
            shape = (batch, *leaf.shape[1:])
            if leaf.ndim == 3:
                shape = batch, leaf.shape[1] + DECODE_STEPS_PER_COMPACTION, leaf.shape[2]
            return jnp.zeros(shape, leaf.dtype)

        rows = jax.tree.map(with_spare_slots, model.init_state(1, capacity))
        return cls(rows, jnp.zeros((), jnp.int32))

    def insert(
        self, rows: Int[Array, " N"], pool: State, sources: Int[Array, " N"]
    ) -> "DecodingState":
        """Writes states over some of the rows, whatever those held.

        Args:
            rows: which rows to write, no row twice, each from 0 to B - 1. Others are an error in
                PyTorch and left out in JAX.
            pool: states of this model and capacity; it is not changed.
            sources: which row of the pool each of them gets.
        """

        def write(leaf: Array, new: Array) -> Array:
            def write_row(i: Array, leaf: Array) -> Array:  # one scatter is many times as slow
                before = lax.dynamic_index_in_dim(leaf, rows[i], keepdims=False)
                row = lax.dynamic_index_in_dim(new, sources[i], keepdims=False)
                if leaf.ndim == 3:  # zeros around it: every slot is read, and NaN times zero is NaN
                    row = lax.dynamic_update_slice_in_dim(
                        jnp.zeros_like(before), row, self.offset, 0
                    )
                row = jnp.where(rows[i] < len(leaf), row, before)
                return lax.dynamic_update_index_in_dim(leaf, row, rows[i], 0)

            return lax.fori_loop(0, len(rows), write_row, leaf)

        return DecodingState(jax.tree.map(write, self.rows, pool), self.offset)

    def step(
        self, model: Griffin, tokens: Int[Array, " B"], active: Int[Array, " B"]
    ) -> tuple[Float[Array, "B W"], "DecodingState"]:
        """Reads one token of every active row.

        Args:
            model: the one of `start`.
            tokens: ids; those of other rows are not read.
            active: 1 for rows that read their token. Rows with 0 hold undefined values until
                `insert` writes them.

        Returns:
            Hidden vectors after the final norm, for `Griffin.logits`, and the state after the step.
        """
        # Both branches keep their arrays in place where the state is donated.
        full = self.offset == DECODE_STEPS_PER_COMPACTION
        rows, offset = lax.cond(full, DecodingState.compact, lambda state: state, self)
        layout = DecodeLayout(active, DECODE_STEPS_PER_COMPACTION, offset)
        hidden, rows = model.decode_step(tokens, rows, layout)
        return hidden, DecodingState(rows, offset + 1)

    def compact(self) -> "DecodingState":
        """Moves the windows back to slot 0, once every spare slot is used."""

        def move(leaf: Array) -> Array:
            return jnp.roll(leaf, -DECODE_STEPS_PER_COMPACTION, 1) if leaf.ndim == 3 else leaf

        return DecodingState(jax.tree.map(move, self.rows), jnp.zeros((), jnp.int32))
