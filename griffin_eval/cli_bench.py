"""The command ``bench eval``."""

import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from griffin_eval.errors import ArgumentError, MissingExtraError

if TYPE_CHECKING:
    from griffin_eval.converters.checkpoint import Checkpoint

TASKS = "griffin_pydoc_choice,griffin_phonebook,griffin_pydoc_rolling"


def bench_eval(
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Folder that transformers reads; by default a small random one."),
    ] = None,
    tasks: Annotated[
        str,
        typer.Option(
            help="TASK[:DOCUMENTS[:WHOLE]],…: documents in the model and in whole commands; 0: no."
        ),
    ] = TASKS,
    tasks_path: Annotated[
        Path | None, typer.Option(help="Folder with more tasks.", exists=True, file_okay=False)
    ] = None,
    limit: Annotated[int, typer.Option(help="Documents where --tasks does not say.", min=1)] = 8,
    rounds: Annotated[int, typer.Option(help="Measurements of each, in turn.", min=1)] = 3,
    frameworks: Annotated[str, typer.Option(help="In which griffin runs.")] = "torch,jax",
    characters: Annotated[
        int | None,
        typer.Option(help="Cut rolling documents to so many, except in whole commands.", min=1),
    ] = None,
    lengths: Annotated[
        str, typer.Option(help="Of single documents, in tokens, whose memory is taken; 0: none.")
    ] = "100000,1000000",
) -> None:
    """Evaluate with lm_eval's hf model and with griffin, on the CPU; time, limit, answers, memory.

    Exit code 1 if answers differ from hf's.
    """
    from griffin_eval.bench_eval import Bench, Failed, parse_workloads
    from griffin_eval.random_checkpoint import write_checkpoint
    from griffin_eval.runners import choose_framework

    workloads = parse_workloads(tasks, limit)
    chosen = [choose_framework(name) for name in frameworks.split(",")]
    tokens = _lengths(lengths)
    for library in ("lm_eval", "transformers", "torch", "accelerate"):  # of hf's model
        if find_spec(library) is None:
            raise MissingExtraError(library, "test")
    opened = None if checkpoint is None else _open(checkpoint)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tiny = folder / "checkpoint"
        write_checkpoint(tiny)
        opened = opened or _open(tiny)
        bench = Bench(
            Console(width=max(Console().width, 160)),
            opened.folder,
            opened.config,
            frameworks=chosen,
            tasks_path=tasks_path,
            characters=characters,
            folder=folder,
        )
        try:
            agree = bench.evaluate(workloads, rounds)
            if tokens:
                bench.read_documents(tiny, tokens)
        except Failed as error:
            typer.echo(f"a measurement failed: {error}", err=True)
            raise typer.Exit(1) from None
    if not agree:
        raise typer.Exit(1)


def tell(text: str) -> None:
    """Prints a line about long work on a terminal, nothing in a pipe."""
    console = Console(stderr=True)
    if console.is_terminal:
        console.print(text, highlight=False, markup=False)


def _open(path: Path) -> "Checkpoint":
    from griffin_eval.converters.checkpoint import Checkpoint

    checkpoint = Checkpoint(path)
    if checkpoint.format.name != "hf":
        raise ArgumentError(
            f"--checkpoint {path} is in the format {checkpoint.format.name}, which lm_eval's hf "
            f"model does not read: griffin-eval convert {path} FOLDER --to hf"
        )
    return checkpoint


def _lengths(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise ArgumentError(f"--lengths {text!r}: expected numbers of tokens such as 100000")
    return [int(part) for part in parts if int(part)]
