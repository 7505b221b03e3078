"""``make demo``: a checkpoint converted, evaluated in both frameworks, compared and drawn.

1. A checkpoint of this package is carried through every format and back, and stays the same.
2. The stock `lm_eval` runs it with ``--model griffin`` in PyTorch and in JAX; one table shows that
   they agree, request by request.
3. The other models of induction heads are run too, and `griffin-eval report` draws all of them.

``make demo FULL=1`` trains the checkpoint of step 1, merges an adapter into another and quantises
it, and evaluates two checkpoints on more tasks, with lm_eval's own ``--model hf`` as well. Its
report says too whether the frameworks agree.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from safetensors.numpy import save_file

import griffin_eval
from griffin_eval.checkpoints import folder as shipped

TOLERANCE = 1e-4  # of a log-likelihood, relative above 1 nat and absolute below
REPORT = Path("demo-report")
CHAIN = ("griffin", "deepmind-flax", "deepmind-torch", "hf")  # formats, converted in turn
TRAIN = ("train", "induction_heads", "--model", "griffin", "--length", "64")


class Part(NamedTuple):
    """Tasks of lm_eval and their metadata; ``samples`` is the demo's ``--samples``."""

    tasks: tuple[str, ...]
    metadata: dict[str, Any]


SMALL = {"induction_heads_griffin": Part(("griffin_induction_heads",), {"lengths": [64, 256]})}
FULL = {  # by the checkpoint of this package that they are for
    "induction_heads_griffin": Part(("griffin_induction_heads",), {"lengths": [64, 256, 1024]}),
    "bytes_griffin": Part(
        ("griffin_phonebook", "griffin_longctx_context"),
        {"entries": [4, 8, 16], "queries": 2, "contexts": [128, 512], "max_tokens": 4000},
    ),
}
CURVES = {  # the runs of the report, by label: the model of induction heads and its backend
    "griffin": ("griffin", "griffin torch"),
    "hawk": ("hawk", "griffin torch"),
    "mqa": ("mqa", "griffin torch"),
}
# hf stops at 2048 tokens unless told otherwise.
BACKENDS = {
    "griffin torch": ("griffin", "framework=torch,dtype=float32"),
    "griffin jax": ("griffin", "framework=jax,dtype=float32"),
    "hf": ("hf", "dtype=float32,max_length=8192"),
}


class Settings(NamedTuple):
    """What a demo shows: the parts by checkpoint, the backends, and lengths of the figure."""

    parts: dict[str, Part]
    backends: tuple[str, ...]
    lengths: tuple[int, ...]


def main() -> int:
    parser = argparse.ArgumentParser(description="Convert, evaluate, compare and draw.")
    parser.add_argument("--full", action="store_true", help="training, more tasks, and hf as well")
    parser.add_argument("--samples", type=int, default=8, help="documents of each length")
    parser.add_argument("--steps", type=int, default=60, help="steps of the training")
    arguments = parser.parse_args()
    settings = Settings(SMALL, tuple(BACKENDS)[:2], (64, 256, 1024))
    if arguments.full:
        settings = Settings(FULL, tuple(BACKENDS), tuple(2**n for n in range(6, 13)))
    console = Console(width=max(Console().width, 130))  # no column of the table is cut
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(2) as pool:
        folder = Path(temporary)
        sources = {}
        for name in settings.parts:
            sources[name] = folder / name
            griffin_eval.convert(shipped(name), sources[name], to="hf")
        evaluations = {
            pool.submit(evaluate, sources[name], backend, part, folder, arguments.samples): (
                name,
                backend,
            )
            for name, part in settings.parts.items()
            for backend in settings.backends
        }
        first = sources["induction_heads_griffin"]
        if arguments.full:
            first = folder / "trained"
            with progress(f"training for {arguments.steps} steps"):
                run("griffin-eval", *TRAIN, "--steps", arguments.steps, "--output", first)
        same = convert_in_turn(console, first, folder)
        if arguments.full:
            same = merge_adapter(console, sources["bytes_griffin"], folder) and same
            quantise(console, sources["bytes_griffin"], folder)
        results = collect(console, evaluations)
        curve = Part(("griffin_induction_heads",), {"lengths": list(settings.lengths)})
        drawn = {"griffin jax": ("griffin", "griffin jax")} if arguments.full else {}
        drawn = dict(sorted((drawn | CURVES).items(), key=lambda run: run[1]))
        curves = [
            pool.submit(
                evaluate,
                *(shipped(f"induction_heads_{model}"), backend, curve),
                *(folder / "curves", arguments.samples),
            )
            for model, backend in drawn.values()
        ]
        for name, part in settings.parts.items():
            table, agree = compare(name, part.tasks, results[name])
            console.print(table)
            same = same and agree
        count = {2: "Both", 3: "All three"}[len(settings.backends)]
        console.print(f"{count} agree." if same else "They do NOT agree.")
        draw(curves, folder / "curves", list(drawn))
    seconds = time.monotonic() - started
    console.print(f"{REPORT / 'report.html'} has the figures; {seconds:.0f} s in all")
    return 0 if same else 1


