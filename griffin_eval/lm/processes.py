"""Communication between the evaluating processes, one for each replica of the model."""

import logging
from typing import TYPE_CHECKING, Any, Protocol

from griffin_eval.engine.stats import Stats
from griffin_eval.errors import ArgumentError
from griffin_eval.sharding.launch import Launch

if TYPE_CHECKING:
    from griffin_eval.runners.jax_leaders import Leaders


logger = logging.getLogger(__name__)


class GatheringLM:
    """The distributed methods of an lm-eval model."""

    stats: Stats  # counts of this process
    _group: "Group | None" = None

    def join(self, launch: Launch, framework: str) -> None:
        """Set the rank of this process among those of the launcher, and connect them."""
        self.others: list[Stats] = []
        self._rank, self._world_size = launch.replica, launch.replicas
        if launch.replicas > 1:
            self._group = group_of(launch, framework)

    def all_gather(self, tensor: Any) -> Any:
        return tensor if self._group is None else self._group.all_gather(tensor)

    def gather_object(self, obj: Any, dst: int = 0) -> Any:
        return [obj] if self._group is None else self._group.gather_object(obj, dst)

    def barrier(self) -> None:
        """Wait for all processes, and gather the counts of the others."""
        if self._group is not None:
            stats = self._group.all_gather_object(self.stats)
            self.others = stats[: self._rank] + stats[self._rank + 1 :]


def device_for_lm_eval(framework: str, device: str | None) -> str | None:
    """Replace lm_eval's default device cuda:0 by None if there is none."""
    if device != "cuda:0":
        return device
    if framework == "jax":
        from griffin_eval.runners import jax_parallel
        from griffin_eval.runners.jax_runner import choose_device

        jax_parallel.initialize()
    else:
        from griffin_eval.runners.torch_runner import choose_device
    try:
        choose_device(device)
    except ArgumentError:
        logger.info("no device cuda:0, the default of lm_eval: taking the best one here")
        return None
    return device


class Group(Protocol):
    """Collective calls. All processes have to make the same ones."""

    def all_gather(self, tensor: Any) -> Any:
        """Return the tensors of all processes, concatenated along their first axis."""
        ...

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the picklable value of each process."""
        ...

    def gather_object(self, value: Any, to: int) -> list[Any] | None:
        """Return the picklable value of each process in process ``to``, and None in the others."""
        ...


def group_of(launch: Launch, framework: str) -> Group:
    """Return the group of this process."""
    if framework == "torch":
        return TorchGroup(launch)
    from griffin_eval.runners import jax_parallel

    return JaxGroup(jax_parallel.leaders())


class JaxGroup:
    """A `Group` of the processes of `jax.distributed`."""

    def __init__(self, leaders: "Leaders"):
        self._leaders = leaders

    def all_gather(self, tensor: Any) -> Any:
        import torch

        return torch.cat(self.all_gather_object(torch.atleast_1d(tensor.cpu())))

    def all_gather_object(self, value: Any) -> list[Any]:
        values = self._leaders.exchange(value)
        assert values is not None
        return values

    def gather_object(self, value: Any, to: int) -> list[Any] | None:
        return self._leaders.exchange(value, to)


class TorchGroup:
    """A `Group` of the processes of a launcher. It uses the CPU, since the values are small."""

    def __init__(self, launch: Launch):
        import torch.distributed as dist

        from griffin_eval.runners.torch_parallel import LONG

        self._rank, self._size = launch.replica, launch.replicas
        leaders = list(range(0, launch.world_size, launch.sharing))
        self._group: Any = dist.new_group(
            leaders, backend="gloo", timeout=LONG, use_local_synchronization=True
        )

    def all_gather(self, tensor: Any) -> Any:
        import torch
        import torch.distributed as dist

        mine = torch.atleast_1d(tensor.cpu()).contiguous()
        tensors = [torch.empty_like(mine) for _ in range(self._size)]
        dist.all_gather(tensors, mine, group=self._group)
        return torch.cat(tensors)

    def all_gather_object(self, value: Any) -> list[Any]:
        import torch.distributed as dist

        values: list[Any] = [None] * self._size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def gather_object(self, value: Any, to: int) -> list[Any] | None:
        import torch.distributed as dist

        values = [None] * self._size if self._rank == to else None
        dist.gather_object(value, values, group_dst=to, group=self._group)
        return values
