"""Fail each system call that a conversion makes, one call a run.

    make faults                  # every call of every pair of containers: hours
    make faults SAMPLE=20        # twenty calls for each pair and fault

A conversion of a tiny checkpoint runs again and again. In each run the n-th call on its files
fails: the disk is full and stays full, the device has an error, access is denied, only half is
written or read, the process is killed, or the power is lost together with all data not yet synced.
Afterwards the destination must be absent, the old checkpoint, or the whole new one. Leftovers
beside it are allowed only if the next run completes them, and the error must be one sentence with
the file and the reason. `faults.c` works below Python, so calls of libraries fail as well.
"""

import argparse
import ctypes
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
OPEN, CREATE, READ, WRITE, SYNC, NAME, MAP, LOOK = (1 << i for i in range(8))  # flags of faults.c
KILL, SHORT = -1, -2
CHANGES = CREATE | WRITE | SYNC | NAME


class Fault(NamedTuple):
    """A way in which a system call fails.

    Attributes:
        calls: Flags of the kinds of calls that can fail so.
        code: An errno, KILL or SHORT.
        stays: Whether all later calls fail, too.
        power: Whether data that were not synced are lost.
    """

    calls: int
    code: int
    stays: bool = False
    power: bool = False


FAULTS = {
    "disk full": Fault(CREATE | WRITE | SYNC, errno.ENOSPC, stays=True),
    "input/output error": Fault(OPEN | READ | MAP | CHANGES, errno.EIO),
    "access denied": Fault(OPEN | CREATE | NAME | LOOK, errno.EACCES),
    "half of it": Fault(READ | WRITE, SHORT),
    "killed": Fault(CHANGES, KILL),
    "power lost": Fault(CHANGES, KILL, power=True),
}
SOURCES = ("hf", "sharded", "deepmind-torch", "deepmind-flax")
TARGETS = ("griffin", "deepmind-torch", "griffin-orbax")
BEFORE = ("absent", "old")


