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
    mesh: Annotated[
        str | None,
        typer.Option(help="Devices that split batch and weights, such as data=4,model=2."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Dtype of a step: float32 or bfloat16; weights stay float32.")
    ] = "float32",
    pieces: Annotated[
        int, typer.Option(help="Pieces of a batch whose gradients are added up.", min=1)
    ] = 1,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Activations computed twice, to save memory.")
    ] = False,
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
    from griffin_eval.training.trainer import Method, Run, train_model

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
    rows = max(1, chosen.tokens // chosen.length)
    if dtype not in ("float32", "bfloat16"):
        raise ArgumentError(f"unknown dtype {dtype!r}: expected float32 or bfloat16")
    if rows % pieces:
        raise ArgumentError(f"--pieces {pieces} does not divide a step's {rows} rows")
    over = None if mesh is None else training_mesh(mesh, rows // pieces)
    method = Method(mesh=over, pieces=pieces, recompute=recompute)
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

        settings = Run(recipe=chosen, model=model, seed=seed, dtype=dtype)
        last = train_model(settings, output, method=method, progress=progress)
    figure = draw([output], output / "curves")
    typer.echo(
        f"{output}: step {last['step']}, test loss {last['test_loss']:.4f}, "
        f"accuracy {last['accuracy']:.1%}; curves in {figure}"
    )


def training_mesh(text: str, rows: int) -> Any:
    """The mesh of ``--mesh``, of the first devices of this process.

    Args:
        text: such as ``data=4,model=2``.
        rows: that are read at a time, which the replicas divide.

    Raises:
        ArgumentError: it is no mesh, or one that does not fit the devices or the rows.
    """
    import jax

    from griffin_eval.sharding.mesh_jax import make_mesh
    from griffin_eval.sharding.split import DATA, MODEL, parse_mesh

    sizes, there = parse_mesh(text, "--mesh"), jax.local_devices()
    needed = sizes[DATA] * sizes[MODEL]
    if needed > len(there):
        raise ArgumentError(
            f"--mesh {text}: it takes {needed} devices, and this process has {len(there)}"
        )
    if rows % sizes[DATA]:
        raise ArgumentError(
            f"--mesh {text}: {sizes[DATA]} does not divide the {rows} rows that are read at a time"
        )
    return make_mesh(there[:needed], sizes[DATA])
