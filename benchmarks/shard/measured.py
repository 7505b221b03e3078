"""A step of a model that is split over devices: its sizes, and what is known of it."""

from typing import NamedTuple

from benchmarks.shard.collectives import Collective


class Sizes(NamedTuple):
    """Sizes of the steps.

    Attributes:
        tokens: that a scoring step reads, of which every one is scored.
        documents: that it reads from.
        pool: states that are kept.
        rows: that a decoding step continues.
        batch: rows of a training step.
        length: tokens of each of them.
        capacity: most tokens of a document, for global attention.
    """

    tokens: int
    documents: int
    pool: int
    rows: int
    batch: int
    length: int
    capacity: int


class Measured(NamedTuple):
    """A step as it was compiled, or as it ran in PyTorch. All bytes are of one device.

    Attributes:
        name: of the step.
        collectives: its collective operations.
        kernels: of its own that it calls, by their number; 0 in PyTorch, which says nothing of it.
        weights: bytes of the parameters.
        states: bytes of the states that it takes; in training, those of the optimizer.
        temporaries: bytes between its operations; in PyTorch by how many its memory grew.
        flops: floating-point operations, without those of kernels; 0 in PyTorch.
        cycles: of reading, that the compiler of a TPU estimates, without those of kernels.
    """

    name: str
    collectives: list[Collective]
    kernels: int
    weights: int
    states: int
    temporaries: int
    flops: float
    cycles: int | None
