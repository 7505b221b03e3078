"""The command ``bench sweep``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from griffin_eval.cli.bench.failures import measuring


def bench_sweep(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a checkpoint.")],
    tasks: Annotated[
        str, typer.Option(help="Tasks, as lm_eval takes them: A,B,….")
    ] = "griffin_pydoc_choice,griffin_phonebook",
    limit: Annotated[int, typer.Option(help="Number of documents of each task.", min=1)] = 20,
    framework: Annotated[str, typer.Option(help="Framework: torch or jax.")] = "torch",
    checkpoints: Annotated[int, typer.Option(help="Number of copies to evaluate.", min=2)] = 10,
    rounds: Annotated[int, typer.Option(help="Number of measurements of each.", min=1)] = 3,
) -> None:
    """Time a sweep over copies of a checkpoint beside one lm_eval command."""
    from griffin_eval.bench.sweep import run
    from griffin_eval.errors import ArgumentError

    if not checkpoint.is_dir():
        raise ArgumentError(f"{checkpoint} is no folder: expected that of a checkpoint")

    console = Console(width=max(Console().width, 100))
    with measuring():
        run(console, checkpoint, tasks, limit, framework, checkpoints, rounds)
