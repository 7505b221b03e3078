"""PyTorch models split over processes: each process holds a part of the weights
(`griffin_eval.sharding`), and partial results are summed over all of them."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

_groups: list[dist.ProcessGroup] = []  # at most one: the group that shares this process's model


def share(group: dist.ProcessGroup) -> None:
    """Set the group of processes that share this process's model, before it is loaded."""
    assert not _groups
    _groups.append(group)


def leave() -> None:
    """Leave the group. Processes that wait for this one in a sum get an error.

    The group's threads end with it; a thread that frees a tensor while Python shuts down would
    abort the process.
    """
    if _groups:
        dist.destroy_process_group(_groups.pop())


def rank() -> int:
    """Return the index of this process's part of the model."""
    return dist.get_rank(_groups[0]) if _groups else 0


def parts() -> int:
    """Return the number of processes that hold a part of the model."""
    return dist.get_world_size(_groups[0]) if _groups else 1


def summed(partial: Tensor, split: bool = True) -> Tensor:
    """Return the sum of a tensor over all parts, in place; the tensor itself if not ``split``."""
    if split and _groups:
        dist.all_reduce(partial, group=_groups[0])
    return partial


def gathered(mine: Tensor) -> Tensor:
    """Return [parts, …], the tensors of all parts in their order."""
    if not _groups:
        return mine[None]
    found = [torch.empty_like(mine) for _ in range(parts())]
    dist.all_gather(found, mine.contiguous(), group=_groups[0])
    return torch.stack(found)


def embedded(
    tokens: Int[Tensor, "B T"], weight: Float[Tensor, "V W"], vocab_size: int
) -> Float[Tensor, "B T W"]:
    """Return rows of an embedding of which this process may hold a part."""
    if len(weight) == vocab_size:
        return F.embedding(tokens, weight)
    mine = tokens - rank() * len(weight)
    here = (mine >= 0) & (mine < len(weight))
    rows = F.embedding(torch.where(here, mine, 0), weight)
    return summed(rows.masked_fill(~here[..., None], 0.0))
