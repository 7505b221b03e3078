"""The command ``python -m benchmarks.convert``."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.commands import Rounds, chosen_preset
from griffin_eval.cli.ending import run_command
from griffin_eval.errors import ArgumentError


def bench_convert(
    directory: Annotated[
        Path, typer.Argument(help="Folder to write into; it takes up to 10 times the model.")
    ],
    preset: Annotated[
        str, typer.Option(help="Preset whose tensor shapes are used.")
    ] = "recurrentgemma-2b",
    rounds: Rounds = 5,
    to: Annotated[str | None, typer.Option(help="Measure only the conversion to FORMAT.")] = None,
    chunks: Annotated[
        str | None,
        typer.Option(help="Mesh whose devices each read whole chunks of --to: model=8,data=2."),
    ] = None,
    limits: Annotated[
        bool,
        typer.Option("--limits", help="Measure merging and dequantising beside plain conversions."),
    ] = False,
    python: Annotated[
        list[str] | None,
        typer.Option(help="Interpreter whose griffin-eval converts; several take turns."),
    ] = None,
) -> None:
    """Convert a model of a preset's shapes every way, beside cp and other libraries."""
    from benchmarks.convert.run import conversions_between, conversions_with_limits, run
    from griffin_eval.converters.files import writing
    from griffin_eval.converters.formats import FORMATS, check_expressible, format_named
    from griffin_eval.converters.output.atomic import check_disk
    from griffin_eval.converters.plan import check_chunked
    from griffin_eval.layout import param_specs
    from griffin_eval.sharding.split import parse_mesh

    config = chosen_preset(preset)
    if to is not None:
        check_expressible(config, FORMATS[format_named(to).name])
    if limits and to is not None:
        raise ArgumentError("--limits does not go with --to: it writes one format")
    if chunks is not None:
        if to is None:
            raise ArgumentError("--chunks needs --to, the format that is written in chunks")
        parse_mesh(chunks, "--chunks")
        check_chunked(FORMATS[to])
    pythons = python or [sys.executable]
    for each in pythons:
        if not Path(each).with_name("griffin-eval").is_file():
            raise ArgumentError(f"--python {each}: no griffin-eval is installed beside it")
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    numbers = sum(spec.size for spec in param_specs(config).values())
    copies = len(FORMATS) + 1 if to is None else 2  # in 2 bytes a number, or dequantised in 4
    check_disk(numbers * (10 if limits else 2 * copies), directory)
    conversions = (
        conversions_with_limits(preset, directory)
        if limits
        else conversions_between(preset, directory, to, chunks)
    )
    if not run(list(conversions), directory, rounds, pythons):
        raise typer.Exit(1)


if __name__ == "__main__":
    run_command(lambda: typer.run(bench_convert))
