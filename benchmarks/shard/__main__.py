"""The command ``python -m benchmarks.shard``."""

import json
from dataclasses import replace
from typing import Annotated, Literal

import typer

from benchmarks.commands import AsJson, chosen_preset
from griffin_eval.cli.ending import run_command
from griffin_eval.errors import ArgumentError


def bench_shard(
    preset: Annotated[str, typer.Option(help="Preset of the model.")] = "recurrentgemma-9b",
    target: Annotated[
        str, typer.Option(help="Devices to compile for: v5e-16, v6e-8, cpu-4, ….")
    ] = "v5e-16",
    split: Annotated[
        Literal["model", "time"],
        typer.Option(help="Split the weights, or the --tokens of one document."),
    ] = "model",
    framework: Annotated[
        Literal["jax", "torch"],
        typer.Option(help="Compile in JAX, or run one process of PyTorch with weights of zeros."),
    ] = "jax",
    replicas: Annotated[
        int, typer.Option(help="Number of replicas, each on its share of the devices.", min=1)
    ] = 1,
    training: Annotated[
        bool, typer.Option("--training", help="Compile a training step instead.")
    ] = False,
    layers: Annotated[
        int | None, typer.Option(help="Number of residual blocks, if not the preset's.", min=1)
    ] = None,
    tokens: Annotated[int, typer.Option(help="Number of tokens of a scoring step.", min=1)] = 4096,
    documents: Annotated[
        int, typer.Option(help="Number of documents that a scoring step reads from.", min=1)
    ] = 16,
    pool: Annotated[int, typer.Option(help="Number of states that are kept.", min=1)] = 32,
    rows: Annotated[int, typer.Option(help="Number of rows of a decoding step.", min=1)] = 32,
    batch: Annotated[int, typer.Option(help="Number of rows of a training step.", min=1)] = 16,
    length: Annotated[int, typer.Option(help="Tokens of each of these rows.", min=1)] = 2048,
    as_json: AsJson = False,
) -> None:
    """Compile a model split over devices; count its collective operations and bytes.

    The devices need not be there: libtpu compiles for a TPU, and a processor is divided. The exit
    code is 1 if a step has collective operations that the split does not need.
    """
    from benchmarks.shard.targets import parse_target
    from griffin_eval.runners.load import choose_framework

    chosen = parse_target(target)
    config = chosen_preset(preset)
    if framework == "torch" and (training or split == "time"):
        raise ArgumentError("--framework torch goes with neither --training nor --split time")
    if split == "time" and (training or replicas > 1):
        raise ArgumentError("--split time goes with neither --training nor --replicas")
    if chosen.count % replicas or (training and batch % replicas):
        raise ArgumentError(
            f"--replicas {replicas} does not divide the {chosen.count} devices of --target {target}"
            + f" and the {batch} rows of --batch" * training
        )
    choose_framework(framework)
    from benchmarks.shard.measured import Sizes
    from benchmarks.shard.run import measure, measure_reading, report_of

    config = replace(config, num_layers=layers or config.num_layers)
    sizes = Sizes(tokens, documents, pool, rows, batch, length, capacity=8192)
    if split == "time":
        result = measure_reading(config, chosen, sizes)
    else:
        result = measure(config, chosen, replicas, sizes, training, framework)
    if as_json:
        typer.echo(json.dumps(result, indent=1))
    else:
        report_of(result).show(False)
    if any(step.get("unexpected") for step in result["steps"]):
        raise typer.Exit(1)


if __name__ == "__main__":
    run_command(lambda: typer.run(bench_shard))
