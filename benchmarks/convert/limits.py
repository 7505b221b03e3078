"""Conversions that merge an adapter or dequantise, beside a plain one of as many output bytes.

The plain conversion reads what the other one wrote, the same tensors in the same dtypes, and writes
them once more. Both take turns, each in a process of its own, and the time of one is divided by
that of the other one in the same round.
"""

import shutil
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from benchmarks.convert.conversions import ADAPTER
from benchmarks.convert.run import OUTPUT, QUANTISE, line, measure
from benchmarks.convert.sources import (
    RANK,
    write_adapter,
    write_fp4,
    write_gguf,
    write_source,
)
from benchmarks.peers import Absent, left_out
from benchmarks.timing import Failed
from griffin_eval.config import PRESETS
from griffin_eval.converters.arrays.write import writing
from griffin_eval.converters.codecs.encode import ENCODINGS
from griffin_eval.converters.containers.safetensors.reader import SafetensorsFolder
from griffin_eval.converters.formats import FORMATS, refusals
from griffin_eval.converters.output.atomic import check_disk
from griffin_eval.errors import BadInput
from griffin_eval.layout import param_specs

MERGING, DEQUANTISING = 1.3, 2.5  # times the plain conversion, at most
MEMORY = 400 * 10**6  # bytes beside the largest tensor that is written, at most
TARGET = "griffin"
PLAIN = "plain"  # folder of what the plain conversion reads
GGUF = ("F16", "BF16", "Q8_0", "Q4_0", "Q5_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


class Limited(NamedTuple):
    """A conversion that has a limit.

    Attributes:
        what: the conversion in words.
        source: name of the folder that is read.
        write: writes that folder.
        way: a key of `benchmarks.convert.conversions.WAYS`.
        limit: times the plain conversion that it takes at most.
    """

    what: str
    source: str
    write: Callable[[Path], None]
    way: str = "convert"
    limit: float = DEQUANTISING


def run(console: Console, preset: str, directory: Path, rounds: int) -> None:
    """Measures and prints; a row as it is measured.

    Args:
        console: for the rows; what is being done stands on stderr, if that is a terminal.
        preset: name of the preset whose tensor shapes are used.
        directory: folder in which the sources are written, and kept for the next time.
        rounds: measurements of each conversion, in turn with the plain one.

    Raises:
        BadInput: the directory cannot be written, or its disk is too small.
    """
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    # The largest are what is dequantised to float32, to be read and to be written, and its source.
    check_disk(sum(spec.size for spec in param_specs(PRESETS[preset]).values()) * 10, directory)
    console.print(f"{preset}; seconds, medians of {rounds} and their range; memory in MB")
    heads = "time", "plain", "x plain", "at most", "over tensor", "at most"
    line(console, _row("conversion", *heads))
    if not _has_encodings(preset):
        reason = f"their files are of the format hf, which cannot hold {preset}"
        line(console, left_out("each encoding of bitsandbytes and MLX", reason))
    failed = False
    with Console(stderr=True).status("") as status:
        for each in _limited(preset, directory):
            status.update(each.what)
            try:
                if not (directory / each.source).exists():
                    each.write(directory / each.source)
                line(console, _measure_limited(each, directory, rounds))
            except Absent as reason:
                line(console, left_out(each.what, str(reason)))
            except (Failed, BadInput) as error:
                line(console, f"{each.what}: failed: {error}")
                failed = True
            finally:
                for name in (OUTPUT, PLAIN):
                    shutil.rmtree(directory / name, ignore_errors=True)
    if failed:
        sys.exit(1)


def _has_encodings(preset: str) -> bool:
    return not refusals(PRESETS[preset], FORMATS["hf"])


def _limited(preset: str, directory: Path) -> Iterator[Limited]:
    """What is measured."""

    def model(folder: Path) -> None:
        write_source(preset, TARGET, folder)

    def base(folder: Path) -> None:
        write_adapter(preset, directory / ADAPTER)
        if not folder.exists():
            model(folder)

    def encoded(folder: Path) -> None:
        base(directory / TARGET)
        measure(QUANTISE, directory / TARGET, folder, folder.name)

    def fp4(folder: Path) -> None:
        if not (directory / "bnb-nf4").exists():
            encoded(directory / "bnb-nf4")
        write_fp4(directory / "bnb-nf4", folder)

    def gguf(folder: Path) -> None:
        write_gguf(preset, folder.name.removeprefix("gguf-"), folder)

    yield Limited(f"a LoRA of rank {RANK} merged", TARGET, base, "merge", MERGING)
    if _has_encodings(preset):
        yield from (Limited(f"{name} dequantised", name, encoded) for name in ENCODINGS)
        yield Limited("bnb-fp4 dequantised", "bnb-fp4", fp4)
    for kind in GGUF:
        yield Limited(f"GGUF {kind} dequantised", f"gguf-{kind}", gguf)


def _measure_limited(each: Limited, directory: Path, rounds: int) -> str:
    """The row of a conversion."""
    source, plain, output = directory / each.source, directory / PLAIN, directory / OUTPUT
    shutil.rmtree(plain, ignore_errors=True)  # of a run that was cut off
    measure(each.way, source, plain, TARGET)
    with SafetensorsFolder(plain) as written:
        largest = max(tensor.nbytes for tensor in written.tensors.values())
    own, others, memory = list[float](), list[float](), 0.0
    for number in range(rounds):
        turns = [(each.way, source, own), ("convert", plain, others)]
        for way, folder, seconds in turns[:: 1 if number % 2 else -1]:
            shutil.rmtree(output, ignore_errors=True)
            result = measure(way, folder, output, TARGET)
            seconds.append(result["seconds"])
            if folder is source:
                memory = max(memory, result["bytes"])
    times = [mine / theirs for mine, theirs in zip(own, others, strict=True)]
    return _row(
        each.what,
        *(_spread(values) for values in (own, others, times)),
        *(f"{each.limit:g}", f"{(memory - largest) / 1e6:+.0f}", f"{MEMORY / 1e6:.0f}"),
    )


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def _row(what: str, *cells: str) -> str:
    return what.ljust(24) + "".join(cell.rjust(21) for cell in cells)
