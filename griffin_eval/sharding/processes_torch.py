"""The model on several devices: each has a process of its own, which holds a part of the weights
(`griffin_eval.sharding`) and adds up with the others what each can only compute in part."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

_groups: list[dist.ProcessGroup] = []  # the one that shares this process's model, if any does


def share(group: dist.ProcessGroup) -> None:
    """Says with which processes this one shares its model, before it is loaded, and again after
    `leave`."""
    assert not _groups
    _groups.append(group)


def leave() -> None:
    """Takes back what `share` said. Those who wait for this process in a sum get an error.

    Its threads end with the group: one that let go of a tensor while Python itself ends would abort
    the process.
    """
    if _groups:
        dist.destroy_process_group(_groups.pop())


def rank() -> int:
    """Which part of the model this process holds."""
    return dist.get_rank(_groups[0]) if _groups else 0


def parts() -> int:
    """How many processes hold a part of the model."""
    return dist.get_world_size(_groups[0]) if _groups else 1


def summed(partial: Tensor, split: bool = True) -> Tensor:
    """The sum of a tensor over all parts, in its place; the tensor itself if it is no part.

    Args:
        partial: of the same shape in every process.
        split: whether it is a part.
    """
    if split and _groups:
        dist.all_reduce(partial, group=_groups[0])
    return partial


def gathered(mine: Tensor) -> Tensor:
    """[parts, …], the tensors of all parts in their order."""
    if not _groups:
        return mine[None]
    found = [torch.empty_like(mine) for _ in range(parts())]
    dist.all_gather(found, mine.contiguous(), group=_groups[0])
    return torch.stack(found)


def embedded(
    tokens: Int[Tensor, "B T"], weight: Float[Tensor, "V W"], vocab_size: int
) -> Float[Tensor, "B T W"]:
    """Rows of an embedding, of which this process may hold a part."""
    if len(weight) == vocab_size:
        return F.embedding(tokens, weight)
    mine = tokens - rank() * len(weight)
    here = (mine >= 0) & (mine < len(weight))
    rows = F.embedding(torch.where(here, mine, 0), weight)
    return summed(rows.masked_fill(~here[..., None], 0.0))
