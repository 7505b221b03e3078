"""Decoding of documents token by token, without copying their keys and values at every step."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from griffin_eval.model_jax.griffin import Griffin
from griffin_eval.model_jax.state import AttentionState, State, gather, write_rows


class DecodingState(NamedTuple):
    """The states of B documents, with keys and values in rings.

    A ring has C slots, one more than the values that a `State` remembers. The value of position p
    is in slot p % C, where a step overwrites that of position p - C, which no query sees any more.

    Methods other than `extract` consume the object and return the next one, which replaces it.
    """

    rows: State

    @classmethod
    def start(cls, model: Griffin, batch: int, capacity: int | None = None) -> "DecodingState":
        """Return the state of ``batch`` rows before their first token.

        ``capacity`` is the largest number of tokens of a document, including the prompt; see
        `Griffin.init_state`.
        """
        one = _each_ring(_in_ring, model.init_state(1, capacity))
        return cls(jax.tree.map(lambda leaf: jnp.zeros((batch, *leaf.shape[1:]), leaf.dtype), one))

    def insert(
        self, rows: Int[Array, " N"], pool: State, sources: Int[Array, " N"]
    ) -> "DecodingState":
        """Overwrite some of the rows with states of a pool.

        Args:
            rows: Rows to write, without repetitions, each from 0 to B - 1. Others raise an error in
                PyTorch; in JAX they must come last, and are skipped.
            pool: States of this model and capacity; they are not changed.
            sources: Row of the pool for each of them.
        """

        def write(old: Array, new: Array, rings: bool = False) -> Array:
            def row(i: Array, _: Array) -> Array:
                source = sources[i][None]
                return (_in_ring(new[source], pool.pos[source]) if rings else new[source])[0]

            return write_rows(old, rows, row)

        layers = []
        for old, new in zip(self.rows.layers, pool.layers, strict=True):
            rings, leaves = isinstance(old, AttentionState), zip(old, new, strict=True)
            layers.append(type(old)(*(write(*pair, rings) for pair in leaves)))
        pos = write(self.rows.pos, pool.pos)
        start = write(self.rows.attention_start, pool.attention_start)
        return DecodingState(State(pos, start, tuple(layers)))

    def extract(self, rows: Int[Array, " N"]) -> State:
        """Return the states of some rows (repetitions allowed), for `insert` and other steps."""
        return _each_ring(_in_order, gather(self.rows, rows))

    def step(
        self, model: Griffin, tokens: Int[Array, " B"], active: Int[Array, " B"]
    ) -> tuple[Float[Array, "B W"], "DecodingState"]:
        """Read one token of every active row; other rows do not change.

        Args:
            model: Model of `start`.
            tokens: Token ids, ignored for inactive rows.
            active: 1 for rows that read their token, 0 for others.

        Returns:
            Hidden vectors after the final norm, for `Griffin.logits`, and the next state.
        """
        hidden, rows = model.step_rings(tokens, active, self.rows)
        return hidden, DecodingState(rows)


def _each_ring(function: Callable[[Array, Array], Array], state: State) -> State:
    """Return a state with keys and values replaced by ``function(x, pos)``."""
    layers = (
        AttentionState(*(function(x, state.pos) for x in layer))
        if isinstance(layer, AttentionState)
        else layer
        for layer in state.layers
    )
    return state._replace(layers=tuple(layers))


def _in_ring(x: Float[Array, "S P J"], pos: Int[Array, " S"]) -> Float[Array, "S C J"]:
    """Return rings, C = P + 1, from the last values before these positions, oldest first. The next
    slot to be written gets zeros: every slot is read, and NaN times zero is NaN."""
    return _turned(jnp.pad(x, ((0, 0), (1, 0), (0, 0))), pos)


def _in_order(x: Float[Array, "S C J"], pos: Int[Array, " S"]) -> Float[Array, "S P J"]:
    """Invert `_in_ring`."""
    return _turned(x, -pos)[:, 1:]


def _turned(x: Float[Array, "S C J"], by: Int[Array, " S"]) -> Float[Array, "S C J"]:
    """Rotate each ring by a number of slots."""
    return jax.vmap(lambda row, shift: jnp.roll(row, shift, 0))(x, by)
