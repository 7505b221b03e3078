"""The command ``checkpoints``."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table


def checkpoints(
    name: Annotated[
        str | None,
        typer.Argument(help="Name of one, whose path is printed; without it, all are listed."),
    ] = None,
) -> None:
    """List the small trained checkpoints that ship with this package, or print the path of one.

    lm_eval --model griffin --model_args pretrained=$(griffin-eval checkpoints NAME)
    """
    from griffin_eval.checkpoints import folder, names, scores

    if name is not None:
        typer.echo(folder(name))
        return
    table = Table(title=f"in {folder(names()[0]).parent}; each has a card, README.md")
    for heading in ("name", "measured"):
        table.add_column(heading)
    for each in names():
        measured = [f"{s['task']} {s['metric']} {s['value']:.3f}" for s in scores(each)]
        table.add_row(each, "\n".join(measured))
    Console(width=max(Console().width, 100)).print(table)
