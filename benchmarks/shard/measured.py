"""A step of a model that is split over devices: its sizes and measurements."""

from typing import NamedTuple

from benchmarks.shard.collectives import Collective


class Sizes(NamedTuple):
    """Sizes of the steps.

    Attributes:
        tokens: Number of tokens of a scoring step, all of which are scored.
        documents: Number of documents of a scoring step.
        pool: Number of kept states.
        rows: Number of rows of a decoding step.
        batch: Number of rows of a training step.
        length: Number of tokens of each of these.
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
        kernels: Number of calls of own kernels; 0 in PyTorch, which does not report them.
        weights: Bytes of the parameters.
        states: Bytes of its input states, in training of the optimizer's.
        temporaries: Bytes between its operations; in PyTorch the growth of its memory.
        flops: Floating-point operations without those of kernels; 0 in PyTorch.
        cycles: Estimate of a TPU's compiler for a reading step, without kernels.
    """

    name: str
    collectives: list[Collective]
    kernels: int
    weights: int
    states: int
    temporaries: int
    flops: float
    cycles: int | None
