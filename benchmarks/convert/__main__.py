"""The command ``bench convert``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.failures import measuring
from griffin_eval.cli.ending import run_command
from griffin_eval.errors import ArgumentError


def bench_convert(
    directory: Annotated[
        Path,
        typer.Argument(
            help="Folder to write into; it takes about 6 times the model, with --to twice, with "
            "--limits 10 times."
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
    limits: Annotated[
        bool,
        typer.Option(
            "--limits", help="The conversions that have a limit beside a plain one, and no others."
        ),
    ] = False,
) -> None:
    """Convert a model of a preset's shapes every way; time over cp, and memory.

    With --limits: merge an adapter and dequantise what every codec reads; time over that of a plain
    conversion of as many bytes.
    """
    from benchmarks import conversion_limits, convert
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
    if limits and to is not None:
        raise ArgumentError("--limits does not go with --to: it writes one format")
    console = Console(width=max(Console().width, 150))
    with measuring():
        if limits:
            conversion_limits.run(console, preset, directory, rounds)
        else:
            convert.run(console, preset, directory, rounds, only, mesh)


if __name__ == "__main__":
    run_command(lambda: typer.run(bench_convert))