class Conversion:
    """A conversion that runs in forks of this process, which has imported all modules.

    Args:
        library: The compiled `faults.c`, preloaded with LD_PRELOAD.
        source: Checkpoint to convert.
        target: Name of the format to write.
        before: State of the destination, "absent" or "old".
        box: Folder that holds only the destination.
        old: Checkpoint that is at the destination if ``before`` is "old".
    """

    def __init__(self, library, source: Path, target: str, before: str, box: Path, old: Path):
        self._library, self._box, self._out = library, box, box / "out"
        self._before, self._aside = before, box.parents[1]  # a folder without faults
        self._template = self._aside / "template"
        shutil.rmtree(self._template, ignore_errors=True)
        self._arguments = ["convert", source, self._out, "--to", target]
        if target == "griffin":
            self._arguments += ["--max-shard-size", "2000"]
        self._reset()
        assert self.child(*self._arguments)[0] == 0
        self._whole = content(self._out)
        self._old = content(old)
        # Orbax's data files have random names, so `verify` compares the tensors instead.
        self._exact = target != "griffin-orbax"
        shutil.rmtree(self._out)
        if before == "old":
            shutil.copytree(old, self._out)
            self._arguments.append("--overwrite")
        shutil.copytree(box, self._template, symlinks=True)

    def calls(self, fault: Fault) -> int:
        """Return the number of calls in which this fault can occur."""
        self._reset()
        return self.count(fault, *self._arguments)

    def check(self, fault: Fault, at: int) -> None:
        """Run the conversion with a fault, check the result, and run it again without one."""
        self._reset()
        status, said, what = self.child(*self._arguments, fault=fault, at=at)
        if fault.power:
            lose_power(self._box, self._aside / "notes")
        where = f"{what}: exit code {status}, {said!r}"
        killed = status == -signal.SIGKILL
        assert killed == (fault.code == KILL and bool(what)), where
        now = self._destination()
        assert now != "damaged", f"{where}: the destination is damaged"
        if status == 0:
            assert now == "whole", f"{where}: the destination is {now}"
        elif not killed:
            assert status == 2, where
            *_, last = said.splitlines()
            assert last.startswith("griffin-eval: ") and "Traceback" not in said, where
            # tensorstore does not always quote the system's error.
            assert os.strerror(fault.code) in last or "OCDBT" in last, where
            assert str(self._box.parent) in last, where
        left = sorted(set(os.listdir(self._box)) - {"out"})
        # A hidden folder remains if the process was killed, or if removing it failed.
        stays = killed or what.startswith(("unlink", "rmdir", "open"))
        allowed = left == [] or (left == [".out.partial"] and stays)
        if left or now != "whole":
            again = [a for a in self._arguments if a != "--overwrite"]
            status, said, _ = self.child(*again, "--overwrite")
            assert status == 0, f"{where}: the next run: {status}, {said!r}"
            assert self._destination() == "whole" and os.listdir(self._box) == ["out"], where
        assert allowed, f"{where}: left {left}"

    def count(self, fault: Fault, *arguments) -> int:
        """Return the number of calls in a run without a fault."""
        reader, writer = os.pipe()
        status, said, _ = self.child(*arguments, fault=fault, at=1 << 40, counted=writer)
        os.close(writer)
        with os.fdopen(reader) as handle:
            assert status == 0, said
            return int(handle.read())

    def child(
        self, *arguments, fault: Fault | None = None, at: int = 0, counted: int | None = None
    ) -> tuple[int, str, str]:
        """Run the command line in a child; return its exit code, its errors and the failed call."""
        said, notes = self._aside / "said", self._aside / "notes"
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            log = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(os.open(said, os.O_RDWR | os.O_CREAT | os.O_TRUNC), 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            code = self._run(arguments, fault, at, log)
            if fault is not None:
                number = self._library.fault_disarm()
                os.write(log, b"K " + self._library.fault_what() + b"\n")
                if counted is not None:
                    os.write(counted, b"%d" % number)
            sys.stderr.flush()
            os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        what = [line[2:] for line in notes.read_text().splitlines() if line.startswith("K ")]
        return status, said.read_text(), what[-1].strip() if what else ""

    def _run(self, arguments, fault: Fault | None, at: int, log: int) -> int:
        if fault is not None:
            folder = f"{self._box.parent}/".encode()
            self._library.fault_arm(folder, fault.calls, at, fault.code, fault.stays, log)
        return main_of(arguments)

    def _reset(self) -> None:
        shutil.rmtree(self._box, ignore_errors=True)
        if self._template.exists():
            shutil.copytree(self._template, self._box, symlinks=True)
        else:
            self._box.mkdir()

    def _destination(self) -> str:
        if not self._out.exists():
            return "absent"
        found = content(self._out)
        if self._before == "old" and found == self._old:
            return "old"
        if self._exact:
            return "whole" if found == self._whole else "damaged"
        names, expected = ({name.split("/")[0] for name in made} for made in (found, self._whole))
        same = names == expected and self.child("verify", self._out)[0] == 0
        return "whole" if same else "damaged"


def main_of(arguments) -> int:
    """Run the command line in this process; return its exit code, or 99 after a traceback."""
    from griffin_eval.cli.main import main

    sys.argv = ["griffin-eval", *map(str, arguments)]
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 99
    return 0


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def lose_power(box: Path, notes: Path) -> None:
    """Remove all data that were not synced, and all names in folders that were not synced."""
    data, entries = set(), set()
    for line in notes.read_text().splitlines():
        letter, _, rest = line.partition(" ")
        if letter == "W":
            data.add(int(rest))
        elif letter == "E":
            parent, child = rest.split()
            entries.add((int(parent), int(child)))
        elif letter == "S":
            data.discard(int(rest))
            entries = {entry for entry in entries if entry[0] != int(rest)}
    for folder, folders, files in os.walk(box, topdown=False):
        if folder == str(box):  # renaming the output is atomic and loses nothing
            continue
        parent = os.stat(folder).st_ino
        for path in (Path(folder, name) for name in (*files, *folders)):
            status = path.lstat()
            if (parent, status.st_ino) in entries:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            elif status.st_ino in data:  # its size and times survive, its blocks do not
                path.write_bytes(bytes(status.st_size))
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sample", type=int, help="calls of each kind; all without it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sources", nargs="*", default=SOURCES)
    parser.add_argument("--targets", nargs="*", default=TARGETS)
    parser.add_argument("--before", nargs="*", default=BEFORE)
    parser.add_argument("--faults", nargs="*", default=list(FAULTS))
    options = parser.parse_args()
    if "LD_PRELOAD" not in os.environ:
        return restart()
    library = ctypes.CDLL(os.environ.pop("LD_PRELOAD"))
    library.fault_disarm.restype, library.fault_what.restype = ctypes.c_long, ctypes.c_char_p
    library.fault_arm.argtypes = [
        *(ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_int)
    ]
    import_all()
    root = Path(os.environ["FAULTS_FOLDER"])
    draw, failures, total = random.Random(options.seed), 0, Counter[str]()
    for source in options.sources:
        for target in options.targets:
            for before in options.before:
                seed, old = root / "checkpoints" / source, root / "checkpoints" / "old"
                conversion = Conversion(library, seed, target, before, root / "box", old)
                for name in options.faults:
                    fault = FAULTS[name]
                    count = conversion.calls(fault)
                    at = range(count + (fault.code == KILL))  # the last run is not killed
                    if options.sample is not None:
                        at = sorted(draw.sample(at, min(options.sample, len(at))))
                    found = Counter(failure(conversion.check, fault, n) for n in at)
                    total[name] += len(at)
                    for text, times in found.items():
                        if text:
                            failures += times
                            print(
                                f"FAILED {times}×: {source} to {target}, {before}, {name}: {text}"
                            )
                print(f"{source} to {target}, {before}: done", flush=True)
    print(f"{sum(total.values())} faults, {failures} failures; {dict(total)}")
    return 1 if failures else 0


def failure(check: Callable[[Fault, int], None], fault: Fault, at: int) -> str:
    try:
        check(fault, at)
    except AssertionError as error:
        return str(error)
    return ""


def import_all() -> None:
    """Import the modules that conversions import late and that start no threads."""
    import huggingface_hub  # noqa: F401
    import ml_dtypes  # noqa: F401
    import rich.progress  # noqa: F401
    import tensorstore  # noqa: F401
    import torch  # noqa: F401

    from griffin_eval.cli import main  # noqa: F401
    from griffin_eval.converters import convert, verify  # noqa: F401
    from griffin_eval.converters.containers.orbax import reader, writer  # noqa: F401
    from griffin_eval.converters.containers.safetensors import reader as r  # noqa: F401
    from griffin_eval.converters.containers.torch_pt import writer as w  # noqa: F401


def restart() -> int:
    """Build the library, write the checkpoints, and run this program with them."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        library = f"{folder}/faults.so"
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-O1", "-o", library, HERE / "faults.c", "-ldl"], check=True
        )
        code = (
            "import sys, pathlib, shutil; from tiny_checkpoints import write_all\n"
            "root = pathlib.Path(sys.argv[1]); write_all(root)\n"
            "shutil.copytree(root / 'hf', root / 'old')\n"
        )
        environment = os.environ | {
            "PYTHONPATH": str(HERE.parent / "support"),
            "FAULTS_FOLDER": f"{folder}/data",
            "JAX_PLATFORMS": "cpu",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        checkpoints = f"{folder}/data/checkpoints"
        subprocess.run([sys.executable, "-c", code, checkpoints], env=environment, check=True)
        command = [sys.executable, *sys.argv]
        return subprocess.run(command, env=environment | {"LD_PRELOAD": library}).returncode


if __name__ == "__main__":
    sys.exit(main())
