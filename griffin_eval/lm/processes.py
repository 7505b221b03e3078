"""How the processes that a launcher starts talk while lm-eval runs."""

from typing import Any

from griffin_eval.sharding.launch import Launch


class Group:
    """Collective calls over the processes that evaluate, one of each replica of the model. They
    are on the CPU, since what is exchanged is small."""

    def __init__(self, launch: Launch):
        import torch.distributed as dist

        from griffin_eval.runners.torch_parallel import LONG

        self._rank, self._size = launch.replica, launch.replicas
        leaders = list(range(0, launch.world_size, launch.sharing))
        self._group: Any = dist.new_group(
            leaders, backend="gloo", timeout=LONG, use_local_synchronization=True
        )

    def all_gather(self, tensor: Any) -> Any:
        """The tensors of all processes, concatenated along their first axis."""
        import torch
        import torch.distributed as dist

        mine = torch.atleast_1d(tensor.cpu()).contiguous()
        tensors = [torch.empty_like(mine) for _ in range(self._size)]
        dist.all_gather(tensors, mine, group=self._group)
        return torch.cat(tensors)

    def all_gather_object(self, value: Any) -> list[Any]:
        """The picklable value of each process."""
        import torch.distributed as dist

        values: list[Any] = [None] * self._size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def gather_object(self, value: Any, to: int) -> list[Any] | None:
        """The picklable value of each process, for process ``to``; None for the others."""
        import torch.distributed as dist

        values = [None] * self._size if self._rank == to else None
        dist.gather_object(value, values, group_dst=to, group=self._group)
        return values
