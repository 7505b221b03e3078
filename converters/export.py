"""The tensors of a checkpoint in the names and layouts of another library."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from griffin_eval.converters.naming.tables import NameRule, bind
from griffin_eval.converters.tensors import in_memory

if TYPE_CHECKING:
    from griffin_eval.converters.checkpoint import Checkpoint


def export(checkpoint: "Checkpoint", table: Sequence[NameRule]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every tensor of a checkpoint by its name in a table, in the table's layout. Arrays may
    be read-only views, with strides."""
    for binding in bind(table, checkpoint.config):
        parameters = (in_memory(checkpoint.numpy(spec.name)) for spec in binding.canonical)
        yield binding.foreign, binding.op.to_foreign(*parameters).numpy()


def put_nested(tree: dict[str, Any], name: str, value: Any) -> None:
    """Put a value into nested dicts, under keys that its name joins by "/"."""
    *path, leaf = name.split("/")
    for key in path:
        tree = tree.setdefault(key, {})
    tree[leaf] = value
