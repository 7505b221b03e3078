"""The collective operations that a split needs, derived from the table of parameters."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from benchmarks.shard.collectives import Collective, elements
from griffin_eval.config import GriffinConfig
from griffin_eval.layout import ParamSpec, param_specs
from griffin_eval.sharding.split import DATA, MODEL, TIME, Split

BOTH = "both"  # axes of a mesh


class Need(NamedTuple):
    """Collective operations that a split needs.

    Attributes:
        what: Purpose, or name of the gathered or summed arrays.
        kind: XLA's name of the operation.
        axis: Axis of the mesh along which devices do it together.
        numbers: Count of numbers in each result, on one device.
    """

    what: str
    kind: str
    axis: str
    numbers: int
    times: int


def expected_sums(split: Split) -> int:
    """Return the sums over the devices in a step, of vectors of the model's width: one for the
    embedding, and one after each half of a residual block that is split."""
    if split.devices == 1:
        return 0
    halves = 0
    for kind in split.config.block_types:
        halves += ("lru" if kind == "recurrent" else "heads") not in split.whole
        halves += "mlp" not in split.whole
    return halves + ("vocab" not in split.whole)


def training_needs(split: Split, data: int, rows: int, length: int) -> list[Need]:
    """Return the operations of a training step that computes activations again, without sums of
    single numbers: the loss, norms of gradients, and a few numbers a vector for the logits.

    Weights are gathered for the forward pass and again for the backward pass, and every gradient is
    summed over the replicas: that of the embedding twice, as a table and as a projection, and that
    of a convolution tap by tap. The gradient of a map's input is summed for each map: XLA does not
    add first. There are ``data`` replicas, each with ``rows`` of ``length`` tokens.
    """
    return list(_training_needs(split, data, rows, length))


def _training_needs(split: Split, data: int, rows: int, length: int) -> Iterator[Need]:
    vectors = rows * length
    config, specs = split.config, list(param_specs(split.config).values())
    whole = "gradients of what is whole"
    for spec in specs if data > 1 else []:
        embedding = spec.name.endswith("embed_tokens.weight")
        tied = embedding and config.tie_embeddings
        if DATA in split.axes_in_training(spec, data):
            # Sums are kept with the biases added to them. The rows of an embedding that is no
            # output head are looked up, and the backward pass does not need them.
            once = spec.name.endswith(".bias") and spec.axes == ("width",)
            times = 1 if once or (embedding and not tied) else 2
            yield Need("weights", "all-gather", DATA, split.size(spec), times)
        if _in_whole_recurrence(spec, split):
            continue
        taps = spec.shape[spec.axes.index("tap")] if "tap" in spec.axes else 1
        size = split.size(spec) // taps
        yield Need("gradients", "all-reduce", DATA, size, 2 if tied else taps)
    if split.devices == 1:
        return
    wide = vectors * config.width
    yield Need("vectors", "all-reduce", MODEL, wide, expected_sums(split))
    yield Need("gradients of vectors", "all-reduce", MODEL, wide, _backward_sums(split))
    for kind in config.block_types:
        if kind == "recurrent" or split.splits_keys:
            continue
        past = (config.visible_keys if kind == "local_attention" else length) - 1
        joined = rows * (past + length) * config.kv_width
        yield Need("gradients of keys and values", "all-reduce", MODEL, joined, 2)
    # All devices compute the parts that stay whole, but their gradients are still summed.
    for kind in config.block_types:
        if kind == "recurrent" and "lru" in split.whole:
            yield Need(whole, "all-reduce", MODEL, vectors * config.lru_width, 1)
        elif kind != "recurrent" and "heads" in split.whole:
            yield Need(whole, "all-reduce", MODEL, vectors * config.q_width, 1)
    for spec in specs:
        if _in_whole_recurrence(spec, split):
            yield Need(whole, "all-reduce", BOTH if data > 1 else MODEL, spec.size, 1)


def _in_whole_recurrence(spec: ParamSpec, split: Split) -> bool:
    return ".rg_lru." in spec.name and "lru" in split.whole and split.devices > 1


def reading_needs(config: GriffinConfig, devices: int) -> list[Need]:
    """Return the operations of devices that each read a part of a document."""
    if devices == 1:
        return []
    state, window = config.lru_width, (config.conv_width - 1) * config.lru_width
    keys = (config.visible_keys - 1) * config.kv_width
    recurrent = config.block_types.count("recurrent")
    attention = config.block_types.count("local_attention")
    ends, before, after = "ends of parts", "what lies before a part", "the last state"
    return [
        Need(ends, "all-gather", TIME, 2 * devices * state, recurrent),
        Need(before, "collective-permute", TIME, window, recurrent),
        Need(before, "collective-permute", TIME, keys, 2 * attention),
        Need(after, "all-reduce", TIME, window, recurrent),
        Need(after, "all-reduce", TIME, keys, 2 * attention),
    ]


def differences(
    operations: Iterable[Collective], needs: Iterable[Need], devices: int, vectors: int
) -> list[str]:
    """Return the differences between a compiled step's operations and those that it needs.

    Args:
        operations: Collective operations, several of which may be done as one.
        needs: Needs from `training_needs` for a processor, or from `reading_needs`.
        devices: Number of devices that share the weights; 0 where they share a document.
        vectors: Number of hidden vectors of a replica.
    """
    there: Counter[tuple[str, str, int]] = Counter()
    for operation in operations:
        axis = _axis(operation.groups, devices) if devices else TIME
        there.update((operation.kind, axis, elements(shape)) for shape in operation.shapes)
    needed: Counter[tuple[str, str, int]] = Counter()
    for need in needs:
        needed[need.kind, need.axis, need.numbers] += need.times

    def single(axis: str, numbers: int) -> bool:
        return numbers == 1 or axis == MODEL and numbers <= vectors

    wrong = [
        f"{there[what]} {what[0]} of {what[2]} numbers along {what[1]}, and not {needed[what]}"
        for what in sorted(there | needed)
        if there[what] != needed[what] and not (what[0] == "all-reduce" and single(*what[1:]))
    ]
    return wrong + [f"{operation.kind} in a loop" for operation in operations if operation.in_loop]


def _axis(groups: tuple[tuple[int, ...], ...], devices: int) -> str:
    """Return the axis of the mesh along which groups lie, `BOTH` for neither alone."""
    if not groups:
        return BOTH
    if len({place // devices for place in groups[0]}) == 1:
        return MODEL
    return DATA if len({place % devices for place in groups[0]}) == 1 else BOTH


def _backward_sums(split: Split) -> int:
    """Return the sums of gradients of vectors, one for each map that is split by outputs."""
    attention = ("heads", 3 if split.splits_keys else 1)  # queries, keys and values
    sums = "vocab" not in split.whole
    for kind in split.config.block_types:
        axis, count = ("lru", 2) if kind == "recurrent" else attention
        sums += count * (axis not in split.whole) + 2 * ("mlp" not in split.whole)
    return sums
