"""Run the same commands in two environments and compare everything that they print and write.

    python tests/net/compare.py BEFORE AFTER

BEFORE and AFTER are Python interpreters of two environments with griffin-eval. Each case of
cases.py runs in both, in fresh folders of the same layout, and prints a line: `same`, or `differs`
with a diff.
The exit code is 0 if all cases are the same, 1 if any differs, and 2 for wrong usage.

The comparison covers exit codes, standard output, standard error and all files: JSON and other
texts line by line, safetensors by the SHA-256 of each tensor, other files by their SHA-256.
`normalised` and the tables above it list the parts that are replaced or left out first.
"""

import argparse
import difflib
import fnmatch
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # PYTHONSAFEPATH may be set

from cases import CASES, Case  # noqa: E402

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "COLUMNS": "200",
    "NO_COLOR": "1",
    "PYTHONSAFEPATH": "1",
    "TERM": "dumb",
}
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "SSL_CERT_FILE")

# Patterns replaced in every text. Most are times, speeds and random names.
REPLACED = [
    (r"\d{4}-\d\d-\d\d[T: ]\d\d[:-]\d\d[:-]\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)?", "<time>"),
    (r"\b\d+(\.\d+)? (s|ms|seconds|minutes)\b", r"<duration> \2"),
    (r"\b[\d.,]+ tokens/s\b", "<speed> tokens/s"),
    (r"\b[\d.]+ GB at most\b", "<memory> GB at most"),
    (r"\b(griffin-eval-|tmp)[a-z0-9_]{8}\b", r"\1<random>"),
    (r"127\.0\.0\.1:\d+", "127.0.0.1:<port>"),
    # Speed and memory in a row of the report's table of costs.
    (r"<td>[\d.]+</td>(<td>\d+</td>)<td>\d{9,}</td></tr>", r"<td>-</td>\1<td>-</td></tr>"),
    (r"(\[[\w.]+):\d+\]", r"\1]"),  # source line of a log message
    (r"Traceback \(most recent call last\):\n(?:  .*\n)+", "Traceback\n"),
]
# Lines that are left out: progress bars, and messages of libtpu where it is installed.
DROPPED_LINES = re.compile(r"\d+%\||it/s\]|TPU|InitGoogle|Source Location Trace|libtpu")
# Keys of JSON that are left out: times, speeds, memory, versions, descriptions of the machine, and
# source code, whose wording may change.
DROPPED_KEYS = {
    "custom_dataset",
    "date",
    "end_time",
    "git_hash",
    "griffin_eval",
    "griffin_eval_version",
    "griffin_peak_memory_bytes",
    "griffin_seconds",
    "griffin_tokens_per_second",
    "griffin_versions",
    "pretty_env_info",
    "seconds",
    "start_time",
    "total_evaluation_time_seconds",
}
# Files that are left out: Orbax's arrays, which have random names (orbax_sums.py reads them), and
# its times; SVG figures, which have random ids (PNGs are compared); and caches of --use_cache.
DROPPED_FILES = (
    "*/d/*",
    "*manifest.ocdbt",
    "*_CHECKPOINT_METADATA",
    "*/ocdbt.process_0/*",
    "*.svg",
    "*.db",
)
TEXT_ENDINGS = {".md", ".csv", ".html", ".txt", ".toml", ".jinja", ""}
NUMBER = re.compile(r"([-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)")

Outcome = dict[str, str]  # keys such as "1 exit code", "1 stdout" or "files/config.json"


@dataclass
class Side:
    """One of the two environments.

    Args:
        name: Label of the environment, "before" or "after".
        python: Interpreter of the environment, in the folder of its commands.
        folder: Working folder, with ``inputs`` and a folder for each case.
        places: Paths that texts may contain -> words that replace them.
        version: Version of griffin-eval, which is replaced in texts, too.
    """

    name: str
    python: Path
    folder: Path
    places: dict[str, str] = field(default_factory=dict)
    version: str = ""

    def find_places(self) -> None:
        code = "import griffin_eval as g, sys; print(g.__path__[0], sys.prefix, g.__version__)"
        done = subprocess.run(
            [self.python, "-c", code],
            capture_output=True,
            text=True,
            env=self.environment(),
            cwd="/",
        )
        if done.returncode:
            sys.exit(f"{self.python} has no griffin-eval:\n{done.stderr}")
        package, prefix, self.version = done.stdout.split()
        self.places = {prefix: "<prefix>", str(Path(package).parent): "<package>"}

    def environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        places = {"XDG_CACHE_HOME": self.folder / "cache", "TMPDIR": self.folder / "tmp"}
        return kept | ENVIRONMENT | {name: str(path) for name, path in places.items()}

    def normalised(self, text: str) -> str:
        """Replace parts of a text that differ from run to run."""
        places = {str(self.folder): "<work>", str(HERE): "<net>"} | self.places
        for path in sorted(places, key=len, reverse=True):
            text = text.replace(path, places[path])
        for pattern, word in REPLACED:
            text = re.sub(pattern, word, text)
        if self.version:
            text = re.sub(rf"(?<![\d.]){re.escape(self.version)}(?![\d.])", "<version>", text)
        return text


