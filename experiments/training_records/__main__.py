"""The command ``python -m experiments.training_records``."""

import json
from pathlib import Path
from typing import Annotated

import typer

from griffin_eval.cli.ending import run_command

RECORDS, FIGURES = Path("docs", "runs.jsonl"), Path("docs", "figures")


def training_records(
    queues: Annotated[
        list[Path] | None, typer.Argument(help="Queue files of `griffin-eval train --queue`.")
    ] = None,
) -> None:
    """Add the finished runs of QUEUES to docs/runs.jsonl, and draw the figures of all records.

    Prints the progress of every run in QUEUES. Run it in the folder of the checkout.
    """
    from experiments.training_records.figures import draw_all
    from experiments.training_records.records import progress, read_records, record
    from griffin_eval.training.options import read_queue

    records = {made["name"]: made for made in read_records(RECORDS)}
    for order in [order for queue in queues or [] for order in read_queue(queue)]:
        line, finished = progress(order)
        typer.echo(line)
        if finished:
            made = record(order)
            records[made["name"]] = made
    ordered = [records[name] for name in sorted(records)]
    RECORDS.write_text("".join(json.dumps(made) + "\n" for made in ordered), encoding="utf-8")
    for path in draw_all(ordered, FIGURES):
        typer.echo(str(path))


if __name__ == "__main__":
    run_command(lambda: typer.run(training_records))
