"""The command ``bench eval``."""

import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from benchmarks.failures import measuring
from benchmarks.products import Dtype
from griffin_eval.arguments import token_counts
from griffin_eval.cli.ending import run_command
from griffin_eval.errors import ArgumentError, MissingExtraError

if TYPE_CHECKING:
    from griffin_eval.converters.checkpoint import Checkpoint

TASKS = "griffin_pydoc_choice,griffin_pydoc_topic,griffin_phonebook,griffin_pydoc_rolling"


def bench_eval(
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Folder that transformers reads; by default a small random one."),
    ] = None,
    tasks: Annotated[
        str,
        typer.Option(
            help="Tasks TASK[:DOCUMENTS[:WHOLE]],…: documents in the model and whole commands."
        ),
    ] = TASKS,
    tasks_path: Annotated[
        Path | None, typer.Option(help="Folder with more tasks.", exists=True, file_okay=False)
    ] = None,
    limit: Annotated[
        int, typer.Option(help="Number of documents where --tasks does not say.", min=1)
    ] = 8,
    rounds: Annotated[
        int, typer.Option(help="Number of measurements of each, in turn.", min=1)
    ] = 3,
    frameworks: Annotated[str, typer.Option(help="Frameworks that griffin runs in.")] = "torch,jax",
    dtype: Annotated[
        Dtype, typer.Option(help="Dtype of weights and activations, of hf's model too.")
    ] = "float32",
    characters: Annotated[
        int | None,
        typer.Option(
            help="Number of characters that rolling documents are cut to, but in whole commands.",
            min=1,
        ),
    ] = None,
    lengths: Annotated[
        str,
        typer.Option(
            help="Lengths in tokens of single documents whose memory is measured; 0: none."
        ),
    ] = "100000,1000000",
) -> None:
    """Evaluate with lm_eval's hf model and with griffin, on the CPU; time, limit, answers, memory.

    Exit code 1 if answers differ from hf's.
    """
    from benchmarks.evaluation.run import HF_NEEDS, Bench, parse_workloads
    from benchmarks.peers import why_absent
    from benchmarks.random_checkpoint import write_checkpoint
    from griffin_eval.checkpoints import folder as shipped
    from griffin_eval.runners.load import choose_framework

    workloads = parse_workloads(tasks, limit)
    chosen = [choose_framework(name) for name in frameworks.split(",")]
    tokens = token_counts(lengths)
    if find_spec("lm_eval") is None:
        raise MissingExtraError("lm-eval", "torch")
    hf_absent = why_absent(*HF_NEEDS)
    opened = None if checkpoint is None else _open(checkpoint, hf_absent is None)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tiny = shipped("bytes_griffin")
        if hf_absent is None:
            tiny = folder / "checkpoint"
            write_checkpoint(tiny)
        opened = opened or _open(tiny, hf_absent is None)
        bench = Bench(
            Console(width=max(Console().width, 160)),
            opened.folder,
            opened.config,
            hf_absent=hf_absent,
            frameworks=chosen,
            dtype=dtype,
            tasks_path=tasks_path,
            characters=characters,
            folder=folder,
        )
        with measuring():
            agree = bench.evaluate(workloads, rounds)
            if tokens:
                bench.read_documents(tiny, tokens)
    if not agree:
        raise typer.Exit(1)


def tell(text: str) -> None:
    """Prints a line about long work on a terminal, nothing in a pipe."""
    console = Console(stderr=True)
    if console.is_terminal:
        console.print(text, highlight=False, markup=False)


def _open(path: Path, for_hf: bool) -> "Checkpoint":
    """The checkpoint in a folder, which must be of Hugging Face's format if hf's model reads it."""
    from griffin_eval.converters.checkpoint import Checkpoint

    checkpoint = Checkpoint(path)
    if for_hf and checkpoint.format.name != "hf":
        raise ArgumentError(
            f"--checkpoint {path} is in the format {checkpoint.format.name}, which lm_eval's hf "
            f"model does not read: griffin-eval convert {path} FOLDER --to hf"
        )
    return checkpoint


if __name__ == "__main__":
    run_command(lambda: typer.run(bench_eval))
