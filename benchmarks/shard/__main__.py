"""The command ``bench shard``."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from experiments.paper_speed.options import AsJson
from griffin_eval.cli.ending import run_command


def bench_shard(
    preset: Annotated[str, typer.Option(help="Preset of the model.")] = "recurrentgemma-9b",
    target: Annotated[
        str, typer.Option(help="Devices to compile for: v5e-16, v6e-8, cpu-4, ….")
    ] = "v5e-16",
    split: Annotated[
        Literal["model", "time"],
        typer.Option(
            help="The thing to split: the weights of the model, or a document, of which every "
            "device reads a part of --tokens."
        ),
    ] = "model",
    framework: Annotated[
        Literal["jax", "torch"],
        typer.Option(
            help="jax compiles; torch runs the steps of one process, whose weights are zeros, on "
            "this processor."
        ),
    ] = "jax",
    replicas: Annotated[
        int, typer.Option(help="Number of replicas, each on its share of the devices.", min=1)
    ] = 1,
    training: Annotated[
        bool, typer.Option("--training", help="A training step instead of scoring and decoding.")
    ] = False,
    layers: Annotated[
        int | None, typer.Option(help="Number of residual blocks, if not the preset's.", min=1)
    ] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of the weights.")] = "bfloat16",
    tokens: Annotated[int, typer.Option(help="Number of tokens of a scoring step.", min=1)] = 4096,
    documents: Annotated[
        int, typer.Option(help="Number of documents that a scoring step reads from.", min=1)
    ] = 16,
    pool: Annotated[int, typer.Option(help="Number of states that are kept.", min=1)] = 32,
    rows: Annotated[int, typer.Option(help="Number of rows of a decoding step.", min=1)] = 32,
    batch: Annotated[int, typer.Option(help="Number of rows of a training step.", min=1)] = 16,
    length: Annotated[int, typer.Option(help="Tokens of each of these rows.", min=1)] = 2048,
    capacity: Annotated[
        int, typer.Option(help="Most tokens of a document, for global attention.", min=1)
    ] = 8192,
    table: Annotated[
        Path | None,
        typer.Option(
            help="Compile all runs of the table in docs/scale.md instead, and keep their results "
            "in this file; those that it holds are left out."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compile a model split over devices; its collective operations, and bytes a device.

    The devices need not be there: libtpu compiles for a TPU, and a processor is divided. Exit code
    1 if a step says more to other devices than the split needs.
    """
    from dataclasses import replace

    from benchmarks.shard.targets import parse_target
    from griffin_eval.config import PRESETS
    from griffin_eval.errors import ArgumentError
    from griffin_eval.messages import did_you_mean
    from griffin_eval.runners.load import choose_framework
    from griffin_eval.runners.protocol import DTYPES

    if table is not None:
        choose_framework("jax")
        from benchmarks.shard.table import complete, print_table

        terminal = Console(stderr=True, quiet=not Console(stderr=True).is_terminal)
        results = complete(table, begins=lambda run: terminal.print(f"compiling {run}"))
        print_table(Console(width=max(Console().width, 160)), results)
        return
    chosen = parse_target(target)
    if preset not in PRESETS:
        raise ArgumentError(
            f"unknown preset {preset!r}: expected one of {', '.join(PRESETS)}"
            f"{did_you_mean(preset, PRESETS)}"
        )
    if dtype not in DTYPES:
        raise ArgumentError(f"unknown dtype {dtype!r}: expected {', '.join(DTYPES)}")
    if framework == "torch" and (training or split == "time"):
        raise ArgumentError("--framework torch goes with neither --training nor --split time")
    choose_framework(framework)
    from benchmarks.shard.measured import Sizes
    from benchmarks.shard.run import (
        measure,
        measure_reading,
        print_reading,
        print_result,
    )

    config = PRESETS[preset]
    config = replace(config, num_layers=layers or config.num_layers)
    if chosen.count % replicas or (training and batch % replicas):
        raise ArgumentError(
            f"--replicas {replicas} does not divide the {chosen.count} devices of --target {target}"
            + f" and the {batch} rows of --batch" * training
        )
    sizes = Sizes(tokens, documents, pool, rows, batch, length, capacity)
    result = {"preset": preset, "layers": config.num_layers}
    if split == "time":
        if training or replicas > 1:
            raise ArgumentError("--split time goes with neither --training nor --replicas")
        result |= measure_reading(config, chosen, dtype, sizes)
        if as_json:
            typer.echo(json.dumps(result, indent=1))
        else:
            print_reading(Console(width=max(Console().width, 120)), result)
        if any(step.get("unexpected") for step in result["steps"]):
            raise typer.Exit(1)
        return
    result |= measure(config, chosen, replicas, dtype, sizes, training, framework)
    if as_json:
        typer.echo(json.dumps(result, indent=1))
    else:
        print_result(Console(width=max(Console().width, 120)), result)
    if any(step["unexpected"] for step in result["steps"]):
        raise typer.Exit(1)


if __name__ == "__main__":
    run_command(lambda: typer.run(bench_shard))
