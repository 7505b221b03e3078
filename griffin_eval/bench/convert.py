"""The time and memory of conversions, beside a copy of the same bytes.

Every measurement runs in a process of its own (`griffin_eval.bench.conversions`). A conversion
reads, hashes, writes and syncs; the limit is ``cp`` and a sync of the source, taken in turn with
it. Memory is the largest anonymous resident size seen (RssAnon): pages of a mapped file are not
counted, since the system takes them back at will.
"""

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console

from griffin_eval.bench.conversions import ADAPTER
from griffin_eval.bench.peers import Absent, left_out
from griffin_eval.bench.timing import Failed, Job
from griffin_eval.config import PRESETS
from griffin_eval.converters.adapters.files import ADAPTER_CONFIG, ADAPTER_FILE
from griffin_eval.converters.arrays.write import writing
from griffin_eval.converters.codecs.encode import ENCODINGS
from griffin_eval.converters.formats import FORMATS, check_expressible, refusals
from griffin_eval.converters.output.atomic import SafeOutput, check_disk
from griffin_eval.converters.plan import check_chunked
from griffin_eval.errors import BadInput
from griffin_eval.layout import param_specs

if TYPE_CHECKING:
    import numpy as np

WORKER = "griffin_eval.bench.conversions"
OURS, QUANTISE = "convert", "quantise"
OUTPUT = "output"  # folder that a measured conversion writes
RANK = 16  # of the adapter that is merged


class Route(NamedTuple):
    """A conversion that is measured.

    Attributes:
        source: name of the format, or of the encoding, that is read.
        target: name of the format that is written, or of the encoding, in the format hf.
        peer: what converts, if not this package.
        way: a key of `griffin_eval.bench.conversions.WAYS`.
    """

    source: str
    target: str
    peer: str = ""
    way: str = OURS

    def __str__(self) -> str:
        return f"{self.source} to {self.target}" + f", {self.peer}" * bool(self.peer)


# What people do without a converter, and a conversion that merges an adapter.
PEERS = (
    Route("griffin", "griffin", f"a LoRA of rank {RANK} merged", "merge"),
    Route("hf", "deepmind-flax", "stock Orbax's save", "save_with_orbax"),
    Route("hf", "hf", "transformers' load and save", "save_with_transformers"),
    Route("deepmind-torch", "deepmind-torch", "torch.load and torch.save", "save_with_torch"),
)


def run(
    console: Console,
    preset: str,
    directory: Path,
    rounds: int,
    only: str | None = None,
    mesh: dict[str, int] | None = None,
) -> None:
    """Converts a bfloat16 checkpoint of a preset's shapes every way; a row as it is measured.

    Args:
        console: for the rows; what is being done stands on stderr, if that is a terminal.
        preset: name of the preset whose tensor shapes are used.
        directory: folder in which the checkpoint is written, in every format, and kept for the
            next time.
        rounds: measurements of each conversion, in turn with the copy of its source.
        only: name of the format to write, if only one way is measured, from the first format.
        mesh: for whose devices that is written in chunks, if any.

    Raises:
        BadInput: the directory cannot be written, or its disk is too small; the one format cannot
            hold the model, or has no chunks.
    """
    config = PRESETS[preset]
    names = [name for name, target in FORMATS.items() if not refusals(config, target)]
    if only is not None:
        check_expressible(config, FORMATS[only])
        if mesh is not None:
            check_chunked(FORMATS[only])
        names = names[:1]
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    nbytes = sum(spec.size for spec in param_specs(config).values()) * 2
    missing = sum(not (directory / name).exists() for name in names)
    quantised = 2 * ("hf" in names)  # all of them take less than two models
    check_disk((missing + 1 + quantised) * nbytes, directory)
    largest = max(spec.size for spec in param_specs(config).values()) * 2
    console.print(f"{preset}, bfloat16, median of {rounds}; seconds, and memory and output in MB")
    heads = "time", "cp + sync", "x cp", "memory", "over tensor", "output"
    _line(console, _row("conversion", *heads))
    shutil.rmtree(directory / OUTPUT, ignore_errors=True)  # of a run that was cut off
    failed = False
    with Console(stderr=True).status("") as status:
        written = []
        for name in names:
            status.update(f"writing the model as {name}")
            try:
                _write_model(preset, name, directory / name, directory / names[0])
                written.append(name)
            except Absent as reason:
                _line(console, left_out(name, str(reason)))
        for name in ENCODINGS if "hf" in written and only is None else ():
            status.update(f"writing the model as {name}")
            if not (directory / name).exists():
                _measure(QUANTISE, directory / names[0], directory / name, name)
        if only is None:
            _write_adapter(preset, directory / ADAPTER)
        for route in _routes(written) if only is None else [Route(names[0], only)]:
            status.update(str(route))
            try:
                _line(console, _measure_route(route, directory, rounds, largest, mesh))
            except Absent as reason:
                _line(console, left_out(route.peer or str(route), str(reason)))
            except (Failed, BadInput) as error:
                _line(console, _row(str(route)) + f"failed: {error}")
                failed = True
            finally:
                shutil.rmtree(directory / OUTPUT, ignore_errors=True)
    if failed:
        sys.exit(1)


