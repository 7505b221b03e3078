"""The command ``train``."""

import dataclasses
import inspect
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from griffin_eval.cli.options import progress_on_terminal
from griffin_eval.errors import BadInput
from griffin_eval.training.options import FIELDS, option_type, read_options, read_queue

if TYPE_CHECKING:
    from griffin_eval.training.options import TrainOptions
    from griffin_eval.training.step import Method


# Help panels of options, by field name.
PANELS = {
    "Data": ("seed", "length", "rows", "curriculum"),
    "Model": (
        *("model", "from_", "width", "heads", "lru_width", "window", "scale_window"),
        *("rope_fraction", "conv_variance"),
    ),
    "Optimizer": ("steps", "until", "learning_rate", "recurrent_rate", "schedule", "decayed"),
    "Devices and memory": ("dtype", "mesh", "pieces", "recompute"),
}


def train(
    queue: Annotated[
        Path | None,
        typer.Option(
            help="File of runs to train one after the other, each line a JSON object of options. "
            "Options of the command are defaults for all lines."
        ),
    ] = None,
    **values: Any,
) -> None:
    """Train a small Griffin, Hawk or Transformer on the paper's tasks, with JAX.

    A folder with an unfinished run continues from its latest checkpoint; `convert` and `lm_eval`
    read the folder as it is. Options default to the recipe's values.
    """
    from griffin_eval.runners.load import choose_framework
    from griffin_eval.training.allocator import use_one_heap

    use_one_heap()
    choose_framework("jax")
    from griffin_eval.training.step import make_method

    shared = {name.rstrip("_"): value for name, value in values.items() if value is not None}
    runs = [read_options(shared)] if queue is None else read_queue(queue, shared)
    methods = [make_method(options) for options in runs]
    failed = False
    for options, method in zip(runs, methods, strict=True):
        try:
            typer.echo(_train(options, method))
        except BadInput as error:
            if queue is None:
                raise
            typer.echo(f"{options.output}: {error}", err=True)  # the next runs still start
            failed = True
        except Exception:
            if queue is None:
                raise
            traceback.print_exc()
            failed = True
    if failed:
        raise typer.Exit(1)


def _parameter(field: dataclasses.Field) -> inspect.Parameter:
    """Return the parameter of the command for an option."""
    help, names = field.metadata["help"], field.metadata["names"]
    is_recipe = field.name == "recipe"
    panel = next((panel for panel, fields in PANELS.items() if field.name in fields), None)
    option = typer.Option(*names, help=help, rich_help_panel=panel)
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None if field.default is dataclasses.MISSING else field.default,
        annotation=Annotated[
            option_type(field) | None,
            typer.Argument(help=help) if is_recipe else option,
        ],
    )


_queue = inspect.signature(train).parameters["queue"]
_parameters = [_queue, *map(_parameter, FIELDS.values())]
train.__signature__ = inspect.Signature(_parameters)  # type: ignore[attr-defined]
train.__annotations__ = {each.name: each.annotation for each in _parameters}


def _train(options: "TrainOptions", method: "Method") -> str:
    """Train a run, or the rest of it, and draw its curves; return a sentence on its last step."""

    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    from griffin_eval.training.figures import draw
    from griffin_eval.training.trainer import train_model

    run, folder = options.run, options.output
    name = f"{run.recipe.name} {run.model}"
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with progress_on_terminal(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task(name, total=run.recipe.steps)

        def progress(metrics: Mapping[str, Any]) -> None:
            if "loss" in metrics:
                text = f"loss {metrics['loss']:.3f}, accuracy {metrics['accuracy']:.1%}"
                bar.update(task, description=f"{name}: {text}")
            bar.update(task, completed=metrics["step"])

        last = train_model(
            run,
            folder,
            until=options.until,
            save_every=options.save_every,
            keep=options.checkpoints_kept,
            method=method,
            progress=progress,
        )
    figure = draw([folder], folder / "curves")
    return (
        f"{folder}: step {last['step']}, test loss {last['test_loss']:.4f}, "
        f"accuracy {last['accuracy']:.1%} at length {run.recipe.length}; curves in {figure}"
    )
