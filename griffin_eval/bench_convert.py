"""How long conversions take and how much memory they need, beside a copy of the same bytes.

Every measurement runs in a process of its own. A conversion reads, hashes, writes and syncs; the
limit is ``cp`` and a sync of the source, taken in turn with it. Memory is the largest anonymous
resident size seen (RssAnon): pages of a mapped file are not counted, since the system takes them
back at will.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from griffin_eval.config import PRESETS
from griffin_eval.converters.formats import FORMATS, refusals
from griffin_eval.layout import param_specs

if TYPE_CHECKING:
    import numpy as np

_WATCH = """
import json, re, sys, threading, time

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

seen, busy = [], True

def watch():
    while busy:
        seen.append(anonymous())
        time.sleep(0.002)

threading.Thread(target=watch, daemon=True).start()
source, destination, target = sys.argv[1:]
begin = time.perf_counter()
"""
_OURS = """
from pathlib import Path
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.convert import convert, make_plan
from griffin_eval.converters.formats import FORMATS
convert(make_plan(Checkpoint(source), FORMATS[target]), Path(destination))
"""
# The usual way to an Orbax checkpoint: the whole model in memory, then Orbax's own save.
_STOCK_ORBAX = """
import os
import numpy as np
import orbax.checkpoint as ocp
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.naming import bind
from griffin_eval.converters.formats import FORMATS
checkpoint = Checkpoint(source)
tree = {}
for binding in bind(FORMATS[target].table, checkpoint.config):
    node, path = tree, binding.foreign.split("/")
    for key in path[:-1]:
        node = node.setdefault(key, {})
    parts = [checkpoint.numpy(spec.name) for spec in binding.canonical]
    node[path[-1]] = np.ascontiguousarray(binding.op.to_foreign(*parts))
ocp.PyTreeCheckpointer().save(destination, tree)
os.sync()
"""
_REPORT = """
print(json.dumps({"seconds": time.perf_counter() - begin, "bytes": max(seen)}))
"""


def run(console: Console, preset: str, directory: Path, rounds: int) -> None:
    """Makes a bfloat16 checkpoint of a preset's shapes, converts it every way, prints a table."""
    config = PRESETS[preset]
    names = [name for name, target in FORMATS.items() if not refusals(config, target)]
    directory.mkdir(parents=True, exist_ok=True)
    source = directory / names[0]
    if not source.exists():
        console.print(f"writing {preset} in bfloat16 to {source}")
        _write_source(preset, names[0], source)
    for name in names[1:]:
        if not (directory / name).exists():
            _measure(_OURS, source, directory / name, name)
    largest = max(spec.size for spec in param_specs(config).values()) * 2
    table = Table(title=f"{preset}, bfloat16, median of {rounds}")
    for heading in ("conversion", "seconds", "cp + sync", "ratio", "memory, MB", "over 1 tensor"):
        table.add_column(heading, justify="left" if heading == "conversion" else "right")
    routes = [(a, b, _OURS, "") for a in names for b in names if a != b]
    routes.append((names[0], "deepmind-flax", _STOCK_ORBAX, ", stock Orbax's save"))
    output = directory / "output"
    for a, b, code, remark in routes:
        if b not in names:
            continue
        results, copies = [], []
        for _ in range(rounds):
            copies.append(_copy(directory / a, output))
            results.append(_measure(code, directory / a, output, b))
            shutil.rmtree(output)
        seconds = statistics.median(r["seconds"] for r in results)
        copy = statistics.median(copies)
        memory = max(r["bytes"] for r in results)
        table.add_row(
            f"{a} to {b}{remark}",
            *(f"{seconds:.2f}", f"{copy:.2f}", f"{seconds / copy:.2f}"),
            *(f"{memory / 1e6:.0f}", f"{(memory - largest) / 1e6:+.0f}"),
        )
    console.print(table)


def _write_source(preset: str, target: str, folder: Path) -> None:
    import ml_dtypes
    import numpy as np

    from griffin_eval.converters.convert import config_json
    from griffin_eval.converters.safetensors_writer import SafetensorsWriter

    specs = param_specs(PRESETS[preset])
    rng = np.random.default_rng(0)

    def pieces(shape: tuple[int, ...]) -> Iterator["np.ndarray"]:
        rows = max(1, (32 << 20) // max(1, int(np.prod(shape[1:]))))
        for start in range(0, shape[0], rows):
            part = (min(rows, shape[0] - start), *shape[1:])
            yield rng.standard_normal(part, np.float32).astype(ml_dtypes.bfloat16)

    folder.mkdir()
    with SafetensorsWriter(folder, {n: (s.shape, "bfloat16") for n, s in specs.items()}) as writer:
        for name, spec in specs.items():
            writer.write(name, pieces(spec.shape))
    raw = config_json(PRESETS[preset], FORMATS[target], "bfloat16")
    (folder / "config.json").write_text(json.dumps(raw))


def _measure(code: str, source: Path, destination: Path, target: str) -> dict[str, float]:
    arguments = [str(source.resolve()), str(destination.resolve()), target]
    done = subprocess.run(
        [sys.executable, "-c", _WATCH + code + _REPORT, *arguments],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.strip().splitlines()[-1])


def _copy(source: Path, destination: Path) -> float:
    begin = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(destination)], check=True)
    for path in destination.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    seconds = time.perf_counter() - begin
    shutil.rmtree(destination)
    return seconds
