"""Processes that a launcher (torchrun, ``accelerate launch``) starts."""

import os
from typing import NamedTuple

from griffin_eval.errors import ArgumentError

COORDINATOR = "JAX_COORDINATOR_ADDRESS"  # JAX's variable, HOST:PORT of process 0


class Launch(NamedTuple):
    """This process's place among the launched processes. Adjacent ranks may share a model."""

    rank: int = 0
    local_rank: int = 0  # rank among the processes of this machine
    world_size: int = 1
    local_world_size: int = 1  # number of processes on this machine
    sharing: int = 1  # number of processes that share a model

    @classmethod
    def of_environment(cls) -> "Launch":
        """Read the launcher's environment variables; without a launcher there is one process.
        Raises ArgumentError for a value that is no whole number."""
        names = ("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1")
        values = {name: os.environ.get(name, default) for name, default in names}
        for name, value in values.items():
            if not value.isdecimal():
                raise ArgumentError(
                    f"the environment variable {name} must be a whole number, found {value!r}: "
                    "unset it, or start the processes with torchrun or accelerate launch"
                )
        rank, local_rank, world_size, local_world_size = map(int, values.values())
        return cls(rank, local_rank, world_size, local_world_size) if world_size > 1 else cls()

    def shared_by(self, processes: int, replicas: int | None) -> "Launch":
        """Return this launch with ``replicas`` models (None: as many as the processes make) that
        ``processes`` adjacent ranks share, or raise ArgumentError if their number does not fit."""
        if self.world_size % processes or (replicas or 1) * processes > self.world_size:
            asked = f"tensor_parallel_size={processes}"
            if replicas is not None:
                asked += f" and data_parallel_size={replicas}"
            raise ArgumentError(
                f"{asked} with {self.world_size} processes: start a multiple of {processes}, such "
                f"as with torchrun --nproc-per-node {processes * (replicas or 1)}"
            )
        if replicas is not None and replicas * processes != self.world_size:
            raise ArgumentError(
                f"data_parallel_size={replicas}, but {self.world_size} processes of which "
                f"{processes} share a model make {self.world_size // processes} replicas"
            )
        return self._replace(sharing=processes)

    @property
    def part(self) -> int:
        """Index of this process's part of its model; part 0 leads the others."""
        return self.rank % self.sharing

    @property
    def replica(self) -> int:
        """Index of this process's model among all replicas."""
        return self.rank // self.sharing

    @property
    def replicas(self) -> int:
        """Number of models."""
        return self.world_size // self.sharing

    def device(self, name: str | None, cuda_devices: int) -> str | None:
        """Return the device of this process; each of several processes gets its own CUDA device.
        Raises ArgumentError if there are fewer CUDA devices than processes on this machine."""
        if self.world_size == 1 or not cuda_devices or not (name or "cuda").startswith("cuda"):
            return name
        if self.local_world_size > cuda_devices:
            raise ArgumentError(
                f"{self.local_world_size} processes on this machine need a CUDA device each, and "
                f"it has {cuda_devices}: start {cuda_devices} processes, or use --device cpu"
            )
        return f"cuda:{self.local_rank}"
