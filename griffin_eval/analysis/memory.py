"""Half-lives of a checkpoint and the size of its state, as numbers and figures."""

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np

from griffin_eval.analysis.cache_sizes import cache_sizes, parameter_bytes
from griffin_eval.analysis.half_lives import ChannelDecay, decay_rates, measure, summary
from griffin_eval.converters.checkpoint import collect_not_finite
from griffin_eval.errors import ArgumentError
from griffin_eval.opened import OpenModel
from griffin_eval.text.tokenizer import encode_with_bos

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LENGTHS = tuple(4**power for power in range(5, 11))  # 1024 to 1048576


class Memory(NamedTuple):
    """Half-lives of a checkpoint, and the memory that a sequence takes.

    Attributes:
        numbers: Output of ``griffin-eval memory --json``; half-lives in tokens, sizes in bytes.
        layers: Recurrent layers, with the rate of each channel and its gates on the text.
    """

    numbers: dict[str, Any]
    layers: list[ChannelDecay]

    def figures(self) -> "dict[str, Figure]":
        """Return the matplotlib figures by name: ``caches`` and, with recurrent layers,
        ``half_lives`` and ``gate``."""
        from griffin_eval.analysis.figures import draw

        return {name: figure for name, (figure, _, _) in draw(self.layers, self.numbers).items()}


def memory_of(
    model: OpenModel,
    name: str,
    *,
    text: str | None,
    text_name: str,
    tokens: int,
    progress: Callable[[int], object],
) -> Memory:
    """Measure the half-lives of a model, and compute its sizes.

    Raises ArgumentError for an unusable text or number of tokens, and CheckpointError for weights
    that are not finite.

    Args:
        name: Name of the checkpoint in the numbers.
        text: Text on which the gates are measured; None for Python's manual.
        text_name: Name of the text in the numbers.
        tokens: Largest number of tokens to read; with 0 no gate is measured and no weight loaded.
        progress: Function called after each step with its number of tokens.
    """
    if tokens < 0:
        raise ArgumentError(f"tokens must be 0 or more, found {tokens}")
    recurrent = "recurrent" in model.checkpoint.config.block_types
    if text is not None and not recurrent:
        raise ArgumentError(
            f"{name} has no recurrent block, whose gates are measured on a text: leave out the text"
        )
    if not recurrent or not tokens:
        with collect_not_finite() as not_finite:
            layers = decay_rates(model.checkpoint)
        model.check_finite(not_finite)
        return Memory(_numbers(name, model, None, layers), layers)
    if text is None:
        from pydoc_data.topics import topics

        text_name, text = "Python's manual", "\n\n".join(topics[key] for key in sorted(topics))
    ids = encode_with_bos(model.tokenizer, text[: 64 * tokens], model.add_bos)[:tokens]
    if len(ids) < 2:
        raise ArgumentError(
            f"the text ({text_name}) gives {len(ids)} tokens of --tokens {tokens}: gates are "
            "measured from the second token of a text on"
        )
    digest = hashlib.sha256(text.encode()).hexdigest()
    source = {"name": text_name, "sha256": digest, "tokens": len(ids)}
    runner: Any = model.runner
    layers = measure(
        model.checkpoint,
        np.array(ids, np.int32),
        framework=runner.framework,
        model=runner.model,
        progress=progress,
    )
    return Memory(_numbers(name, model, source, layers), layers)


def _numbers(
    name: str, model: OpenModel, source: dict[str, Any] | None, layers: list[ChannelDecay]
) -> dict[str, Any]:
    config = model.checkpoint.config
    window = config.visible_keys if "local_attention" in config.block_types else None
    itemsize = np.dtype(getattr(ml_dtypes, model.dtype, model.dtype)).itemsize
    caches = []
    for length in LENGTHS:
        sizes = cache_sizes(config, length, itemsize)
        caches.append({"tokens": length, "total": sizes.total} | sizes._asdict())
    return {
        "checkpoint": name,
        "dtype": model.dtype,
        "layers": config.num_layers,
        "window": window,
        "text": source,
        "memory": [summary(layer, window) for layer in layers],
        "parameter_bytes": parameter_bytes(config, itemsize),
        "caches": caches,
    }
