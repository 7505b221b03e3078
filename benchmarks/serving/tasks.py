"""Tasks of lm-eval that ask `griffin-eval serve` through lm-eval's own client, beside the engine.

The client is ``local-completions``; the engine runs as ``lm_eval --model griffin`` runs it. Only
requests are timed, not the building of tasks and the loading of models. Both take turns, and each
round has a server of its own, since a server remembers what it has read.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.evaluation.requests import ask, comparable_metrics
from benchmarks.serving.clients import own_server, served
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.source.companions import tokenizer_folder
from griffin_eval.converters.source.resolve import resolve
from griffin_eval.process import tune_process

LEAST_RATIO = 0.8  # of the engine's speed, that the server should have
REQUESTS = ("loglikelihood", "loglikelihood_rolling", "generate_until")
_ANY_LENGTH = 10_000_000  # tokens of a prompt, which the client would else cut


def run(
    console: Console,
    checkpoint: str,
    framework: str,
    dtype: str,
    clients: int,
    task: str,
    tasks_path: str | None,
    limit: int,
    rounds: int,
) -> None:
    """Measures and prints.

    Args:
        console: to print on.
        checkpoint: path or hub id.
        framework, dtype: as of `griffin-eval serve`.
        clients: requests at a time.
        task: name of a task or tag.
        tasks_path: folder with more tasks.
        limit: documents of each task.
        rounds: of each measurement.

    Raises:
        BadInput: the checkpoint cannot be used, or there is no such task.
        Failed: the server ended, or did not answer.
    """
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    tune_process()
    from griffin_eval.lm.model import GriffinLM

    lm = GriffinLM(checkpoint, framework, dtype=dtype)
    with closing(Checkpoint(resolve(checkpoint))) as opened:
        tokenizer = tokenizer_folder(opened.folder)

    def timed(model: Any) -> tuple[float, dict[str, float]]:
        with _watch(model) as seconds:
            results = ask(model, task, limit, tasks_path, None)
        return sum(seconds), comparable_metrics(results)

    engine, server = list[float](), list[float]()
    expected, answered = dict[str, float](), dict[str, float]()
    for number in track(
        range(rounds + 1), "rounds", console=console, disable=not console.is_terminal
    ):
        without, expected = timed(lm)
        with served(own_server(checkpoint, framework, dtype)) as port:
            client = LocalCompletionsAPI.create_from_arg_obj(
                {
                    "base_url": f"http://127.0.0.1:{port}/v1/completions",
                    "model": checkpoint,
                    "num_concurrent": clients,
                    "tokenizer_backend": "huggingface",
                    "tokenizer": str(tokenizer),
                    "add_bos_token": bool(lm.tok_encode("")),
                    "max_length": _ANY_LENGTH,
                }
            )
            through, answered = timed(client)
        if number:  # the first may compile
            engine.append(without)
            server.append(through)
    table = Table(title=f"{limit} documents of {task}, {clients} clients")
    table.add_column("seconds")
    for heading in ("median", "range", *expected):
        table.add_column(heading, justify="right")
    for name, values, metrics in (
        ("engine", engine, expected),
        ("server", server, answered),
    ):
        spread = f"{min(values):.3g}-{max(values):.3g}"
        shown = (f"{metrics[metric]:.4f}" for metric in expected)
        table.add_row(name, f"{median(values):.3g}", spread, *shown)
    console.print(table)
    ratio = median(engine) / median(server)
    verdict = "reached" if ratio >= LEAST_RATIO else "missed"
    console.print(
        f"through the server at {ratio:.2f} of the engine's speed; {LEAST_RATIO} of it: {verdict}"
    )


@contextmanager
def _watch(model: Any) -> Iterator[list[float]]:
    """Notes the seconds of all requests to a model of lm-eval."""
    seconds = list[float]()

    def watched(method: Callable) -> Callable:
        def run(*arguments: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            answers = method(*arguments, **named)
            seconds.append(time.perf_counter() - begin)
            return answers

        return run

    for name in REQUESTS:
        setattr(model, name, watched(getattr(model, name)))
    yield seconds
    for name in REQUESTS:
        delattr(model, name)  # that of its class is there again
