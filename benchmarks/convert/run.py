"""The time and memory of conversions, beside a copy of the same bytes.

Every measurement runs in a process of its own (`benchmarks.convert.conversions`). A conversion
reads, hashes, writes and syncs; the limit is ``cp`` and a sync of the source, taken in turn with
it. Memory is the largest anonymous resident size seen (RssAnon): pages of a mapped file are not
counted, since the system takes them back at will.
"""

import itertools
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from benchmarks.convert.sources import write_source
from benchmarks.peers import Absent, left_out
from benchmarks.timing import Failed, Job
from griffin_eval.config import PRESETS
from griffin_eval.converters.arrays.write import writing
from griffin_eval.converters.codecs.encode import ENCODINGS
from griffin_eval.converters.formats import FORMATS, check_expressible, refusals
from griffin_eval.converters.output.atomic import check_disk
from griffin_eval.converters.plan import check_chunked
from griffin_eval.errors import BadInput
from griffin_eval.layout import param_specs

WORKER = "benchmarks.convert.conversions"
OURS, QUANTISE = "convert", "quantise"
OUTPUT = "output"  # folder that a measured conversion writes


class Route(NamedTuple):
    """A conversion that is measured.

    Attributes:
        source: name of the format, or of the encoding, that is read.
        target: name of the format that is written, or of the encoding, in the format hf.
        peer: what converts, if not this package.
        way: a key of `benchmarks.convert.conversions.WAYS`.
    """

    source: str
    target: str
    peer: str = ""
    way: str = OURS

    def __str__(self) -> str:
        return f"{self.source} to {self.target}" + f", {self.peer}" * bool(self.peer)


# What people do without a converter.
PEERS = (
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
    check_disk((missing + 1) * nbytes, directory)
    largest = max(spec.size for spec in param_specs(config).values()) * 2
    console.print(f"{preset}, bfloat16, median of {rounds}; seconds, and memory and output in MB")
    heads = "time", "cp + sync", "x cp", "memory", "over tensor", "output"
    line(console, row("conversion", *heads))
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
                line(console, left_out(name, str(reason)))
        for route in _routes(written) if only is None else [Route(names[0], only)]:
            status.update(str(route))
            try:
                line(console, _measure_route(route, directory, rounds, largest, mesh))
            except Absent as reason:
                line(console, left_out(route.peer or str(route), str(reason)))
            except (Failed, BadInput) as error:
                line(console, row(str(route)) + f"failed: {error}")
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


def _write_model(preset: str, name: str, folder: Path, first: Path) -> None:
    """Writes the model in a format, if it is not there: the first by itself, others from it."""
    if folder.exists():
        return
    if folder == first:
        write_source(preset, name, folder)
    else:
        measure(OURS, first, folder, name)


def _measure_route(
    route: Route, directory: Path, rounds: int, largest: int, mesh: dict[str, int] | None
) -> str:
    """The row of a conversion; ``largest`` is the number of bytes of the largest tensor."""
    results, copies, size = [], [], 0
    source, output = directory / route.source, directory / OUTPUT
    for _ in range(rounds):
        copies.append(_copy(source, output))
        results.append(measure(route.way, source, output, route.target, mesh))
        size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
        shutil.rmtree(output)
    seconds = statistics.median(result["seconds"] for result in results)
    copy = statistics.median(copies)
    memory = max(result["bytes"] for result in results)
    figures = (f"{seconds:.2f}", f"{copy:.2f}", f"{seconds / copy:.2f}")
    figures += (f"{memory / 1e6:.0f}", f"{(memory - largest) / 1e6:+.0f}", f"{size / 1e6:.0f}")
    return row(str(route), *figures)


def line(console: Console, text: str) -> None:
    """Prints a line as it is."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def row(what: str, *cells: str) -> str:
    """A conversion and its figures."""
    return what.ljust(62) + "".join(cell.rjust(14) for cell in cells)


def measure(
    way: str, source: Path, destination: Path, target: str, mesh: dict[str, int] | None = None
) -> dict[str, float]:
    """Seconds and bytes of a conversion in a process of its own.

    Args:
        way: a key of `benchmarks.convert.conversions.WAYS`.
        source: folder to read.
        destination: folder to write.
        target: name of the format, or of the encoding, that is written.
        mesh: for whose devices that is written in chunks, if any.

    Raises:
        Absent: a library that it needs is missing or broken.
        ArgumentError: the conversion was refused.
        Failed: the process has ended.
    """
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
