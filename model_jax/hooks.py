"""Recording of the inputs and outputs of a model's parts while it runs."""

from collections.abc import Callable
from typing import Any

from flax import nnx
from jax import Array

from griffin_eval.model_jax.blocks import RecurrentBlock


def record_blocks(blocks: Any) -> list[Array]:
    """Make residual blocks record the input of the first block and the output of each block.

    Args:
        blocks: List of a model's layers, whose elements are changed permanently. In PyTorch they
            may belong to another model, with outputs that are tuples starting with the vectors.

    Returns:
        A list to which every run of the model appends, in the order of the blocks.
    """
    seen: list[Array] = []

    def first(x: Array, output: tuple[Array, Any]) -> None:
        seen.extend([x, output[0]])

    def later(x: Array, output: tuple[Array, Any]) -> None:
        seen.append(output[0])

    for i, block in enumerate(blocks):
        blocks[i] = _Recorded(block, later if i else first)
    return seen


def record_temporal(blocks: Any) -> list[dict[str, Array]]:
    """Make residual blocks record values of their temporal blocks for each token, as in
    `record_blocks`: a recurrent block ``x`` and ``h`` [B, T, L], input and output of the RG-LRU; an
    attention block ``k`` (rotated) and ``v`` [B, T, J]."""
    seen: list[dict[str, Array]] = []

    def recurrent(x: Array, output: tuple[Array, Any]) -> None:
        seen.append({"x": x, "h": output[0]})

    for block in blocks:
        if isinstance(block.temporal_block, RecurrentBlock):
            recorded: Any = _Recorded(block.temporal_block.rg_lru, recurrent)
            block.temporal_block.rg_lru = recorded
        else:
            noted: Any = _Noted(block.temporal_block, seen.append)
            block.temporal_block = noted
    return seen


class _Recorded(nnx.Module):
    """A module that passes its first input and its output to ``note``."""

    def __init__(self, module: nnx.Module, note: Callable[[Array, Any], None]):
        self.module, self.note = module, note

    def __call__(self, x: Array, *rest: Any) -> Any:
        output = self.module(x, *rest)
        self.note(x, output)
        return output


class _Noted(nnx.Module):
    """An attention block that passes its keys and values to ``note``."""

    def __init__(self, module: nnx.Module, note: Callable[[dict[str, Array]], None]):
        self.module, self.note = module, note

    def __call__(self, x: Array, context: Any, state: Any) -> Any:
        module: Any = self.module
        noting = _NotingLayout(context.layout, self.note)
        return module(x, context._replace(layout=noting), state)


class _NotingLayout:
    """A layout of padded rows that passes keys and values to ``note``."""

    def __init__(self, layout: Any, note: Callable[[dict[str, Array]], None]):
        self._layout, self._note = layout, note

    def attend(self, q: Array, k: Array, v: Array, context: Any, state: Any) -> Any:
        self._note({"k": k, "v": v})
        return self._layout.attend(q, k, v, context, state)
