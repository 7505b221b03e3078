"""The command ``train``."""

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from griffin_eval.errors import ArgumentError
from griffin_eval.messages import did_you_mean


def train(
    recipe: Annotated[
        str, typer.Argument(help="Recipe: selective_copy, induction_heads or bytes.")
    ],
    model: Annotated[str, typer.Option(help="Model: griffin, hawk or mqa.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the run.")],
    seed: Annotated[int, typer.Option(help="Seed of weights and data.", min=0)] = 0,
    steps: Annotated[
        int | None, typer.Option(help="Number of steps, if not the recipe's.", min=1)
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(help="Length of a training sequence in tokens; a step reads as many in all."),
    ] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
) -> None:
    """Train a small model of section 6.2 with the JAX twin.

    A folder with an unfinished run goes on from its latest checkpoint; `convert` and `lm_eval` read
    the folder as it is.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from griffin_eval.runners.load import choose_framework
    from griffin_eval.training.allocator import use_one_heap

    use_one_heap()
    choose_framework("jax")
    from griffin_eval.training.figures import draw
    from griffin_eval.training.recipes import MODELS, SHORTEST, recipe_named
    from griffin_eval.training.trainer import Run, train_model

    given = {"steps": steps, "length": length, "learning_rate": learning_rate}
    changes: Any = {key: value for key, value in given.items() if value is not None}
    chosen = dataclasses.replace(recipe_named(recipe), **changes)
    if model not in MODELS:
        raise ArgumentError(
            f"unknown model {model!r}: expected {', '.join(MODELS)}{did_you_mean(model, MODELS)}"
        )
    if chosen.length < SHORTEST:
        raise ArgumentError(f"--length must be at least {SHORTEST}, found {length}")
    if not 0 < chosen.learning_rate < math.inf:
        raise ArgumentError(f"--learning-rate must be a number above 0, found {learning_rate}")
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(f"{recipe} {model}", total=chosen.steps)

        def progress(metrics: dict[str, Any]) -> None:
            if "loss" in metrics:
                text = f"loss {metrics['loss']:.3f}, accuracy {metrics['accuracy']:.1%}"
                bar.update(task, description=f"{recipe} {model}: {text}")
            bar.update(task, completed=metrics["step"])

        last = train_model(Run(recipe=chosen, model=model, seed=seed), output, progress=progress)
    figure = draw([output], output / "curves")
    typer.echo(
        f"{output}: step {last['step']}, test loss {last['test_loss']:.4f}, "
        f"accuracy {last['accuracy']:.1%}; curves in {figure}"
    )
