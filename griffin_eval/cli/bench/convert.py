"""The command ``bench convert``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from griffin_eval.errors import ArgumentError


def bench_convert(
    directory: Annotated[
        Path, typer.Argument(help="Folder to write into; it takes about 6 times the model.")
    ],
    preset: Annotated[
        str, typer.Option(help="Preset whose tensor shapes are used.")
    ] = "recurrentgemma-2b",
    rounds: Annotated[
        int, typer.Option(help="Number of measurements of each, in turn with cp.", min=1)
    ] = 3,
) -> None:
    """Convert a model of a preset's shapes every way; time over cp, and memory."""
    from griffin_eval.bench.convert import run
    from griffin_eval.bench.timing import Failed
    from griffin_eval.config import PRESETS
    from griffin_eval.messages import did_you_mean

    if preset not in PRESETS:
        raise ArgumentError(
            f"unknown preset {preset!r}: expected one of {', '.join(PRESETS)}"
            f"{did_you_mean(preset, PRESETS)}"
        )
    try:
        run(Console(width=max(Console().width, 140)), preset, directory, rounds)
    except Failed as error:
        typer.echo(f"a measurement failed: {error}", err=True)
        raise typer.Exit(1) from None
