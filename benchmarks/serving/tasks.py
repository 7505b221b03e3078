"""A task of lm-eval against `griffin-eval serve`, through lm-eval's own client, and the engine.

Both are runs of the stock ``lm_eval``: with ``--model local-completions`` and with ``--model
griffin``. Only requests are timed, not the building of tasks and the loading of models. They take
turns, and each run has a new server, since a server caches what it has read.
"""

from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.commands import Interpreter, tell
from benchmarks.evaluation.lm_eval_runs import Run, run_lm_eval
from benchmarks.report import Report
from benchmarks.serving.clients import COMPLETIONS, own_server, served
from benchmarks.timing import interleave, ratios
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.source.companions import tokenizer_folder
from griffin_eval.converters.source.resolve import resolve
from griffin_eval.text.load import load_tokenizer
from griffin_eval.text.tokenizer import default_add_bos

MIN_RATIO = 0.8  # smallest ratio of the server's speed to the engine's
_ANY_LENGTH = 10_000_000  # tokens of a prompt that the client does not cut


@dataclass
class Bench:
    """A run of the benchmark."""

    checkpoint: str
    framework: str
    dtype: str
    clients: int  # requests at a time
    task: str
    tasks_path: str | None
    limit: int  # documents of each task
    pythons: list[Interpreter]

    def run(self, rounds: int, report: Report) -> None:
        """Measure; Failed if a server ended, or did not answer."""
        with closing(Checkpoint(resolve(self.checkpoint))) as opened:
            folder = tokenizer_folder(opened.folder)
            add_bos = default_add_bos(load_tokenizer(folder), opened.config)
            client = {"tokenizer": folder, "add_bos_token": add_bos}
        measurements = {}
        for python in self.pythons:
            measurements["engine", python] = partial(self._engine, python)
            measurements["server", python] = partial(self._server, python, client)
        interleave(1, measurements)  # The first runs may compile.
        results = interleave(rounds, measurements, tell)
        rows = []
        for python in self.pythons:
            engine, server = results["engine", python], results["server", python]
            speed = ratios(_seconds(engine), _seconds(server))
            for name, runs, ratio in (("engine", engine, None), ("serve", server, speed)):
                row = {"implementation": python.named(name), "seconds": _seconds(runs)}
                rows.append(row | {"engine / server": ratio} | runs[0].metrics)
            middle = sorted(speed)[len(speed) // 2]
            verdict = "reached" if middle >= MIN_RATIO else "missed"
            speeds = f"{middle:.2f} of the engine's speed; {MIN_RATIO} of it: {verdict}"
            report.notes.append(f"{python.named('serve')}: {speeds}")
        title = f"{self.limit} documents of {self.task}, {self.clients} clients"
        report.tables[title] = rows

    def _engine(self, python: Interpreter) -> Run:
        arguments = {"pretrained": self.checkpoint, "dtype": self.dtype}
        return self._run(python, "griffin", arguments | {"framework": self.framework})

    def _server(self, python: Interpreter, client: dict[str, Any]) -> Run:
        command = own_server(python.path, self.checkpoint, self.framework, self.dtype)
        with served(command) as port:
            arguments = {
                "base_url": f"http://127.0.0.1:{port}{COMPLETIONS}",
                "model": self.checkpoint,
                "num_concurrent": self.clients,
                "tokenizer_backend": "huggingface",
                "max_length": _ANY_LENGTH,
            }
            return self._run(python, "local-completions", arguments | client)

    def _run(self, python: Interpreter, model: str, arguments: dict[str, Any]) -> Run:
        options = ["--tasks", self.task, "--limit", str(self.limit)]
        options += ["--include_path", self.tasks_path] if self.tasks_path else []
        return run_lm_eval(python.path, model, arguments, *options)


def _seconds(runs: list[Run]) -> list[float]:
    return [run.model_seconds for run in runs]
