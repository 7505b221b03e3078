"""Recording what enters and leaves the parts of a model as it runs."""

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


def record_rg_lru_inputs(blocks: Any) -> list[Tensor]:
    """Has residual blocks record the inputs of their RG-LRUs [B, T, L]; the rest as
    `record_blocks`."""
    seen: list[Tensor] = []

    def entered(_: Any, inputs: Any) -> None:
        seen.append(inputs[0])

    for block in blocks:
        if isinstance(block.temporal_block, RecurrentBlock):
            block.temporal_block.rg_lru.register_forward_pre_hook(entered)
    return seen