# Running


def run(side: Side, command: str, folder: Path, timeout: float) -> tuple[str, str, str]:
    """Return the exit code, standard output and standard error of a command."""
    program, *arguments = shlex.split(command.replace("{net}", str(HERE)))
    process = subprocess.Popen(
        [str(side.python.parent / program), *arguments],
        cwd=folder,
        env=side.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="backslashreplace",
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
        return str(process.returncode), out, err
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        return TIMED_OUT, out, err
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise


TIMED_OUT = "timed out"


def outcome(side: Side, case: Case) -> Outcome:
    """Run the commands of a case in its folder and return what they printed and wrote."""
    folder = side.folder / case.id
    folder.mkdir(parents=True)
    (folder / "inputs").symlink_to(side.folder / "inputs")
    (folder / "cases").symlink_to(side.folder)
    found: Outcome = {}
    for i, command in enumerate(case.commands, 1):
        code, out, err = run(side, command, folder, case.timeout)
        found[f"{i} exit code"] = code
        if not case.only_exit:
            found[f"{i} stdout"] = lines(side, case, out)
            found[f"{i} stderr"] = lines(side, case, err)
        if code == TIMED_OUT:
            break
    if case.only_exit:
        return found
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not any(fnmatch.fnmatch(name, pattern) for pattern in DROPPED_FILES):
            key = "files/" + side.normalised(name)
            while key in found:  # names that differ only in their time
                key += "'"
            found[key] = content(side, case, path)
    return found


def lines(side: Side, case: Case, text: str) -> str:
    """Normalise a text and drop lines that are not compared."""
    text = side.normalised(re.sub(r"[^\n]*\r(?!\n)", "", text))
    kept = [line for line in text.splitlines() if not DROPPED_LINES.search(line)]
    for pattern in case.dropped:
        kept = [line for line in kept if not re.search(pattern, line)]
    return "\n".join(re.sub("[ ─━]+", " ", line) if case.loose else line for line in kept)


# Reading files


def content(side: Side, case: Case, path: Path) -> str:
    """Describe a file as text: its text, or the SHA-256 of its content."""
    data = path.read_bytes()
    if path.suffix == ".safetensors" or path.suffix == ".state":
        return side.normalised(tensors(data))
    if path.suffix in (".json", ".jsonl"):
        whole = path.suffix == ".json"
        texts = [data.decode()] if whole else data.decode().splitlines()
        return side.normalised("\n".join(without_dropped_keys(text, case) for text in texts))
    if path.suffix in TEXT_ENDINGS and is_text(data):
        kept = side.normalised(data.decode()).splitlines()
        return "\n".join(line for line in kept if not any(re.search(p, line) for p in case.dropped))
    return digest(data)


def digest(data: bytes) -> str:
    return f"{len(data)} bytes, SHA-256 {hashlib.sha256(data).hexdigest()}"


def is_text(data: bytes) -> bool:
    try:
        return "\0" not in data.decode()
    except UnicodeDecodeError:
        return False


def tensors(data: bytes) -> str:
    """List the metadata and tensors of a safetensors file, with the SHA-256 of each tensor.

    Tensors are in the file's order. The safetensors library writes metadata in random order.
    """
    length = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + length])
    except ValueError:
        return digest(data)
    rows = [json.dumps(header.pop("__metadata__", {}), indent=1, sort_keys=True)]
    rows.append(f"{len(data)} bytes, header of {length}")
    for name, tensor in header.items():
        start, end = (8 + length + offset for offset in tensor["data_offsets"])
        rows.append(f"{name} {tensor['dtype']} {tensor['shape']} {digest(data[start:end])}")
    return "\n".join(rows)


def without_dropped_keys(text: str, case: Case) -> str:
    def without_dropped(value: Any) -> Any:
        if isinstance(value, dict):
            dropped = DROPPED_KEYS | set(case.dropped_keys)
            return {key: without_dropped(each) for key, each in value.items() if key not in dropped}
        return [without_dropped(each) for each in value] if isinstance(value, list) else value

    try:
        return json.dumps(without_dropped(json.loads(text)), indent=1, ensure_ascii=False)
    except ValueError:
        return text


# Comparing


def equal(one: str, other: str, rtol: float) -> bool:
    """Return whether two texts are equal up to relative differences of their numbers."""
    if one == other or not rtol:
        return one == other
    left, right = NUMBER.split(one), NUMBER.split(other)
    return len(left) == len(right) and all(
        a == b or (i % 2 and math.isclose(float(a), float(b), rel_tol=rtol))
        for i, (a, b) in enumerate(zip(left, right, strict=True))
    )


