"""The command ``bench serve``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.failures import measuring
from griffin_eval.cli.ending import run_command
from griffin_eval.errors import ArgumentError


def bench_serve(
    checkpoint: Annotated[str, typer.Argument(help="Folder, .pt or .gguf file, or hub id.")],
    framework: Annotated[str, typer.Option(help="Framework: torch or jax.")] = "torch",
    dtype: Annotated[str, typer.Option(help="Dtype of weights and activations.")] = "auto",
    clients: Annotated[int, typer.Option(help="Number of requests at a time.", min=1)] = 32,
    requests: Annotated[int, typer.Option(help="Number of requests of each kind.", min=1)] = 128,
    new_tokens: Annotated[
        int,
        typer.Option(
            help="Number of tokens to generate for each text; a task says so itself.", min=2
        ),
    ] = 64,
    rounds: Annotated[int, typer.Option(help="Number of measurements of each.", min=1)] = 3,
    task: Annotated[
        str | None,
        typer.Option(help="Task of lm_eval whose documents are the requests, by its own client."),
    ] = None,
    tasks_path: Annotated[
        Path | None,
        typer.Option(help="Folder with more tasks, for --task.", exists=True, file_okay=False),
    ] = None,
) -> None:
    """Time a server under many clients beside the engine without one; time to first token.

    With `--task`, lm_eval asks the server and the engine, and `--requests` counts documents.
    """
    from benchmarks.serving import requests as texts
    from benchmarks.serving import tasks

    if tasks_path is not None and task is None:
        raise ArgumentError("--tasks-path has tasks for --task: name one of them")
    console = Console(width=max(Console().width, 100))
    with measuring():
        if task is None:
            texts.run(console, checkpoint, framework, dtype, clients, requests, new_tokens, rounds)
        else:
            where = None if tasks_path is None else str(tasks_path)
            tasks.run(console, checkpoint, framework, dtype, clients, task, where, requests, rounds)


if __name__ == "__main__":
    run_command(lambda: typer.run(bench_serve))
