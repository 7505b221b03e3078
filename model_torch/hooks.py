"""Recording what enters and leaves the parts of a model as it runs."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from griffin_eval.model_torch.blocks import RecurrentBlock


def record_blocks(blocks: Any) -> list[Tensor]:
    """Has residual blocks record the input of the first of them and the output of each.

    Args:
        blocks: the list of a model's layers, whose elements are changed for good. In PyTorch also
            the layers of another model, whose outputs may be tuples that begin with the vectors.

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
    """Has residual blocks record what their temporal blocks compute of each token: a recurrent one
    ``x`` and ``h`` [B, T, L], input and output of the RG-LRU, and attention ``k`` (rotated) and
    ``v`` [B, T, J]; the rest as `record_blocks`."""
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
    """A layout of padded rows that hands keys and values to ``note``."""

    def __init__(self, layout: Any, note: Callable[[dict[str, Tensor]], None]):
        self._layout, self._note = layout, note

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Any, state: Any) -> Any:
        self._note({"k": k, "v": v})
        return self._layout.attend(q, k, v, context, state)
