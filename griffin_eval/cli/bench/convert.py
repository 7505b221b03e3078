"""The command ``bench convert``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from griffin_eval.errors import ArgumentError


def bench_convert(
    directory: Annotated[
        Path,
        typer.Argument(
            help="Folder to write into; it takes about 6 times the model, with --to twice."
        ),
    ],
    preset: Annotated[
        str, typer.Option(help="Preset whose tensor shapes are used.")
    ] = "recurrentgemma-2b",
    rounds: Annotated[
        int, typer.Option(help="Number of measurements of each, in turn with cp.", min=1)
    ] = 3,
    to: Annotated[
        str | None, typer.Option(help="Format to write, if only one is to be measured.")
    ] = None,
    chunks: Annotated[
        str | None,
        typer.Option(help="Mesh whose devices each read whole chunks of --to: model=8,data=2."),
    ] = None,
) -> None:
    """Convert a model of a preset's shapes every way; time over cp, and memory."""
    from griffin_eval.bench.convert import run
    from griffin_eval.bench.timing import Failed
    from griffin_eval.config import PRESETS
    from griffin_eval.converters.formats import format_named
    from griffin_eval.messages import did_you_mean
    from griffin_eval.sharding.split import parse_mesh

    if preset not in PRESETS:
        raise ArgumentError(
            f"unknown preset {preset!r}: expected one of {', '.join(PRESETS)}"
            f"{did_you_mean(preset, PRESETS)}"
        )
    if chunks is not None and to is None:
        raise ArgumentError("--chunks needs --to, the format that is written in chunks")
    only = None if to is None else format_named(to).name
    mesh = None if chunks is None else parse_mesh(chunks, "--chunks")
    try:
        run(Console(width=max(Console().width, 140)), preset, directory, rounds, only, mesh)
    except Failed as error:
        typer.echo(f"a measurement failed: {error}", err=True)
        raise typer.Exit(1) from None
