"""The command ``memory``."""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from griffin_eval.cli.options import (
    RUNNING,
    CheckpointPath,
    FigureFormat,
    FigureTitles,
    FigureWidth,
    JsonOnly,
    check_figures_folder,
    figure_files,
    progress_on_terminal,
    takes_model_options,
)
from griffin_eval.errors import ArgumentError


@takes_model_options("peft", *RUNNING)
def memory(
    checkpoint: CheckpointPath,
    text: Annotated[
        Path | None,
        typer.Option(help="UTF-8 file on which gates are measured (default: Python's manual)."),
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="Number of tokens to read; with 0 no gate is measured.", min=0)
    ] = 4096,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for figures.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace figures of an earlier run in --output.")
    ] = False,
    formats: FigureFormat = "png,svg",
    width: FigureWidth = None,
    figure_titles: FigureTitles = True,
    as_json: JsonOnly = False,
    *,
    options: dict[str, Any],
) -> None:
    """Show how long a checkpoint remembers, and the size of its state.

    Shows half-lives of the RG-LRU's channels, from Λ alone and from the gates on a text; cache
    sizes beside Transformers of the same shape (appendix F); and, with --output, figures of both
    and of the gate (appendix A).
    """
    from griffin_eval.analysis.memory import memory_of
    from griffin_eval.model_arguments import parse_arguments
    from griffin_eval.opened import open_model

    if text is not None and not tokens:
        raise ArgumentError("--tokens 0 reads no token of --text: leave one of them out")
    check_figures_folder(output, formats)
    earlier = sorted(output.glob("memory_*")) if output is not None else []
    if earlier and not overwrite:
        raise ArgumentError(f"{earlier[0]} exists already: choose another folder, or --overwrite")
    content = None if text is None else _content(text)
    arguments = options | {"pretrained": checkpoint, "data_parallel_size": 1}
    model = open_model(parse_arguments(arguments), reads_texts=False)
    model.confirm_weights()
    with progress_on_terminal() as bar:
        task = bar.add_task("reading tokens", total=tokens)
        found = memory_of(
            model,
            checkpoint,
            text=content,
            text_name=str(text),
            tokens=tokens,
            progress=lambda count: bar.advance(task, count),
        )
    if as_json:
        typer.echo(json.dumps(_finite(found.numbers), indent=1, allow_nan=False))
    else:
        _print(found.numbers)
    if output is not None:
        from griffin_eval.analysis.figures import save_all

        files = figure_files(output, formats, width, titles=figure_titles)
        for path in save_all(found.layers, found.numbers, files):
            typer.echo(str(path), err=as_json)


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ArgumentError(f"--text {path} cannot be read: {reason}") from None


def _finite(value: Any) -> Any:
    """Replace infinite half-lives by null, since JSON has no infinity."""
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
        table = Table(
            title=f"Half-lives in tokens: 5th percentile, median and 95th of the channels{read}"
        )
        table.add_column("layer", justify="right")
        columns = {"half_life_gate_1": "gate open, r = 1", "half_life_gate_0.5": "r = 0.5"}
        if source:
            columns |= {"mean_gate": "mean r on the text", "half_life_measured": "on the text"}
        for heading in columns.values():
            table.add_column(heading, justify="right")
        beyond = source and facts["window"]
        if beyond:
            table.add_column(f"beyond the window, {facts['window']}", justify="right")
        for layer in facts["memory"]:
            cells = ["  ".join(_three(n) for n in layer[key].values()) for key in columns]
            share = [f"{layer['share_beyond_window']:.1%}"] if beyond else []
            table.add_row(str(layer["layer"]), *cells, *share)
        console.print(table)
    table = Table(
        title=f"Memory per sequence ({facts['dtype']}). "
        f"Weights: {decimal(facts['parameter_bytes'])}"
    )
    for heading in ("tokens", "this model", "MQA Transformer", "MHA Transformer"):
        table.add_column(heading, justify="right")
    for row in facts["caches"]:
        cells = [decimal(row[key]) for key in ("total", "mqa", "mha")]
        table.add_row(f"{row['tokens']:,}", *cells)
    console.print(table)
    console.print("Transformers of this depth, width and head dimension, with global attention.")


def _three(number: float) -> str:
    """Format a number with three digits, without an exponent below a million."""
    return f"{number:.3g}" if number < 1000 or number >= 1e6 else f"{number:.0f}"
