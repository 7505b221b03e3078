"""Time and memory of conversions, each in turn with its limit.

A conversion is ``griffin-eval convert``, a separate process that reads, hashes, writes and syncs.
The limit of a plain conversion is ``cp`` and a sync of its source. The limit of a conversion that
merges an adapter or dequantises is a plain conversion of the tensors that it wrote. Memory is the
largest anonymous resident size (RssAnon): the system can reclaim pages of a mapped file.
"""

import itertools
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import typer

import griffin_eval
from benchmarks.convert import sources
from benchmarks.convert.peers import PEERS
from benchmarks.peers import left_out, why_absent
from benchmarks.timing import (
    Failed,
    anonymous_memory,
    how_it_ended,
    interleave,
    module_command,
    ratios,
)
from griffin_eval.config import PRESETS
from griffin_eval.converters.formats import FORMATS, refusals
from griffin_eval.layout import param_specs

MERGING, DEQUANTISING = 1.3, 2.5  # largest ratios to a plain conversion
TARGET = "griffin"  # format of merged and dequantised outputs
COLUMNS = (
    "seconds",
    "CPU seconds",
    "limit",
    "x limit",
    "at most",
    "memory, MB",
    "over tensor",
    "output, MB",
)


class Conversion(NamedTuple):
    """A conversion that is measured, from a source folder that ``write`` makes.

    Attributes:
        max_ratio: Largest ratio to a plain conversion; None if ``cp`` is the limit.
        peer: Key of `PEERS` if a library converts.
    """

    name: str
    source: str
    write: Callable[[Path], None]
    options: tuple[str, ...]
    max_ratio: float | None = None
    peer: str | None = None


class Run(NamedTuple):
    """Seconds and CPU seconds of a process, and its largest anonymous memory in bytes."""

    seconds: float
    cpu: float
    memory: int


def run(conversions: list[Conversion], directory: Path, rounds: int, pythons: list[str]) -> bool:
    """Measure conversions and print a row of each; return whether all of them succeeded.

    The sources are kept in the directory for the next time; ``pythons`` are interpreters whose
    ``griffin-eval`` converts.
    """
    typer.echo(f"medians of {rounds} interleaved rounds, and their range")
    for number, python in enumerate(pythons if len(pythons) > 1 else [], 1):
        typer.echo(f"python {number}: {python}")
    typer.echo(_row("conversion", *COLUMNS))
    succeeded = True
    for conversion in conversions:
        reason = conversion.peer and why_absent(*PEERS[conversion.peer].modules)
        if reason:
            typer.echo(left_out(conversion.name, reason))
            continue
        try:
            if not (directory / conversion.source).exists():
                conversion.write(directory / conversion.source)
            for row in _measure(conversion, directory, rounds, pythons):
                typer.echo(row)
        except Failed as error:
            typer.echo(f"{conversion.name}: failed: {error}")
            succeeded = False
        finally:
            for name in ("output", "plain"):
                shutil.rmtree(directory / name, ignore_errors=True)
    return succeeded


def conversions_between(
    preset: str, directory: Path, to: str | None, chunks: str | None
) -> Iterator[Conversion]:
    """Yield the conversions between all formats, or the one from the first format to ``to``."""
    names = [name for name, target in FORMATS.items() if not refusals(PRESETS[preset], target)]
    first = "griffin"

    def writes(name: str) -> Callable[[Path], None]:
        def write(folder: Path) -> None:
            if not (directory / first).exists():
                sources.write_model(preset, directory / first)
            if name != first:
                convert(sys.executable, directory / first, folder, "--to", name)

        return write

    if to is not None:
        options = ("--to", to, *(("--chunks", chunks) if chunks else ()))
        yield Conversion(f"{first} to {to}", first, writes(first), options)
        return
    for source, target in itertools.product(names, names):
        peers = [name for name, p in PEERS.items() if (p.source, p.target) == (source, target)]
        plain = Conversion(f"{source} to {target}", source, writes(source), ("--to", target))
        if source != target or peers:
            yield plain
        for peer in peers:
            yield plain._replace(name=f"{plain.name}, {peer}", peer=peer)