def differences(case: Case, before: Outcome, after: Outcome, rtol: float = 0.0) -> list[str]:
    """Return unified diffs of the two outcomes, and a line for each timeout or wrong exit code."""
    said = []
    for name, found in (("before", before), ("after", after)):
        hung = [key for key, text in found.items() if text == TIMED_OUT]
        said += [f"{name}: {key}: no end within {case.timeout:g} s" for key in hung]
        last = [text for key, text in found.items() if key.endswith("exit code")][-1]
        if not hung and last != str(case.exit):
            said.append(f"{name}: exit code {last}, the case expects {case.exit}")
    absent = "(absent)"
    for key in dict.fromkeys([*before, *after]):
        one, other = before.get(key, absent), after.get(key, absent)
        if not equal(one, other, rtol):
            names = f"before: {key}", f"after: {key}"
            said += difflib.unified_diff(
                one.splitlines(), other.splitlines(), *names, lineterm="", n=1
            )
    return said


def needs(case: Case) -> list[str]:
    """Return the cases whose files a case reads, as ``cases/ID/…``."""
    ids = {
        word
        for command in case.commands
        for word in re.findall(r"\bcases/([\w-]+/[\w-]+)", command)
    }
    return [other.id for other in CASES if other.id in ids and other.id != case.id]


def selected(patterns: list[str]) -> list[Case]:
    """Return the cases that match any pattern, and the cases that they need, in their order."""
    wanted = {case.id for case in CASES if any(fnmatch.fnmatch(case.id, p) for p in patterns)}
    for case in reversed(CASES):
        if case.id in wanted:
            wanted.update(needs(case))
    return [case for case in CASES if case.id in wanted]


def compare_all(
    sides: list[Side], cases: list[Case], *, jobs: int, rtol: float, show: Callable[[str], object]
) -> int:
    """Run the cases on both sides, print a line for each, and return how many differ."""
    futures: dict[tuple[str, str], Future[Outcome]] = {}

    def waited(side: Side, case: Case) -> Outcome:
        for need in needs(case):  # submitted earlier, so it runs or has ended
            futures[side.name, need].result()
        found = outcome(side, case)
        (side.folder / f"{case.id}.json").write_text(json.dumps(found, indent=1))  # for --keep
        return found

    differ = 0
    pool = ThreadPoolExecutor(jobs)
    try:
        for case in cases:
            for side in sides:
                futures[side.name, case.id] = pool.submit(waited, side, case)
        for case in cases:
            before, after = (futures[side.name, case.id].result() for side in sides)
            found = differences(case, before, after, rtol)
            differ += bool(found)
            show(f"{case.id}: {'differs' if found else 'same'}")
            for line in found:
                show(f"    {line}")
    finally:
        pool.shutdown(cancel_futures=True)
    return differ


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare two environments with griffin-eval.")
    parser.add_argument("before", nargs="?", help="interpreter of the first environment")
    parser.add_argument("after", nargs="?", help="interpreter of the second environment")
    parser.add_argument(
        "--only", action="append", metavar="PATTERN", help="cases, such as 'convert/*'; repeatable"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--jobs", type=int, default=2, help="commands that run at a time (2)")
    parser.add_argument(
        "--keep",
        metavar="FOLDER",
        help="new folder to work in and to keep; GROUP/NAME.json has what was compared",
    )
    parser.add_argument("--rtol", type=float, default=0.0, help="relative tolerance of numbers (0)")
    options = parser.parse_args()
    cases = selected(options.only or ["*"])
    if options.list:
        print(*(case.id for case in cases), sep="\n")
        return 0
    if options.before is None or options.after is None:
        parser.error("give the interpreters of two environments")
    if not cases:
        parser.error(f"--only: no case is called {options.only!r}")
    work = Path(options.keep or tempfile.mkdtemp(prefix="griffin-compare-")).absolute()
    # The folders' names have the same length, since some texts are wrapped or padded.
    sides = [
        Side(name, Path(os.path.abspath(python)), work / folder)
        for name, python, folder in (("before", options.before, "a"), ("after", options.after, "b"))
    ]
    try:
        start = time.monotonic()
        for side in sides:
            (side.folder / "tmp").mkdir(parents=True)
            side.find_places()
        first, second = sides
        subprocess.run(
            [first.python, HERE / "inputs.py", first.folder / "inputs"],
            check=True,
            env=first.environment(),
            cwd=work,
            stderr=subprocess.DEVNULL,
        )
        shutil.copytree(first.folder / "inputs", second.folder / "inputs")
        differ = compare_all(
            sides,
            cases,
            jobs=options.jobs,
            rtol=options.rtol,
            show=lambda line: print(line, flush=True),
        )
    finally:
        if not options.keep:
            shutil.rmtree(work, ignore_errors=True)
    print(f"{len(cases) - differ} same, {differ} differ ({time.monotonic() - start:.0f} s)")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
