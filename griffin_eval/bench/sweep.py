"""`griffin-eval sweep` over checkpoints, beside one lm_eval command for each of them.

What a sweep should take at most is what one command takes, and 1.1 times the model's time for each
of the other checkpoints. Commands and sweeps are processes of their own, and take turns.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import track
from rich.table import Table

from griffin_eval.bench.timing import Failed

MODEL_TIMES = 1.1  # that a further checkpoint should take at most


def run(
    console: Console,
    checkpoint: Path,
    tasks: str,
    limit: int,
    framework: str,
    checkpoints: int,
    rounds: int,
) -> None:
    """Measures and prints.

    Args:
        console: to print on.
        checkpoint: a folder, of which there will be copies.
        tasks: as lm_eval takes them.
        limit: documents of each task.
        framework: ``torch`` or ``jax``.
        checkpoints: how many copies the sweep evaluates.
        rounds: of both measurements.

    Raises:
        Failed: a command ended with an error.
    """
    asked = ["--tasks", tasks, "--limit", str(limit)]
    command, sweep, model = list[float](), list[float](), list[float]()
    with tempfile.TemporaryDirectory() as root:
        folders = [Path(root) / f"step{number}" for number in range(checkpoints)]
        for folder in folders:
            shutil.copytree(checkpoint, folder)
        names = [str(folder) for folder in folders]
        own = f"pretrained={folders[0]},framework={framework}"
        main = "from griffin_eval.cli.main import main; main()"
        for number in track(
            range(rounds + 1), "rounds", console=console, disable=not console.is_terminal
        ):
            once, many = (Path(root) / f"{kind}{number}" for kind in ("command", "sweep"))
            took = _seconds(
                *("-m", "lm_eval", "--model", "griffin", "--model_args", own),
                *(*asked, "--output_path", str(once)),
            )
            took_sweep = _seconds(
                *("-c", main, "sweep", *names, "-o", str(many)),
                *("--model_args", f"framework={framework}", *asked),
            )
            (seconds,), others = _model_seconds(once), _model_seconds(many)
            if number == 0:  # which may compile
                continue
            command.append(took)
            sweep.append(took_sweep)
            model.append(median([seconds, *others]))
    table = Table(title=f"{checkpoints} checkpoints, {limit} documents of each of {tasks}")
    for heading in ("seconds", "median", "range"):
        table.add_column(heading, justify="left" if heading == "seconds" else "right")
    for name, values in (
        ("one command", command),
        ("model's time for one checkpoint", model),
        ("sweep", sweep),
    ):
        table.add_row(name, f"{median(values):.3g}", f"{min(values):.3g}-{max(values):.3g}")
    console.print(table)
    most = median(command) + MODEL_TIMES * (checkpoints - 1) * median(model)
    took = median(sweep)
    console.print(
        f"sweep: {took:.3g} s; one command and {MODEL_TIMES} times the model's time for "
        f"{checkpoints - 1} more: {most:.3g} s, {took / most:.2f} of it: "
        f"{'held' if took <= most else 'exceeded'}; {checkpoints} commands take "
        f"{checkpoints * median(command) / took:.1f} times as long"
    )


def _seconds(*arguments: str) -> float:
    """Seconds of a command of this Python."""
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-P", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise Failed(done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}")
    return time.perf_counter() - begin


def _model_seconds(folder: Path) -> list[float]:
    """Of the model, in each of the results in a folder."""
    results = [json.loads(path.read_text()) for path in sorted(folder.rglob("results_*.json"))]
    return [result["config"]["griffin_seconds"] for result in results]