def _routes(names: list[str]) -> Iterator[Route]:
    for source, target in itertools.product(names, names):
        peers = [peer for peer in PEERS if (peer.source, peer.target) == (source, target)]
        if source != target or peers:
            yield Route(source, target)
        yield from peers
    for name in ENCODINGS if "hf" in names else ():
        yield Route(names[0], name, way=QUANTISE)
        yield Route(name, "hf")


def _write_model(preset: str, name: str, folder: Path, first: Path) -> None:
    """Writes the model in a format, if it is not there: the first by itself, others from it."""
    if folder.exists():
        return
    if folder == first:
        _write_source(preset, name, folder)
    else:
        _measure(OURS, first, folder, name)


def _measure_route(
    route: Route, directory: Path, rounds: int, largest: int, mesh: dict[str, int] | None
) -> str:
    """The row of a conversion; ``largest`` is the number of bytes of the largest tensor."""
    results, copies, size = [], [], 0
    source, output = directory / route.source, directory / OUTPUT
    for _ in range(rounds):
        copies.append(_copy(source, output))
        results.append(_measure(route.way, source, output, route.target, mesh))
        size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
        shutil.rmtree(output)
    seconds = statistics.median(result["seconds"] for result in results)
    copy = statistics.median(copies)
    memory = max(result["bytes"] for result in results)
    figures = (f"{seconds:.2f}", f"{copy:.2f}", f"{seconds / copy:.2f}")
    figures += (f"{memory / 1e6:.0f}", f"{(memory - largest) / 1e6:+.0f}", f"{size / 1e6:.0f}")
    return _row(str(route), *figures)


def _line(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _row(what: str, *cells: str) -> str:
    return what.ljust(62) + "".join(cell.rjust(14) for cell in cells)


def _write_source(preset: str, target: str, folder: Path) -> None:
    import ml_dtypes
    import numpy as np

    from griffin_eval.converters.configs.own import config_json
    from griffin_eval.converters.containers.safetensors.writer import SafetensorsWriter

    specs = param_specs(PRESETS[preset])
    rng = np.random.default_rng(0)

    def pieces(shape: tuple[int, ...]) -> Iterator["np.ndarray"]:
        rows = max(1, (32 << 20) // max(1, int(np.prod(shape[1:]))))
        for start in range(0, shape[0], rows):
            part = (min(rows, shape[0] - start), *shape[1:])
            yield rng.standard_normal(part, np.float32).astype(ml_dtypes.bfloat16)

    with SafeOutput(folder) as new:
        with SafetensorsWriter(new, {n: (s.shape, "bfloat16") for n, s in specs.items()}) as writer:
            for name, spec in specs.items():
                writer.write(name, pieces(spec.shape))
        raw = config_json(PRESETS[preset], FORMATS[target], "bfloat16")
        (new / "config.json").write_text(json.dumps(raw))


def _write_adapter(preset: str, folder: Path) -> None:
    """Writes a LoRA of every linear map, if it is not there."""
    if folder.exists():
        return
    import numpy as np
    from safetensors.numpy import save_file

    rng, state = np.random.default_rng(0), {}
    for name, spec in param_specs(PRESETS[preset]).items():
        if name.endswith(".weight") and len(spec.shape) == 2 and "vocab" not in spec.axes:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            for part, shape in (("A", (RANK, spec.shape[1])), ("B", (spec.shape[0], RANK))):
                state[f"{module}.lora_{part}.weight"] = rng.standard_normal(shape, np.float32)
    with SafeOutput(folder) as new:
        save_file(state, new / ADAPTER_FILE)
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK / 100}
        (new / ADAPTER_CONFIG).write_text(json.dumps(config))


def _measure(
    way: str, source: Path, destination: Path, target: str, mesh: dict[str, int] | None = None
) -> dict[str, float]:
    arguments = {"source": source, "destination": destination}
    with Job(WORKER) as job:
        paths = {name: str(path.resolve()) for name, path in arguments.items()}
        return job.ask("measure", way=way, target=target, mesh=mesh, **paths)


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
