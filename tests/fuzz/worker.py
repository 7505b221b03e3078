"""Fuzz one target in this process, guided by the coverage of griffin_eval (see `run.py`)."""

import hashlib
import json
import logging
import mmap
import random
import resource
import struct
import sys
import traceback
from pathlib import Path

import atheris

MEMORY = 2 << 30  # bytes, in addition to the libraries' memory

with atheris.instrument_imports(include=["griffin_eval", "zipfile", "tomllib"]):
    from targets import Box

import mutations  # noqa: E402
from targets import TARGETS  # noqa: E402


class Worker:
    """A runner of cases that counts them and keeps failing ones.

    Args:
        name: Name of the target.
        seeds: Folder of all seeds.
        work: Empty working folder. Its file ``count`` holds the number of cases that have run.
        keep: Folder for failing cases.
    """

    def __init__(self, name: str, seeds: Path, work: Path, keep: Path):
        self.name, self.keep = name, keep
        (work / "box").mkdir()
        self.box = Box(name, seeds / name, work / "box")
        self.seen: set[str] = set()
        with open(work / "count", "w+b") as handle:
            handle.write(bytes(8))
            handle.flush()
            self.count = mmap.mmap(handle.fileno(), 8)

    def run(self, case: bytes) -> None:
        (count,) = struct.unpack("<Q", self.count)
        self.count[:] = struct.pack("<Q", count + 1)
        try:
            self.box.run(case or b"\0")
        except (Exception, SystemExit) as error:
            self.note(case or b"\0", error)

    def note(self, case: bytes, error: BaseException) -> None:
        """Keep a case that fails in a new way, with its traceback."""
        frames = traceback.extract_tb(error.__traceback__)
        ours = [f for f in frames if "fuzz" not in f.filename or "targets" in f.filename]
        where = [f"{f.filename}:{f.lineno}" for f in ours[-3:]]
        kind = f"{type(error).__name__} {where}"
        if kind in self.seen:
            return
        self.seen.add(kind)
        path = self.keep / f"{self.name}-{hashlib.sha256(case).hexdigest()[:12]}"
        path.write_bytes(case)
        text = "".join(traceback.format_exception(error))
        path.with_suffix(".txt").write_text(f"{self.box.file(case)}\n{text}", errors="replace")

    def mutate(self, case: bytes, max_size: int, seed: int) -> bytes:
        draw = random.Random(seed)
        case = case or b"\0"
        if draw.random() < 0.1 and len(self.box.files) > 1:  # switch to another file
            case = draw.choice(self.box.seeds())

        def blind(content: bytes) -> bytes:
            return atheris.Mutate(content, max_size - 1)

        name = str(self.box.file(case))
        return (case[:1] + mutations.mutate(name, case[1:], draw, blind))[:max_size]


def main() -> None:
    arguments = json.loads(sys.argv[1])
    assert arguments["target"] in TARGETS
    logging.disable(logging.CRITICAL)
    work = Path(arguments["work"])
    worker = Worker(arguments["target"], Path(arguments["seeds"]), work, Path(arguments["keep"]))
    for case in worker.box.seeds():  # also triggers late imports
        worker.box.run(case)
    if "case" in arguments:
        worker.box.run(Path(arguments["case"]).read_bytes())
        return
    corpus = work / "corpus"
    corpus.mkdir()
    for number, case in enumerate(worker.box.seeds()):
        (corpus / str(number)).write_bytes(case)
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, resource.RLIM_INFINITY))
    flags = [
        *(f"-seed={arguments['seed']}", "-timeout=10", "-rss_limit_mb=0", "-max_len=200000"),
        *("-len_control=0", "-handle_int=0", "-reload=0", "-verbosity=0"),
        f"-artifact_prefix={arguments['keep']}/{worker.name}-",
    ]
    if "runs" in arguments:
        flags.append(f"-runs={arguments['runs']}")
    if "seconds" in arguments:
        flags.append(f"-max_total_time={arguments['seconds']}")
    atheris.Setup([sys.argv[0], *flags, str(corpus)], worker.run, custom_mutator=worker.mutate)
    atheris.Fuzz()


main()
