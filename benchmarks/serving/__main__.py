"""The command ``python -m benchmarks.serving``."""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.commands import (
    AnyDtype,
    AsJson,
    Framework,
    Model,
    Pythons,
    Rounds,
    interpreters,
    measuring,
)
from griffin_eval.cli.ending import run_command
from griffin_eval.errors import ArgumentError


def main(
    checkpoint: Model,
    framework: Framework = "torch",
    dtype: AnyDtype = "auto",
    clients: Annotated[int, typer.Option(help="Number of requests at a time.", min=1)] = 32,
    requests: Annotated[
        int, typer.Option(help="Number of requests of each kind, or of documents.", min=1)
    ] = 128,
    new_tokens: Annotated[
        int,
        typer.Option(help="Number of tokens to generate for each text, without --task.", min=2),
    ] = 64,
    rounds: Rounds = 5,
    task: Annotated[
        str | None,
        typer.Option(help="Task of lm_eval whose documents are the requests, by its own client."),
    ] = None,
    tasks_path: Annotated[
        Path | None,
        typer.Option(help="Folder with more tasks, for --task.", exists=True, file_okay=False),
    ] = None,
    python: Pythons = None,
    as_json: AsJson = False,
) -> None:
    """Time a server under many clients beside the engine without one, and beside other servers.

    With `--task`, lm_eval asks the server and the engine.
    """
    from benchmarks.report import Report
    from benchmarks.serving import requests as texts
    from benchmarks.serving import tasks

    if tasks_path is not None and task is None:
        raise ArgumentError("--tasks-path has tasks for --task: name one of them")
    report, pythons = Report(), interpreters(python)
    model = (checkpoint, framework, dtype, clients)
    with measuring():
        if task is None:
            texts.Bench(*model, requests, new_tokens, pythons).run(rounds, report)
        else:
            where = None if tasks_path is None else str(tasks_path)
            tasks.Bench(*model, task, where, requests, pythons).run(rounds, report)
    report.show(as_json)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
