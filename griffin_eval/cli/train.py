"""The command ``train``."""

from pathlib import Path
from typing import Annotated, Any

import typer

from griffin_eval.cli.options import progress_on_terminal
from griffin_eval.errors import ArgumentError, CheckpointError


def train(
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="Recipe: selective_copy, induction_heads, bytes, phonebook, phonebook_lookup or "
            "text."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model: griffin, hawk, mqa or local_mqa.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the run.")
    ] = None,
    queue: Annotated[
        Path | None,
        typer.Option(help="File of runs to make one after the other, a JSON object on each line."),
    ] = None,
    start: Annotated[
        Path | None, typer.Option("--from", help="Checkpoint whose weights the run begins with.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights and data, if not 0.")] = None,
    steps: Annotated[int | None, typer.Option(help="Number of steps.")] = None,
    until: Annotated[
        float | None, typer.Option(help="Accuracy that ends the run, in two tests in a row.")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(help="Length of a training sequence in tokens; a step reads as many in all."),
    ] = None,
    rows: Annotated[int | None, typer.Option(help="Sequences of a step at the length.")] = None,
    curriculum: Annotated[
        bool | None, typer.Option(help="Shorter sequences at the beginning.")
    ] = None,
    width: Annotated[int | None, typer.Option(help="Width of the model.")] = None,
    heads: Annotated[int | None, typer.Option(help="Heads, and blocks of the gates.")] = None,
    lru_width: Annotated[int | None, typer.Option(help="Channels of the recurrence.")] = None,
    window: Annotated[int | None, typer.Option(help="Keys that local attention sees.")] = None,
    scale_window: Annotated[
        bool | None, typer.Option(help="Shorter windows for shorter sequences.")
    ] = None,
    rope_fraction: Annotated[
        float | None, typer.Option(help="Part of each head that RoPE rotates.")
    ] = None,
    conv_variance: Annotated[
        float | None, typer.Option(help="Initial variance of what the convolutions give.")
    ] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    recurrent_rate: Annotated[
        float | None, typer.Option(help="Factor of the learning rate in recurrent blocks.")
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(help="Learning rate by step: cosine, constant or falling.")
    ] = None,
    decayed: Annotated[
        str | None, typer.Option(help="Parameters with weight decay: matrices or linear.")
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(help="Devices that split batch and weights, such as data=4,model=2."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Dtype of a step: float32 or bfloat16; weights stay float32.")
    ] = None,
    pieces: Annotated[
        int, typer.Option(help="Pieces of a batch whose gradients are added up.", min=1)
    ] = 1,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Activations computed twice, to save memory.")
    ] = False,
) -> None:
    """Train a small model of section 6.2 with the JAX twin.

    A folder with an unfinished run goes on from its latest checkpoint; `convert` and `lm_eval` read
    the folder as it is. Options that are not given are the recipe's.
    """
    options = dict(locals())
    from griffin_eval.runners.load import choose_framework
    from griffin_eval.training.allocator import use_one_heap

    use_one_heap()
    choose_framework("jax")
    from griffin_eval.training.orders import OPTIONS, read_order, read_queue

    options["from"] = options.pop("start")
    given = {name: options[name] for name in OPTIONS if options[name] is not None}
    if queue is None:
        orders = [read_order(given)]
    elif given:
        raise ArgumentError(
            f"--queue says what runs there are: leave out {', '.join(sorted(given))}"
        )
    else:
        orders = read_queue(queue)
    methods = [_method(order.run.recipe, mesh, pieces, recompute) for order in orders]
    failed = False
    for order, method in zip(orders, methods, strict=True):
        try:
            typer.echo(_train(order, method))
        except (ArgumentError, CheckpointError) as error:
            if queue is None:
                raise
            typer.echo(f"{order.folder}: {error}", err=True)  # and the others are made
            failed = True
    if failed:
        raise typer.Exit(1)


def _method(recipe: Any, mesh: str | None, pieces: int, recompute: bool) -> Any:
    """How the steps of a recipe are computed.

    Raises:
        ArgumentError: the rows cannot be cut or split so.
    """
    from griffin_eval.training.step import Method

    rows = max(1, recipe.tokens // recipe.length)
    if rows % pieces:
        raise ArgumentError(f"--pieces {pieces} does not divide a step's {rows} rows")
    over = None if mesh is None else training_mesh(mesh, rows // pieces)
    return Method(mesh=over, pieces=pieces, recompute=recompute)


def _train(order: Any, method: Any) -> str:
    """Makes a run, or what is left of it, and its curves; a sentence about its end."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    from griffin_eval.training.figures import draw
    from griffin_eval.training.trainer import train_model

    run = order.run
    name = f"{run.recipe.name} {run.model}"
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with progress_on_terminal(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task(name, total=run.recipe.steps)

        def progress(metrics: dict[str, Any]) -> None:
            if "loss" in metrics:
                text = f"loss {metrics['loss']:.3f}, accuracy {metrics['accuracy']:.1%}"
                bar.update(task, description=f"{name}: {text}")
            bar.update(task, completed=metrics["step"])

        last = train_model(run, order.folder, until=order.until, method=method, progress=progress)
    figure = draw([order.folder], order.folder / "curves")
    return (
        f"{order.folder}: step {last['step']}, test loss {last['test_loss']:.4f}, "
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
