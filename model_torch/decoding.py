"""Documents that are continued token by token, without copying their keys and values every step."""

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from griffin_eval.model_torch.griffin import Griffin
from griffin_eval.model_torch.layouts import DecodeLayout
from griffin_eval.model_torch.state import State, map_leaves

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
    offset: int

    @classmethod
    def start(cls, model: Griffin, batch: int, capacity: int | None = None) -> "DecodingState":
        """The state of B rows before their first token.

        Args:
            model: that continues them.
            batch: rows, B.
            capacity: the most tokens of a document, prompt included; see `Griffin.init_state`.
        """

        def with_spare_slots(leaf: Tensor) -> Tensor:
            shape = (batch, *leaf.shape[1:])
            if leaf.ndim == 3:
                shape = batch, leaf.shape[1] + DECODE_STEPS_PER_COMPACTION, leaf.shape[2]
            return leaf.new_zeros(shape)

        return cls(map_leaves(with_spare_slots, model.init_state(1, capacity)), 0)

    def insert(
        self, rows: Int[Tensor, " N"], pool: State, sources: Int[Tensor, " N"]
    ) -> "DecodingState":
        """Writes states over some of the rows, whatever those held.

        Args:
            rows: which rows to write, no row twice, each from 0 to B - 1. Others are an error in
                PyTorch and left out in JAX.
            pool: states of this model and capacity; it is not changed.
            sources: which row of the pool each of them gets.
        """

        def write(leaf: Tensor, new: Tensor) -> Tensor:
            window = leaf
            if leaf.ndim == 3:
                window = leaf[:, self.offset : self.offset + new.shape[1]]
            window.index_copy_(0, rows, new.index_select(0, sources))
            return leaf

        return DecodingState(map_leaves(write, self.rows, pool), self.offset)

    def step(
        self, model: Griffin, tokens: Int[Tensor, " B"], active: Int[Tensor, " B"]
    ) -> tuple[Float[Tensor, "B W"], "DecodingState"]:
        """Reads one token of every active row.

        Args:
            model: the one of `start`.
            tokens: ids; those of other rows are not read.
            active: 1 for rows that read their token. Rows with 0 hold undefined values until
                `insert` writes them.

        Returns:
            Hidden vectors after the final norm, for `Griffin.logits`, and the state after the step.
        """
        full = self.offset == DECODE_STEPS_PER_COMPACTION
        rows, offset = self.compact() if full else self
        layout = DecodeLayout(active, DECODE_STEPS_PER_COMPACTION, offset)
        hidden, rows = model.decode_step(tokens, rows, layout)
        return hidden, DecodingState(rows, offset + 1)

    def compact(self) -> "DecodingState":
        """Moves the windows back to slot 0, once every spare slot is used."""

        def move(leaf: Tensor) -> Tensor:
            if leaf.ndim == 3:
                slots = leaf.shape[1] - DECODE_STEPS_PER_COMPACTION
                leaf[:, :slots] = leaf[:, DECODE_STEPS_PER_COMPACTION:].clone()
            return leaf

        return DecodingState(map_leaves(move, self.rows), 0)
