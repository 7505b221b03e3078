"""Documents that are continued token by token, without copying their keys and values every step."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from griffin_eval.model_jax.griffin import Griffin
from griffin_eval.model_jax.state import AttentionState, State, gather, write_rows


class DecodingState(NamedTuple):
    """The states of B documents, whose keys and values lie in rings.

    A ring has a slot more than a `State` remembers values, C in all. The value of position p is in
    slot p % C, where a step writes it over that of position p - C, which no query sees any more.

    Methods other than `extract` consume the object and return the next one: only that may be used
    from then on.

    Attributes:
        rows: the states.
    """

    rows: State

    @classmethod
    def start(cls, model: Griffin, batch: int, capacity: int | None = None) -> "DecodingState":
        """The state of B rows before their first token.

        Args:
            model: that continues them.
            batch: rows, B.
            capacity: the most tokens of a document, prompt included; see `Griffin.init_state`.
        """
        one = _each_ring(_in_ring, model.init_state(1, capacity))
        return cls(jax.tree.map(lambda leaf: jnp.zeros((batch, *leaf.shape[1:]), leaf.dtype), one))

    def insert(
        self, rows: Int[Array, " N"], pool: State, sources: Int[Array, " N"]
    ) -> "DecodingState":
        """Writes states over some of the rows, whatever those held.

        Args:
            rows: which rows to write, no row twice, each from 0 to B - 1. Others are an error in
                PyTorch; in JAX they come last, and are left out.
            pool: states of this model and capacity; it is not changed.
            sources: which row of the pool each of them gets.
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
        """Returns the states of some of the rows, which `insert` and other steps continue.

        Args:
            rows: Rows to read; they may repeat.
        """
        return _each_ring(_in_order, gather(self.rows, rows))

    def step(
        self, model: Griffin, tokens: Int[Array, " B"], active: Int[Array, " B"]
    ) -> tuple[Float[Array, "B W"], "DecodingState"]:
        """Reads one token of every active row. Other rows stay as they are.

        Args:
            model: the one of `start`.
            tokens: ids; those of other rows are not read.
            active: 1 for rows that read their token, 0 for others.

        Returns:
            Hidden vectors after the final norm, for `Griffin.logits`, and the state after the step.
        """
        hidden, rows = model.step_rings(tokens, active, self.rows)
        return hidden, DecodingState(rows)


def _each_ring(function: Callable[[Array, Array], Array], state: State) -> State:
    """Returns a state with ``function(x, pos)`` in the place of its keys and values."""
    layers = (
        AttentionState(*(function(x, state.pos) for x in layer))
        if isinstance(layer, AttentionState)
        else layer
        for layer in state.layers
    )
    return state._replace(layers=tuple(layers))


def _in_ring(x: Float[Array, "S P J"], pos: Int[Array, " S"]) -> Float[Array, "S C J"]:
    """Returns rings of the last values before these positions, oldest first, C = P + 1. The slot
    that the next step writes gets zeros: every slot is read, and NaN times zero is NaN."""
    return _turned(jnp.pad(x, ((0, 0), (1, 0), (0, 0))), pos)


def _in_order(x: Float[Array, "S C J"], pos: Int[Array, " S"]) -> Float[Array, "S P J"]:
    """Returns what `_in_ring` was given."""
    return _turned(x, -pos)[:, 1:]


def _turned(x: Float[Array, "S C J"], by: Int[Array, " S"]) -> Float[Array, "S C J"]:
    """Moves each value of a ring on by so many slots."""
    return jax.vmap(lambda row, shift: jnp.roll(row, shift, 0))(x, by)
