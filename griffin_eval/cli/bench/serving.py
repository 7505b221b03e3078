"""The command ``bench serve``."""

from typing import Annotated

import typer
from rich.console import Console

from griffin_eval.cli.bench.failures import measuring


def bench_serve(
    checkpoint: Annotated[str, typer.Argument(help="Folder, .pt or .gguf file, or hub id.")],
    framework: Annotated[str, typer.Option(help="Framework: torch or jax.")] = "torch",
    dtype: Annotated[str, typer.Option(help="Dtype of weights and activations.")] = "auto",
    clients: Annotated[int, typer.Option(help="Number of requests at a time.", min=1)] = 32,
    requests: Annotated[int, typer.Option(help="Number of requests of each kind.", min=1)] = 128,
    new_tokens: Annotated[
        int, typer.Option(help="Number of tokens to generate for each text.", min=2)
    ] = 64,
    rounds: Annotated[int, typer.Option(help="Number of measurements of each.", min=1)] = 3,
) -> None:
    """Time a server under many clients beside the engine without one; time to first token."""
    from griffin_eval.bench.serving import run

    console = Console(width=max(Console().width, 100))
    with measuring():
        run(console, checkpoint, framework, dtype, clients, requests, new_tokens, rounds)
