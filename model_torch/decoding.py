"""Decoding of documents token by token, without copying their keys and values at every step."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from griffin_eval.kernels.attention.plain_torch import take_rows
from griffin_eval.model_torch.griffin import Griffin
from griffin_eval.model_torch.state import AttentionState, State, gather, map_leaves, scatter


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
        return cls(map_leaves(lambda leaf: leaf.new_zeros(batch, *leaf.shape[1:]), one))

    def insert(
        self, rows: Int[Tensor, " N"], pool: State, sources: Int[Tensor, " N"]
    ) -> "DecodingState":
        """Overwrite some of the rows with states of a pool.

        Args:
            rows: Rows to write, without repetitions, each from 0 to B - 1. Others raise an error in
                PyTorch; in JAX they must come last, and are skipped.
            pool: States of this model and capacity; they are not changed.
            sources: Row of the pool for each of them.
        """
        state = _each_ring(_in_ring, gather(pool, sources))
        return DecodingState(scatter(self.rows, rows, state))

    def extract(self, rows: Int[Tensor, " N"]) -> State:
        """Return the states of some rows (repetitions allowed), for `insert` and other steps."""
        return _each_ring(_in_order, gather(self.rows, rows))

    def step(
        self, model: Griffin, tokens: Int[Tensor, " B"], active: Int[Tensor, " B"]
    ) -> tuple[Float[Tensor, "B W"], "DecodingState"]:
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


def _each_ring(function: Callable[[Tensor, Tensor], Tensor], state: State) -> State:
    """Return a state with keys and values replaced by ``function(x, pos)``."""
    layers = (
        AttentionState(*(function(x, state.pos) for x in layer))
        if isinstance(layer, AttentionState)
        else layer
        for layer in state.layers
    )
    return state._replace(layers=tuple(layers))


def _in_ring(x: Float[Tensor, "S P J"], pos: Int[Tensor, " S"]) -> Float[Tensor, "S C J"]:
    """Return rings, C = P + 1, from the last values before these positions, oldest first. The next
    slot to be written gets zeros: every slot is read, and NaN times zero is NaN."""
    return _turned(F.pad(x, (0, 0, 1, 0)), pos)


def _in_order(x: Float[Tensor, "S C J"], pos: Int[Tensor, " S"]) -> Float[Tensor, "S P J"]:
    """Invert `_in_ring`."""
    return _turned(x, -pos)[:, 1:]


def _turned(x: Float[Tensor, "S C J"], by: Int[Tensor, " S"]) -> Float[Tensor, "S C J"]:
    """Rotate each ring by a number of slots."""
    rows, slots, _ = x.shape
    slot = (torch.arange(slots, device=x.device) - by[:, None]) % slots
    return take_rows(x.flatten(0, 1), slot + slots * torch.arange(rows, device=x.device)[:, None])
