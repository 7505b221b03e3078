"""The command ``memory``."""

import hashlib
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from griffin_eval.cli.options import (
    RUNNING,
    CheckpointPath,
    JsonOnly,
    check_figures_folder,
    progress_on_terminal,
    takes_model_options,
)
from griffin_eval.errors import ArgumentError

if TYPE_CHECKING:
    from griffin_eval.analysis.half_lives import ChannelDecay
    from griffin_eval.opened import OpenModel

LENGTHS = tuple(4**power for power in range(5, 11))  # 1024 to 1048576


@takes_model_options("peft", *RUNNING)
def memory(
    checkpoint: CheckpointPath,
    text: Annotated[
        Path | None,
        typer.Option(help="UTF-8 file on which gates are measured; by default Python's manual."),
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="Number of its tokens that are read; 0: no gate is measured.", min=0)
    ] = 4096,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for figures, PNG and SVG.")
    ] = None,
    as_json: JsonOnly = False,
    *,
    options: dict[str, Any],
) -> None:
    """Show how long a checkpoint remembers, and what its state takes.

    Half-lives of the RG-LRU's channels, from Λ alone and from the gates on a text; sizes of the
    caches beside Transformers of the same shape (appendix F); and, with --output, figures of both
    and of the gate (appendix A).
    """
    from griffin_eval.analysis.half_lives import decay_rates
    from griffin_eval.model_arguments import parse_arguments
    from griffin_eval.opened import open_model

    if text is not None and not tokens:
        raise ArgumentError("--text and --tokens 0: no token of it would be read; leave one out")
    check_figures_folder(output)
    arguments = options | {"pretrained": checkpoint, "data_parallel_size": 1}
    model = open_model(parse_arguments(arguments), reads_texts=False)
    model.confirm_weights()
    if "recurrent" in model.checkpoint.config.block_types and tokens:
        source, ids = _read_text(model, text, tokens)
        layers = _measure(model, ids)
    else:
        source, layers = None, decay_rates(model.checkpoint)
    facts = _facts(checkpoint, model, source, layers)
    if as_json:
        typer.echo(json.dumps(_finite(facts), indent=1, allow_nan=False))
    else:
        _print(facts)
    if output is not None:
        from griffin_eval.analysis.figures import draw

        for path in draw(layers, facts, output):
            typer.echo(str(path), err=as_json)


def _read_text(
    model: "OpenModel", path: Path | None, tokens: int
) -> tuple[dict[str, Any], list[int]]:
    """What was read, and its ids: exactly one BOS if the model wants one, and at most so many."""
    from griffin_eval.text.tokenizer import encode_with_bos

    if path is None:
        from pydoc_data.topics import topics

        name, content = "Python's manual", "\n\n".join(topics[name] for name in sorted(topics))
    else:
        name = str(path)
        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise ArgumentError(f"--text {path} cannot be read: {reason}") from None
    ids = encode_with_bos(model.tokenizer, content[: 64 * tokens], model.add_bos)[:tokens]
    if len(ids) < 2:
        raise ArgumentError(
            f"the text ({name}) gives {len(ids)} tokens of --tokens {tokens}: gates are measured "
            "from the second token of a text on"
        )
    digest = hashlib.sha256(content.encode()).hexdigest()
    return {"name": name, "sha256": digest, "tokens": len(ids)}, ids


def _measure(model: "OpenModel", ids: list[int]) -> "list[ChannelDecay]":
    import numpy as np

    from griffin_eval.analysis.half_lives import measure

    runner: Any = model.runner
    with progress_on_terminal() as bar:
        task = bar.add_task("reading tokens", total=len(ids))
        return measure(
            model.checkpoint,
            np.array(ids, np.int32),
            framework=runner.framework,
            model=runner.model,
            progress=lambda count: bar.advance(task, count),
        )


def _facts(
    name: str, model: "OpenModel", source: dict[str, Any] | None, layers: "list[ChannelDecay]"
) -> dict[str, Any]:
    """All numbers, as ``--json`` has them. Half-lives are in tokens, sizes in bytes."""
    import ml_dtypes
    import numpy as np

    from griffin_eval.analysis.cache_sizes import cache_sizes, parameter_bytes
    from griffin_eval.analysis.half_lives import summary

    config = model.checkpoint.config
    local = "local_attention" in config.block_types
    itemsize = np.dtype(getattr(ml_dtypes, model.dtype, model.dtype)).itemsize
    caches = []
    for length in LENGTHS:
        sizes = cache_sizes(config, length, itemsize)
        caches.append({"tokens": length, "total": sizes.total} | sizes._asdict())
    return {
        "checkpoint": name,
        "dtype": model.dtype,
        "layers": config.num_layers,
        "window": config.visible_keys if local else None,
        "text": source,
        "memory": [summary(layer, config.visible_keys if local else None) for layer in layers],
        "parameter_bytes": parameter_bytes(config, itemsize),
        "caches": caches,
    }


def _finite(value: Any) -> Any:
    """The same with null for a half-life without end, which JSON cannot say."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _print(facts: dict[str, Any]) -> None:
    console = Console(width=max(Console().width, 110))
    if facts["memory"]:
        source = facts["text"]
        read = f"; text: {escape(source['name'])}, {source['tokens']} tokens" if source else ""
        table = Table(title=f"half-lives in tokens: 5 %, median and 95 % of the channels{read}")
        table.add_column("layer", justify="right")
        columns = {"half_life_gate_1": "gate open, r = 1", "half_life_gate_0.5": "r = 0.5"}
        if source:
            columns |= {"mean_gate": "mean r on the text", "half_life_measured": "on the text"}
        for heading in columns.values():
            table.add_column(heading, justify="right")
        beyond = source and facts["window"]
        if beyond:
            table.add_column(f"beyond the window of {facts['window']}", justify="right")
        for layer in facts["memory"]:
            cells = ["  ".join(_three(n) for n in layer[key].values()) for key in columns]
            share = [f"{layer['share_beyond_window']:.1%}"] if beyond else []
            table.add_row(str(layer["layer"]), *cells, *share)
        console.print(table)
    table = Table(
        title=f"what one sequence keeps, {facts['dtype']}; "
        f"the weights take {decimal(facts['parameter_bytes'])}"
    )
    for heading in ("tokens", "this model", "MQA Transformer", "MHA Transformer"):
        table.add_column(heading, justify="right")
    for row in facts["caches"]:
        cells = [decimal(row[key]) for key in ("total", "mqa", "mha")]
        table.add_row(f"{row['tokens']:,}", *cells)
    console.print(table)
    console.print("Transformers of this depth, width and head dimension, with global attention.")


def _three(number: float) -> str:
    """Three digits, no exponent below a million."""
    return f"{number:.3g}" if number < 1000 or number >= 1e6 else f"{number:.0f}"
