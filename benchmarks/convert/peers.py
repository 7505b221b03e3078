"""Conversions with other libraries, each started as a process by `benchmarks.convert.run`."""

import os
import sys
from pathlib import Path
from typing import NamedTuple


class Peer(NamedTuple):
    """A library in place of a converter: the formats it reads and writes, and its modules."""

    source: str
    target: str
    modules: tuple[str, ...]


PEERS = {
    "Orbax's save": Peer("hf", "griffin-orbax", ("orbax.checkpoint",)),
    "transformers' load and save": Peer(
        "hf", "hf", ("torch", "transformers.models.recurrent_gemma.modeling_recurrent_gemma")
    ),
}


def save_with_orbax(source: str, destination: str) -> None:
    """Read the whole model into memory, then save it with Orbax."""
    import numpy as np
    import orbax.checkpoint as ocp

    import griffin_eval

    checkpoint = griffin_eval.open_checkpoint(source)
    tree = {name: np.ascontiguousarray(checkpoint.numpy(name)) for name in checkpoint.dtypes}
    ocp.PyTreeCheckpointer().save(Path(destination).resolve(), tree)


def save_with_transformers(source: str, destination: str) -> None:
    """Load and save a model with transformers."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(source, dtype="auto").save_pretrained(destination)


if __name__ == "__main__":
    save = dict(zip(PEERS, (save_with_orbax, save_with_transformers), strict=True))
    save[sys.argv[1]](*sys.argv[2:])
    os.sync()