def conversions_with_limits(preset: str, directory: Path) -> Iterator[Conversion]:
    """Yield the conversions that merge an adapter or dequantise."""
    to, adapter = ("--to", TARGET), directory / "adapter"

    def base(folder: Path) -> None:
        sources.write_model(preset, folder)

    if not adapter.exists():
        sources.write_adapter(preset, adapter)
    merging = (*to, "--adapter", str(adapter))
    yield Conversion(f"LoRA of rank {sources.RANK}, merged", TARGET, base, merging, MERGING)
    if refusals(PRESETS[preset], FORMATS["hf"]):
        reason = f"their files are of the format hf, which cannot hold {preset}"
        typer.echo(left_out("each encoding of bitsandbytes and MLX", reason))
    else:
        for kind in sources.ENCODED:
            write = partial(sources.write_encoded, preset, kind)
            yield Conversion(f"{kind} dequantised", kind, write, to, DEQUANTISING)
    if reason := why_absent("gguf"):
        typer.echo(left_out("GGUF", reason))
        return
    for kind in sources.GGUF:
        write = partial(sources.write_gguf, preset, kind)
        yield Conversion(f"GGUF {kind} dequantised", f"gguf-{kind}", write, to, DEQUANTISING)


def convert(python: str, source: Path, destination: Path, *options: str) -> Run:
    """Run ``griffin-eval convert`` of an interpreter's environment."""
    program = Path(python).with_name("griffin-eval")
    return _run([program, "convert", source, destination, *options])


def _measure(
    conversion: Conversion, directory: Path, rounds: int, pythons: list[str]
) -> Iterator[str]:
    """Measure a conversion; yield a row for each interpreter, or the row of the peer."""
    source, output, plain = (directory / name for name in (conversion.source, "output", "plain"))
    for folder in (output, plain):
        shutil.rmtree(folder, ignore_errors=True)  # left by a run that was cut off

    def ours(python: str) -> Run:
        return convert(python, source, output, *conversion.options)

    def theirs() -> Run:
        arguments = conversion.peer or "", str(source.resolve()), str(output.resolve())
        return _run(module_command(sys.executable, "benchmarks.convert.peers", *arguments))

    turns: dict[str, Callable[[], Run]] = {"limit": partial(_copy, source, output)}
    if conversion.max_ratio is not None:
        convert(pythons[0], source, plain, *conversion.options)
        turns["limit"] = partial(convert, pythons[0], plain, output, "--to", TARGET)
    if conversion.peer:
        turns[conversion.name] = theirs
    for number, python in enumerate([] if conversion.peer else pythons, 1):
        label = f", python {number}" if len(pythons) > 1 else ""
        turns[conversion.name + label] = partial(ours, python)
    size = 0

    def measured(name: str) -> Run:
        nonlocal size
        os.sync()  # or this run would also write what earlier ones left in memory
        run = turns[name]()
        if name != "limit":
            size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
        shutil.rmtree(output)
        return run

    runs = interleave(rounds, {name: partial(measured, name) for name in turns})
    tensor = _largest_tensor(source if conversion.max_ratio is None else plain)
    limits = [each.seconds for each in runs.pop("limit")]
    for name, each in runs.items():
        seconds, memory = [one.seconds for one in each], max(one.memory for one in each)
        cpu = [one.cpu for one in each]
        yield _row(
            name,
            *map(_spread, (seconds, cpu, limits, ratios(seconds, limits))),
            "" if conversion.max_ratio is None else f"{conversion.max_ratio:g}",
            *(f"{memory / 1e6:.0f}", f"{(memory - tensor) / 1e6:+.0f}", f"{size / 1e6:.0f}"),
        )


def _run(command: Sequence[str | Path]) -> Run:
    with tempfile.TemporaryFile("w+") as errors:
        begin, cpu, memory = time.perf_counter(), _cpu_of_children(), 0
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            while process.poll() is None:
                memory = max(memory, anonymous_memory(process.pid))
                time.sleep(0.002)
        finally:
            process.kill()
            process.wait()
        seconds = time.perf_counter() - begin
        errors.seek(0)
        if process.returncode:
            raise Failed(how_it_ended("the conversion", process.returncode, errors.read()))
    return Run(seconds, _cpu_of_children() - cpu, memory)


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _copy(source: Path, destination: Path) -> Run:
    begin = time.perf_counter()
    subprocess.run(["cp", "-r", source, destination], check=True)
    for path in destination.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    return Run(time.perf_counter() - begin, 0, 0)


def _largest_tensor(folder: Path) -> int:
    """Return the bytes of the largest parameter of a checkpoint."""
    checkpoint = griffin_eval.open_checkpoint(folder)
    specs = param_specs(checkpoint.config)
    return max(
        specs[name].size * (4 if dtype == "float32" else 2)
        for name, dtype in checkpoint.dtypes.items()
    )


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def _row(what: str, *cells: str) -> str:
    widths = (20, 20, 20, 20, 9, 12, 12, 12)
    return what.ljust(44) + "".join(
        "  " + cell.rjust(width) for cell, width in zip(cells, widths, strict=True)
    )
