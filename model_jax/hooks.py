"""Recording what enters and leaves the parts of a model as it runs."""

from collections.abc import Callable
from typing import Any

from flax import nnx
from jax import Array

from griffin_eval.model_jax.blocks import RecurrentBlock


def record_blocks(blocks: Any) -> list[Array]:
    """Has residual blocks record the input of the first of them and the output of each.

    Args:
        blocks: the list of a model's layers, whose elements are changed for good. In PyTorch also
            the layers of another model, whose outputs may be tuples that begin with the vectors.

    Returns:
        A list to which every run of the model appends, in the order of the blocks.
    """
    seen: list[Array] = []

    def note(x: Array, output: tuple[Array, Any]) -> None:
        seen.extend([output[0]] if seen else [x, output[0]])

    for i, block in enumerate(blocks):
        blocks[i] = _Recorded(block, note)
    return seen


def record_rg_lru_inputs(blocks: Any) -> list[Array]:
    """Has residual blocks record the inputs of their RG-LRUs [B, T, L]; the rest as
    `record_blocks`."""
    seen: list[Array] = []
    for block in blocks:
        if isinstance(block.temporal_block, RecurrentBlock):
            recorded: Any = _Recorded(block.temporal_block.rg_lru, lambda x, _: seen.append(x))
            block.temporal_block.rg_lru = recorded
    return seen


class _Recorded(nnx.Module):
    """A module that hands its first input and its output to ``note``."""

    def __init__(self, module: nnx.Module, note: Callable[[Array, Any], None]):
        self.module, self.note = module, note

    def __call__(self, x: Array, *rest: Any) -> Any:
        output = self.module(x, *rest)
        self.note(x, output)
        return output
