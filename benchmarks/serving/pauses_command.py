"""The command ``bench pauses``."""

from typing import Annotated

import typer
from rich.console import Console

from benchmarks.failures import measuring
from griffin_eval.cli.ending import run_command


def bench_pauses(
    checkpoint: Annotated[str, typer.Argument(help="Folder, .pt or .gguf file, or hub id.")],
    tokens: Annotated[
        int, typer.Option(help="Number of tokens of the long prompt.", min=1, max=1_000_000)
    ] = 1_000_000,
    framework: Annotated[str, typer.Option(help="Framework: torch or jax.")] = "torch",
    dtype: Annotated[str, typer.Option(help="Dtype of weights and activations.")] = "auto",
    seconds: Annotated[
        float, typer.Option(help="Seconds of the measurement without the prompt.", min=0.1)
    ] = 30.0,
    rounds: Annotated[int, typer.Option(help="Number of measurements of each.", min=1)] = 1,
) -> None:
    """Time between tokens of 16 streams of a server, alone and while a very long prompt is read."""
    from benchmarks.serving.pauses import run

    console = Console(width=max(Console().width, 100))
    with measuring():
        run(console, checkpoint, framework, dtype, tokens, seconds, rounds)


if __name__ == "__main__":
    run_command(lambda: typer.run(bench_pauses))
