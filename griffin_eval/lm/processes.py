"""The processes that a launcher (torchrun, ``accelerate launch``) starts, and how they talk."""

import datetime
import os
from typing import Any, NamedTuple

from griffin_eval.errors import ArgumentError


class Launch(NamedTuple):
    """Which of the launched processes this is.

    Attributes:
        rank: its number among all processes.
        local_rank: its number among those of this machine.
        world_size: number of all processes.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    @classmethod
    def of_environment(cls) -> "Launch":
        """As the launcher's environment variables say; without a launcher the only process."""
        rank, local_rank, world_size = (
            int(os.environ.get(name, default))
            for name, default in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"))
        )
        return cls(rank, local_rank, world_size) if world_size > 1 else cls()

    def device(self, asked: str | None) -> str | None:
        """The device of this process: of several processes each has a CUDA device of its own."""
        if self.world_size > 1 and (asked is None or asked.startswith("cuda")):
            return f"cuda:{self.local_rank}"
        return asked


class Group:
    """Collective calls over all processes, on the CPU, since what is exchanged is small.

    Raises:
        ArgumentError: the environment is not as launchers leave it, or the others do not answer.
    """

    def __init__(self, launch: Launch):
        import torch.distributed as dist

        self._rank, self._size = launch.rank, launch.world_size
        patience = datetime.timedelta(weeks=52)  # one process may have the longest document
        try:
            if not dist.is_initialized():
                dist.init_process_group("gloo", timeout=patience)
            self._group: Any = dist.new_group(backend="gloo", timeout=patience)
        except (ValueError, RuntimeError) as error:
            raise ArgumentError(
                f"WORLD_SIZE={launch.world_size}, but its processes do not find each other "
                f"({str(error).splitlines()[0]}): start lm_eval with torchrun or accelerate "
                "launch, or unset WORLD_SIZE"
            ) from error

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
        dist.gather_object(value, values, dst=to, group=self._group)
        return values
