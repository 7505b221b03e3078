"""Tokens that models read of tasks, over the distinct ones of their requests.

griffin and lm_eval's hf model count as they run, hf's padding included. vLLM and SGLang are counted
by their rules for log-likelihoods: each request is read from its first to its last token.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.commands import AsJson
from benchmarks.report import Report, Row
from griffin_eval.cli.ending import run_command

BY_RULE = "vLLM, SGLang: by their rules, not run"


def main(
    checkpoint: Annotated[Path, typer.Argument(help="Folder that transformers reads.")],
    tasks: Annotated[str, typer.Option(help="Tasks, as lm_eval takes them: A,B,….")],
    tasks_path: Annotated[
        Path | None, typer.Option(help="Folder with more tasks.", exists=True, file_okay=False)
    ] = None,
    limit: Annotated[int, typer.Option(help="Number of documents of each task.", min=1)] = 8,
    as_json: AsJson = False,
) -> None:
    """Count the tokens that griffin and lm_eval's hf model read, and those that others would."""
    path = None if tasks_path is None else str(tasks_path.resolve())
    rows = [_row(str(checkpoint), task, limit, path) for task in tasks.split(",")]
    Report({f"tokens read over distinct tokens, {limit} documents of each task": rows}).show(
        as_json
    )


def _row(checkpoint: str, task: str, limit: int, tasks_path: str | None) -> Row:
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from benchmarks.evaluation.plan import plan
    from benchmarks.evaluation.run import HF_BATCH, HF_LENGTH
    from griffin_eval.lm.model import GriffinLM

    work, read = plan(checkpoint, task, limit, tasks_path), 0
    generates = "generate_until" in work["kinds"]

    def count(module: Any, inputs: tuple, named: dict[str, Any]) -> None:
        nonlocal read
        read += (inputs[0] if inputs else named["input_ids"]).numel()

    settings = {"dtype": "float32", "device": "cpu", "max_length": HF_LENGTH}
    make_hf: Any = HFLM  # lm_eval's decorator hides its type
    hf = make_hf(pretrained=checkpoint, **settings, batch_size=1 if generates else HF_BATCH)
    hf.model.register_forward_pre_hook(count, with_kwargs=True)
    griffin = GriffinLM(checkpoint, dtype="float32", device="cpu")
    for lm in (hf, griffin):
        manager = TaskManager(include_path=tasks_path)
        found: Any = simple_evaluate(
            lm, tasks=[task], limit=limit, task_manager=manager, bootstrap_iters=0
        )
    stats = griffin.stats
    decoded = stats.tokens_computed - stats.tokens_again - stats.tokens_unique
    distinct = work["unique"] + decoded
    row = {"task": task, "requested": work["requested"], "distinct": distinct}
    row |= {"griffin": stats.tokens_computed / distinct, "hf": read / distinct}
    if work["kinds"] == ["loglikelihood"]:
        requests = sum(len(sample["arguments"]) for sample in found["samples"][task])
        row[BY_RULE] = (work["requested"] + requests) / distinct  # last tokens are read, too
    return row


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
