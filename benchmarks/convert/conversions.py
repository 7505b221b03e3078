"""One conversion, in a process that `benchmarks.convert.run` asks to measure it.

``python -m benchmarks.convert.conversions`` answers requests for `measure`. Nothing is imported
before the clock runs that a conversion itself would import.
"""

import os
import time
from collections.abc import Callable
from typing import Any

from benchmarks.peers import check_peer
from benchmarks.timing import serve, watch_memory

ADAPTER = "adapter"  # folder of an adapter, beside those of the checkpoints


def measure(
    way: str, source: str, destination: str, target: str, mesh: dict[str, int] | None = None
) -> dict[str, float]:
    """Seconds of a conversion, imports included, and the largest anonymous memory in bytes.

    Args:
        way: a key of `WAYS`.
        source: folder with the checkpoint.
        destination: folder to write, which is not there yet.
        target: name of the format to write; of the encoding, if ``way`` quantises.
        mesh: for whose devices ``convert`` writes chunks, if any.

    Raises:
        Absent: a library of a peer is missing or broken.
        BadInput: the conversion was refused.
    """
    with watch_memory(interval=0.002) as readings:
        begin = time.perf_counter()
        WAYS[way](source, destination, target, **({} if mesh is None else {"mesh": mesh}))
        seconds = time.perf_counter() - begin
    return {"seconds": seconds, "bytes": max(readings)}


def convert(source: str, destination: str, target: str, mesh: dict[str, int] | None = None) -> None:
    """This package's conversion."""
    from pathlib import Path

    from griffin_eval.converters.checkpoint import Checkpoint
    from griffin_eval.converters.convert import convert_checkpoint
    from griffin_eval.converters.formats import FORMATS
    from griffin_eval.converters.plan import make_plan

    plan = make_plan(Checkpoint(source), FORMATS[target], mesh=mesh)
    convert_checkpoint(plan, Path(destination))


def merge(source: str, destination: str, target: str) -> None:
    """This package's conversion, with the adapter in the folder beside the source."""
    from pathlib import Path

    from griffin_eval.converters.checkpoint import Checkpoint
    from griffin_eval.converters.convert import convert_checkpoint
    from griffin_eval.converters.formats import FORMATS
    from griffin_eval.converters.overrides import Overrides
    from griffin_eval.converters.plan import make_plan

    overrides = Overrides(adapters=((Path(source).parent / ADAPTER, 1.0),))
    adapted = Checkpoint(source, overrides)
    convert_checkpoint(make_plan(adapted, FORMATS[target]), Path(destination))


def quantise(source: str, destination: str, target: str) -> None:
    """This package's conversion to the format hf, in an encoding."""
    from pathlib import Path

    from griffin_eval.converters.checkpoint import Checkpoint
    from griffin_eval.converters.codecs.encode import ENCODINGS
    from griffin_eval.converters.convert import convert_checkpoint
    from griffin_eval.converters.formats import FORMATS
    from griffin_eval.converters.plan import make_plan

    plan = make_plan(Checkpoint(source), FORMATS["hf"], encoding=ENCODINGS[target])
    convert_checkpoint(plan, Path(destination))


def save_with_orbax(source: str, destination: str, target: str) -> None:
    """The whole model in memory, then Orbax's own save."""
    check_peer("orbax.checkpoint")
    import numpy as np
    import orbax.checkpoint as ocp

    from griffin_eval.converters.checkpoint import Checkpoint
    from griffin_eval.converters.export import export, put_nested
    from griffin_eval.converters.formats import FORMATS

    tree: dict[str, Any] = {}
    for name, array in export(Checkpoint(source), FORMATS[target].table):
        put_nested(tree, name, np.ascontiguousarray(array))
    ocp.PyTreeCheckpointer().save(destination, tree)
    os.sync()


def save_with_transformers(source: str, destination: str, target: str) -> None:
    """transformers' own load and save."""
    check_peer("torch", "transformers.models.recurrent_gemma.modeling_recurrent_gemma")
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(source, dtype="auto").save_pretrained(destination)
    os.sync()


def save_with_torch(source: str, destination: str, target: str) -> None:
    """torch's load and save of a state dict, as DeepMind's code loads it."""
    check_peer("torch")
    import torch

    weights = torch.load(source + "/model.pt", weights_only=True)
    os.mkdir(destination)
    torch.save(weights, destination + "/model.pt")
    os.sync()


WAYS: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (
        convert,
        merge,
        quantise,
        save_with_orbax,
        save_with_transformers,
        save_with_torch,
    )
}

if __name__ == "__main__":
    serve({"measure": measure})
