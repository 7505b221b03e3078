"""Recording of the inputs and outputs of a model's parts while it runs."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from griffin_eval.model_torch.blocks import RecurrentBlock


def record_blocks(blocks: Any) -> list[Tensor]:
    """Make residual blocks record the input of the first block and the output of each block.

    Args:
        blocks: List of a model's layers, whose elements are changed permanently. In PyTorch they
            may belong to another model, with outputs that are tuples starting with the vectors.

    Returns:
        A list to which every run of the model appends, in the order of the blocks.
    """
    seen: list[Tensor] = []

    def entered(_: Any, inputs: Any) -> None:
        seen.append(inputs[0])

    def left(_: Any, inputs: Any, output: Any) -> None:
        seen.append(output[0] if type(output) is tuple else output)

    for i, block in enumerate(blocks):
        if i == 0:
            block.register_forward_pre_hook(entered)
        block.register_forward_hook(left)
    return seen


def record_temporal(blocks: Any) -> list[dict[str, Tensor]]:
    """Make residual blocks record values of their temporal blocks for each token, as in
    `record_blocks`: a recurrent block ``x`` and ``h`` [B, T, L], input and output of the RG-LRU; an
    attention block ``k`` (rotated) and ``v`` [B, T, J]."""
    seen: list[dict[str, Tensor]] = []

    def recurrent(_: Any, inputs: Any, output: Any) -> None:
        seen.append({"x": inputs[0], "h": output[0]})

    def attention(_: Any, inputs: Any) -> Any:
        x, context, state = inputs
        noting: Any = _NotingLayout(context.layout, seen.append)
        return x, context._replace(layout=noting), state

    for block in blocks:
        if isinstance(block.temporal_block, RecurrentBlock):
            block.temporal_block.rg_lru.register_forward_hook(recurrent)
        else:
            block.temporal_block.register_forward_pre_hook(attention)
    return seen


class _NotingLayout:
    """A layout of padded rows that passes keys and values to ``note``."""

    def __init__(self, layout: Any, note: Callable[[dict[str, Tensor]], None]):
        self._layout, self._note = layout, note

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Any, state: Any) -> Any:
        self._note({"k": k, "v": v})
        return self._layout.attend(q, k, v, context, state)
