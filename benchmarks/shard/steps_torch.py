"""Run the steps of one of several processes of PyTorch, without the others.

Its collective operations return at once, with the array that it sent: which operations follow does
not depend on sums. The weights are zeros, which take no memory until they are written.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.shard.collectives import Collective
from benchmarks.shard.measured import Measured, Sizes
from benchmarks.timing import watch_memory
from griffin_eval.config import GriffinConfig
from griffin_eval.layout import ParamSpec
from griffin_eval.model_torch.griffin import Griffin, param_dtype
from griffin_eval.runners.torch_runner import TorchRunner
from griffin_eval.sharding import processes_torch
from griffin_eval.sharding.split import split_over

KINDS = {"allreduce_": "all-reduce", "allgather_": "all-gather"}


class Counting(TorchDispatchMode):
    """A list of collective operations; PyTorch's `CommDebugMode` fails in inference mode."""

    def __init__(self):
        super().__init__()
        self.operations: list[Collective] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            name = str(func.name()).partition("::")[2].partition(".")[0]
            results = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, torch.Tensor)]
            shapes = tuple(f"{str(t.dtype)[6:]}[{','.join(map(str, t.shape))}]" for t in results)
            nbytes = sum(t.nbytes for t in results)
            self.operations.append(Collective(KINDS.get(name, name), shapes, nbytes, False, ()))
        return func(*args, **(kwargs or {}))


def run_steps(config: GriffinConfig, processes: int, dtype: str, sizes: Sizes) -> list[Measured]:
    """Run a scoring and a decoding step of the first of some processes that share a model.

    It can be called once in a process.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    group = dist.group.WORLD
    assert group is not None
    processes_torch.share(group)
    split = split_over(config, processes)

    def make(spec: ParamSpec) -> nn.Parameter:
        part = zip(split.part(spec, 0), spec.shape, strict=True)
        shape = [len(range(*cut.indices(n))) for cut, n in part]
        return nn.Parameter(torch.zeros(shape, dtype=param_dtype(spec, getattr(torch, dtype))))

    model = Griffin(config, make)
    runner, weights = TorchRunner(model), sum(p.nbytes for p in model.parameters())

    def measured(name: str, states: Any, step: Callable[[], Any]) -> Measured:
        held = sum(leaf.nbytes for leaf in tree_leaves(states) if isinstance(leaf, torch.Tensor))
        with Counting() as counted, watch_memory() as readings:
            step()
        return Measured(name, counted.operations, weights, held, max(readings) - readings[0])

    lengths = np.full(sizes.documents, sizes.tokens // sizes.documents)
    lengths[0] += sizes.tokens - lengths.sum()
    rows = np.arange(sizes.documents)
    rows[sizes.pool :] = -1  # no state is kept for these documents
    pool = runner.open_pool(sizes.pool, sizes.capacity)
    every = np.arange(sizes.tokens)

    def score() -> None:
        hidden, _ = runner.read(pool, every * 0, lengths, np.full(len(rows), -1), rows)
        runner.score(hidden, every, every * 0, every, "float32")

    state = runner.start_decoding(sizes.rows, sizes.capacity)

    def decode() -> None:
        hidden, _ = runner.decode_step(state, np.zeros(sizes.rows), np.ones(sizes.rows))
        runner.greedy(hidden, np.arange(sizes.rows))

    return [measured("scoring", pool, score), measured("decoding", state, decode)]