@contextmanager
def progress(what: str) -> Iterator[None]:
    """A line about long work on a terminal, nothing in a pipe."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


def convert_in_turn(console: Console, source: Path, folder: Path) -> bool:
    """Converts a checkpoint from format to format, a line each; whether the last is the first."""
    here = source
    for target in CHAIN:
        there = folder / f"converted-{target}"
        begin = time.monotonic()
        with progress(f"converting to {target}"):
            griffin_eval.convert(here, there, to=target)
        console.print(f"converted to {target:<16}{time.monotonic() - begin:6.1f} s")
        here = there
    comparison = griffin_eval.verify(source, here)
    same = comparison.compared - len(comparison.tensors)
    console.print(f"{same} of {comparison.compared} parameters are the same bit for bit")
    return comparison.same


def merge_adapter(console: Console, source: Path, folder: Path) -> bool:
    """Merges a random LoRA of one matrix; whether one parameter has changed."""
    module, rank, alpha = "model.layers.1.mlp_block.up_proj", 4, 8
    with safe_open(source / "model.safetensors", "np") as file:
        rows, columns = file.get_slice(f"{module}.weight").get_shape()
    random = np.random.default_rng(0)
    up = random.normal(size=(rows, rank)).astype(np.float32)
    down = random.normal(size=(rank, columns)).astype(np.float32)
    adapter, merged = folder / "adapter", folder / "merged"
    adapter.mkdir()
    name = f"base_model.model.{module}.lora"
    save_file(
        {f"{name}_A.weight": down, f"{name}_B.weight": up}, adapter / "adapter_model.safetensors"
    )
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": [module]}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    run("griffin-eval", "convert", source, merged, "--to", "hf", "--adapter", adapter)
    comparison = griffin_eval.verify(source, merged)
    changed = [difference.name for difference in comparison.tensors]
    console.print(
        f"merged a LoRA: of {comparison.compared} parameters, {', '.join(changed)} changed",
        soft_wrap=True,
    )
    return len(changed) == 1


def quantise(console: Console, source: Path, folder: Path) -> None:
    """Quantises a checkpoint, and says what that costs."""
    quantised = folder / "quantised"
    run("griffin-eval", "convert", source, quantised, "--to", "hf", "--quantize", "mlx-4")
    said = run("griffin-eval", "verify", source, quantised, "--logits", codes=(1,))  # they differ
    sizes = [(one / "model.safetensors").stat().st_size for one in (source, quantised)]
    distance = re.search(r"KL of the next token.* ([0-9.e-]+) nats in the mean", said)
    assert distance is not None
    console.print(
        f"quantised to 4 bits: {sizes[0] / 1000:.0f} kB became {sizes[1] / 1000:.0f}; the next "
        f"token's distribution is {distance[1]} nats away",
        soft_wrap=True,
    )


def collect(
    console: Console, evaluations: dict[Future, tuple[str, str]]
) -> dict[str, dict[str, Any]]:
    """The results by checkpoint and backend, each printed as a line when it comes."""
    results: dict[str, dict[str, Any]] = {}
    with progress("evaluating"):
        for future in as_completed(evaluations):
            name, backend = evaluations[future]
            tasks, seconds = future.result()
            results.setdefault(name, {})[backend] = tasks
            metrics = {m: value for values, _ in tasks.values() for m, value in values.items()}
            shown = ", ".join(f"{metric} {value:.3f}" for metric, value in metrics.items())
            console.print(f"{name}, {backend}: {shown} ({seconds:.1f} s)", soft_wrap=True)
    return {
        name: {backend: found[backend] for backend in BACKENDS if backend in found}
        for name, found in results.items()
    }


def draw(curves: list[Future], folder: Path, labels: list[str]) -> None:
    """The report on all models, once they are evaluated.

    Args:
        curves: the evaluations.
        folder: of their results.
        labels: of the runs, in the order of their folders.
    """
    with progress("evaluating the other models, drawing figures"):
        for future in curves:
            future.result()
        run(
            "griffin-eval",
            *("report", folder, "--labels", ",".join(labels), "--train-length", "256"),
            *("--output", REPORT, "--overwrite"),
        )


def evaluate(
    checkpoint: Path, backend: str, part: Part, folder: Path, samples: int
) -> tuple[dict[str, Any], float]:
    """Runs the stock command.

    Args:
        checkpoint: folder of the checkpoint.
        backend: a key of `BACKENDS`.
        part: tasks and their metadata.
        folder: folder for lm_eval's results.
        samples: documents of each length.

    Returns:
        By task its metrics and the answers to its requests, and seconds.
    """
    model, arguments = BACKENDS[backend]
    output = folder / f"{checkpoint.name}-{backend.replace(' ', '-')}"
    metadata = json.dumps(part.metadata | {"samples": samples})
    begin = time.monotonic()
    run(
        "lm_eval",
        *("--model", model, "--model_args", f"pretrained={checkpoint},{arguments}"),
        *("--tasks", ",".join(part.tasks), "--metadata", metadata),
        *("--batch_size", "1", "--device", "cpu", "--log_samples", "--output_path", output),
    )
    seconds = time.monotonic() - begin
    metrics = json.loads(next(output.rglob("results_*.json")).read_text())["results"]
    by_task: dict[str, Any] = {}
    for task in part.tasks:
        samples_file = next(output.rglob(f"samples_{task}_*.jsonl"))
        lines = map(json.loads, samples_file.read_text().splitlines())
        answers = [answer for line in lines for answer in _answers(line["resps"])]
        values = {
            name.removesuffix(",none"): value
            for name, value in metrics[task].items()
            if isinstance(value, float) and _is_headline(name.removesuffix(",none"))
        }
        by_task[task] = (values, answers)
    return by_task, seconds


def run(program: str, *arguments: Any, codes: tuple[int, ...] = (0,)) -> str:
    """What a command of this environment prints; its exit where its code is none of these."""
    words = [str(Path(sys.executable).with_name(program)), *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode not in codes:
        sys.exit(f"{done.stdout}{done.stderr}\n{program} failed: exit code {done.returncode}")
    return done.stdout


def _is_headline(metric: str) -> bool:
    """Whether a metric is shown: curves over the length are, without their bounds."""
    quantity, _, x = metric.partition("@")
    return quantity in ("accuracy", "exact_match", "bits_per_byte") and x.isdigit()


def _answers(responses: list[Any]) -> list[tuple[float | None, str]]:
    """The log-likelihood, if any, and the rest as text, of every request of a document."""
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
        answers = [by_task[task][1] for by_task in results.values()]
        differences, same = [], 0
        for request in zip(*answers, strict=True):
            same += len({text for _, text in request}) == 1
            numbers = [number for number, _ in request if number is not None]
            if numbers:
                differences.append((max(numbers) - min(numbers)) / max(1, abs(numbers[-1])))
        largest = max(differences, default=0.0)
        agree = agree and same == len(answers[0]) and largest <= TOLERANCE
        verdict = [f"{same}/{len(answers[0])}", f"{largest:.0e}" if differences else ""]
        metrics = [by_task[task][0] for by_task in results.values()]
        for row, metric in enumerate(metrics[0]):
            values = [each[metric] for each in metrics]
            agree = agree and max(values) - min(values) <= TOLERANCE
            cells = [f"{value:.4f}" for value in values]
            table.add_row("" if row else task, metric, *cells, *([] if row else verdict))
    return table, agree


if __name__ == "__main__":
    sys.exit(main())
