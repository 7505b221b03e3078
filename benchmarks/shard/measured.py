"""Sizes and figures of the steps of a model that is split over devices."""

from typing import NamedTuple

from benchmarks.shard.collectives import Collective


class Sizes(NamedTuple):
    """Sizes of the steps.

    Attributes:
        tokens, documents: Number of tokens of a scoring step, all scored, and of their documents.
        pool: Number of states that are kept.
        rows: Number of rows of a decoding step.
        batch, length: Number of rows of a training step, and of tokens of each.
        capacity: Largest number of tokens of a document, for global attention.
    """

    tokens: int
    documents: int
    pool: int
    rows: int
    batch: int
    length: int
    capacity: int


class Measured(NamedTuple):
    """A compiled step, or one that ran in PyTorch. All bytes are for one device.

    Attributes:
        states: Bytes of the states among its arguments; in training, those of the optimizer.
        temporaries: Bytes between its operations; in PyTorch the growth of the process.
        kernels: Number of calls of this package's kernels; 0 in PyTorch, which does not count them.
        flops: Floating-point operations, without those of kernels; 0 in PyTorch.
        cycles: Estimate of a TPU's compiler for reading, without those of kernels.
    """

    name: str
    collectives: list[Collective]
    weights: int
    states: int
    temporaries: int
    kernels: int = 0
    flops: float = 0.0
    cycles: int | None = None
