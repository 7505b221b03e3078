"""``make demo``: from a training to figures, on weights that have learnt something.

1. A short training writes an Orbax checkpoint, which is carried through every format and back.
2. The stock `lm_eval` runs two checkpoints of this package with ``--model griffin`` in PyTorch and
   in JAX and with ``--model hf``; one table shows that they agree, request by request.
3. The other models of induction heads are run too, and `griffin-eval report` draws all of them.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from griffin_eval.checkpoints import folder as shipped

TOLERANCE = 1e-4  # of a log-likelihood, relative above 1 nat and absolute below


class Part(NamedTuple):
    """Tasks of lm_eval and their metadata; ``samples`` is the demo's ``--samples``."""

    tasks: tuple[str, ...]
    metadata: dict[str, Any]


PARTS = {  # by the checkpoint of this package that they are for
    "induction_heads_griffin": Part(("griffin_induction_heads",), {"lengths": [64, 256, 1024]}),
    "bytes_griffin": Part(
        ("griffin_phonebook", "griffin_longctx_context"),
        {"entries": [4, 8, 16], "queries": 2, "contexts": [128, 512], "max_tokens": 4000},
    ),
}
CURVES = Part(("griffin_induction_heads",), {"lengths": [2**n for n in range(6, 13)]})
MODELS = ("griffin", "hawk", "mqa")
# hf stops at 2048 tokens unless told otherwise.
BACKENDS = {
    "griffin torch": ("griffin", "framework=torch,dtype=float32"),
    "griffin jax": ("griffin", "framework=jax,dtype=float32"),
    "hf": ("hf", "dtype=float32,max_length=8192"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Train, convert, evaluate, compare and draw.")
    parser.add_argument("--samples", type=int, default=8, help="documents of each length")
    parser.add_argument("--steps", type=int, default=60, help="of the training")
    arguments = parser.parse_args()
    console = Console(width=max(Console().width, 130))  # no column of the table is cut
    report = Path("demo-report")
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(2) as pool:
        folder = Path(temporary)
        started = time.monotonic()
        carry_through(console, folder, arguments.steps)

        def start(title: str, checkpoint: Path, part: Part, output: Path):
            return pool.submit(
                evaluate, console, title, checkpoint, part, output, arguments.samples
            )

        waiting = {}
        for name, part in PARTS.items():
            checkpoint = folder / name
            run(console, "griffin-eval", "convert", shipped(name), checkpoint, "--to", "hf")
            waiting[name] = {title: start(title, checkpoint, part, folder) for title in BACKENDS}
        curves = [
            start("griffin torch", shipped(f"induction_heads_{model}"), CURVES, folder / "curves")
            for model in MODELS
        ]
        compared = [
            compare(
                name, PARTS[name].tasks, {title: done.result() for title, done in found.items()}
            )
            for name, found in waiting.items()
        ]
        for done in curves:
            done.result()
        run(
            console,
            "griffin-eval",
            *("report", folder / "curves", "--labels", ",".join(MODELS), "--train-length", "256"),
            *("--output", report, "--overwrite"),
        )
    for table, _ in compared:
        console.print(table)
    agree = all(same for _, same in compared)
    console.print("All three agree." if agree else "They do NOT agree.")
    console.print(
        f"{report / 'report.html'} has the figures; {time.monotonic() - started:.0f} s in all"
    )
    return 0 if agree else 1


def carry_through(console: Console, folder: Path, steps: int) -> None:
    """Trains for a moment, converts what training wrote to each format in turn, and verifies that
    the last holds the same numbers as the first."""
    first = folder / "trained"
    training = ("train", "induction_heads", "--model", "griffin", "--length", "64")
    run(console, "griffin-eval", *training, "--steps", steps, "--output", first)
    here = first
    for target in ("griffin", "deepmind-flax", "deepmind-torch", "hf"):
        there = folder / f"trained-{target}"
        run(console, "griffin-eval", "convert", here, there, "--to", target)
        here = there
    run(console, "griffin-eval", "verify", first, here)


def evaluate(
    console: Console, title: str, checkpoint: Path, part: Part, folder: Path, samples: int
) -> dict[str, Any]:
    """Runs the stock command; gives for every task its metrics and the answers to its requests."""
    model, arguments = BACKENDS[title]
    output = folder / f"{checkpoint.name}-{title.replace(' ', '-')}"
    metadata = json.dumps(part.metadata | {"samples": samples})
    run(
        console,
        "lm_eval",
        *("--model", model, "--model_args", f"pretrained={checkpoint},{arguments}"),
        *("--tasks", ",".join(part.tasks), "--metadata", metadata),
        *("--batch_size", "1", "--device", "cpu", "--log_samples", "--output_path", output),
    )
    metrics = json.loads(next(output.rglob("results_*.json")).read_text())["results"]
    found: dict[str, Any] = {}
    for task in part.tasks:
        samples_file = next(output.rglob(f"samples_{task}_*.jsonl"))
        lines = map(json.loads, samples_file.read_text().splitlines())
        answers = [answer for line in lines for answer in _answers(line["resps"])]
        values = {
            name.removesuffix(",none"): value
            for name, value in metrics[task].items()
            if isinstance(value, float) and _is_headline(name.removesuffix(",none"))
        }
        found[task] = (values, answers)
    return found


def run(console: Console, program: str, *arguments: Any) -> None:
    """Prints a command and runs it; its own words only if it fails."""
    words = [program, *map(str, arguments)]
    console.print("$ " + shlex.join(words), soft_wrap=True, highlight=False)
    done = subprocess.run(
        [str(Path(sys.executable).with_name(program)), *words[1:]], capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\n{program} failed: exit code {done.returncode}")


def _is_headline(metric: str) -> bool:
    """Whether it is shown: curves over the length, without their bounds."""
    quantity, _, x = metric.partition("@")
    return quantity in ("accuracy", "exact_match", "bits_per_byte") and x.isdigit()


def _answers(responses: list[Any]) -> list[tuple[float | None, str]]:
    """Of every request of a document: its log-likelihood, if it has one, and the rest as text."""
    return [
        (float(response[0]), f"greedy {response[1]}")
        if isinstance(response, list)
        else (None, str(response))
        for (response,) in responses
    ]


def compare(
    name: str, tasks: tuple[str, ...], results: dict[str, dict[str, Any]]
) -> tuple[Table, bool]:
    """The table of metrics, and whether all agree.

    Its last two columns compare the requests of a task one by one: how many greedy flags or texts
    are the same in all of them, and the largest difference of a log-likelihood (relative to it, or
    absolute below 1 nat).
    """
    table = Table(title=name)
    for heading in ("task", "metric"):
        table.add_column(heading, no_wrap=True)
    for heading in (*results, "same answers", "largest difference"):
        table.add_column(heading, justify="right", no_wrap=True)
    agree = True
    for task in tasks:
        answers = [found[task][1] for found in results.values()]
        differences, same = [], 0
        for request in zip(*answers, strict=True):
            same += len({text for _, text in request}) == 1
            numbers = [number for number, _ in request if number is not None]
            if numbers:
                differences.append((max(numbers) - min(numbers)) / max(1, abs(numbers[-1])))
        largest = max(differences, default=0.0)
        agree = agree and same == len(answers[0]) and largest <= TOLERANCE
        verdict = [f"{same}/{len(answers[0])}", f"{largest:.0e}" if differences else ""]
        metrics = [found[task][0] for found in results.values()]
        for row, metric in enumerate(metrics[0]):
            values = [each[metric] for each in metrics]
            agree = agree and max(values) - min(values) <= TOLERANCE
            cells = [f"{value:.4f}" for value in values]
            table.add_row("" if row else task, metric, *cells, *([] if row else verdict))
    return table, agree


if __name__ == "__main__":
    sys.exit(main())
