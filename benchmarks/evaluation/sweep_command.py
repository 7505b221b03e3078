"""The command ``bench sweep``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.failures import measuring
from experiments.paper_speed.options import Output
from griffin_eval.cli.ending import run_command
from griffin_eval.cli.options import check_figures_folder


def bench_sweep(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a checkpoint.")],
    tasks: Annotated[
        str, typer.Option(help="Tasks, as lm_eval takes them: A,B,….")
    ] = "griffin_pydoc_choice,griffin_phonebook",
    limit: Annotated[
        str, typer.Option(help="Numbers of documents of each task, each measured by itself: A,B,….")
    ] = "20,100",
    framework: Annotated[str, typer.Option(help="Framework: torch or jax.")] = "torch",
    checkpoints: Annotated[int, typer.Option(help="Number of copies to evaluate.", min=2)] = 10,
    rounds: Annotated[int, typer.Option(help="Number of measurements of each.", min=1)] = 3,
    output: Output = None,
) -> None:
    """Time a sweep over copies of a checkpoint beside one lm_eval command."""
    from benchmarks.evaluation.sweep import draw, run
    from griffin_eval.arguments import positive_integers
    from griffin_eval.errors import ArgumentError

    if not checkpoint.is_dir():
        raise ArgumentError(f"{checkpoint} is no folder: expected that of a checkpoint")
    limits = positive_integers("--limit", limit, "numbers of documents such as 20,100")
    check_figures_folder(output)
    console = Console(width=max(Console().width, 100))
    with measuring():
        found = run(console, checkpoint, tasks, limits, framework, checkpoints, rounds)
    if output is not None:
        typer.echo(str(draw(found, output)))


if __name__ == "__main__":
    run_command(lambda: typer.run(bench_sweep))
