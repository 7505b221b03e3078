"""The command ``python -m benchmarks.evaluation``."""

import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.commands import AsJson, Pythons, Rounds, interpreters, measuring
from benchmarks.products import Dtype
from griffin_eval.arguments import token_counts
from griffin_eval.cli.ending import run_command
from griffin_eval.errors import ArgumentError, MissingExtraError

if TYPE_CHECKING:
    from griffin_eval.converters.checkpoint import Checkpoint

TASKS = "griffin_pydoc_choice,griffin_pydoc_topic,griffin_phonebook,griffin_pydoc_rolling"


def main(
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Folder that transformers reads; by default a small random one."),
    ] = None,
    tasks: Annotated[
        str, typer.Option(help="Tasks or tags, as lm_eval takes them: A,B,….")
    ] = TASKS,
    tasks_path: Annotated[
        Path | None, typer.Option(help="Folder with more tasks.", exists=True, file_okay=False)
    ] = None,
    limit: Annotated[int, typer.Option(help="Number of documents of each task.", min=1)] = 8,
    rounds: Rounds = 5,
    frameworks: Annotated[str, typer.Option(help="Frameworks that griffin runs in.")] = "torch,jax",
    dtype: Annotated[
        Dtype, typer.Option(help="Dtype of weights and activations, of hf's model too.")
    ] = "float32",
    lengths: Annotated[
        str,
        typer.Option(help="Lengths in tokens of documents whose memory is measured, or 0."),
    ] = "100000,1000000",
    python: Pythons = None,
    as_json: AsJson = False,
) -> None:
    """Time lm_eval with griffin beside lm_eval's hf model and the roofline; memory of documents.

    The first task is measured once more beside a busy process of another session. Exit code 1 if
    answers differ from hf's.
    """
    from benchmarks.evaluation.run import HF_NEEDS, Bench
    from benchmarks.peers import why_absent
    from benchmarks.random_checkpoint import write_checkpoint
    from benchmarks.report import Report
    from griffin_eval.checkpoints import folder as shipped
    from griffin_eval.runners.load import choose_framework

    chosen = [choose_framework(name) for name in frameworks.split(",")]
    tokens = token_counts(lengths)
    if find_spec("lm_eval") is None:
        raise MissingExtraError("lm-eval", "torch")
    hf_absent = why_absent(*HF_NEEDS)
    report = Report()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tiny = shipped("bytes_griffin")
        if hf_absent is None:
            tiny = folder / "checkpoint"
            write_checkpoint(tiny)
        opened = _open(checkpoint or tiny, hf_absent is None)
        bench = Bench(
            opened.folder.resolve(),
            opened.config,
            hf_absent,
            interpreters(python),
            chosen,
            dtype,
            list(dict.fromkeys(tasks.split(","))),
            str(tasks_path.resolve()) if tasks_path else None,
            limit,
            folder,
        )
        with measuring():
            agree = bench.evaluate(rounds, report)
            if tokens:
                bench.read_documents(tiny, tokens, rounds, report)
    report.show(as_json)
    if not agree:
        raise typer.Exit(1)


def _open(path: Path, for_hf: bool) -> "Checkpoint":
    """Open a checkpoint, which must be of Hugging Face's format if hf's model reads it."""
    from griffin_eval.converters.checkpoint import Checkpoint

    checkpoint = Checkpoint(path)
    if for_hf and checkpoint.format.name != "hf":
        raise ArgumentError(
            f"--checkpoint {path} is in the format {checkpoint.format.name}, which lm_eval's hf "
            f"model does not read: griffin-eval convert {path} FOLDER --to hf"
        )
    return checkpoint


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
