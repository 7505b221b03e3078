"""Recognises other trainers' checkpoints by the names of their tensors alone."""

from collections.abc import Collection

from griffin_eval.converters.naming.tables import EMBEDDING, foreign_name, matches
from griffin_eval.converters.naming.user_table import SHIPPED, read_names

# Models of another architecture: how names end that only theirs have, and what differs.
_OTHERS = (
    (
        ".rlgru_block.rglru.a",
        "Meta lingua's Hawk, which is another architecture: SiLU for GeLU, dense gates without "
        "biases, decays that all heads share, and a residual that is added twice",
    ),
)


def recognised(names: Collection[str]) -> str | None:
    """A clause that says whose tensors these seem to be, and what to do; None if nobody knows."""
    for end, whose in _OTHERS:
        if any(name.endswith(end) for name in names):
            return f"this looks like {whose}: it cannot be read"
    for shipped in SHIPPED:
        table = read_names(shipped)
        layered = [row for row in table.rows if "{layer}" in row.foreign]
        if foreign_name(table.rows, EMBEDDING) in names and matches(layered, names):
            return f"this looks like {table.title}: give --names {shipped} (names={shipped})"
    return None
