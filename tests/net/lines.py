"""Lines of the product that tests run, compared before and after a change.

    python tests/net/lines.py run ARGUMENTS   run pytest with these arguments under coverage.py
    python tests/net/lines.py record          write the lines that ran to lines.json
    python tests/net/lines.py compare         print lines of lines.json that still exist, moved or
                                              not, but did not run; exit with 1 if there are any

The data of a run are in build/coverage. `record` stores the current commit, so the working tree
must be the one that was run.
"""

import difflib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("lines.json")
DATA = ROOT / "build" / "coverage"
FOLDERS = ("griffin_eval", "converters", "kernels", "model_jax", "model_torch")
SETTINGS = """[run]
data_file = {data}/lines
parallel = true
patch = subprocess
disable_warnings = no-data-collected,module-not-imported,module-not-measured,already-imported
source_dirs =
    {folders}
"""

# Line numbers by file path relative to the repository's root.
Lines = dict[str, set[int]]


def run(arguments: list[str]) -> int:
    """Run pytest, and every process that it starts, under coverage.py."""
    shutil.rmtree(DATA, ignore_errors=True)
    DATA.mkdir(parents=True)
    folders = "\n    ".join(str(ROOT / folder) for folder in FOLDERS)
    settings = DATA / "settings.ini"
    settings.write_text(SETTINGS.format(data=DATA, folders=folders))
    coverage = [sys.executable, "-P", "-m", "coverage"]
    done = subprocess.run([*coverage, "run", f"--rcfile={settings}", "-m", "pytest", *arguments])
    subprocess.run([*coverage, "combine", "--quiet", f"--rcfile={settings}"], check=True)
    return done.returncode


def measured(data: Path = DATA / "lines") -> Lines:
    """Return the lines that the last run executed."""
    from coverage import CoverageData

    found = CoverageData(str(data))
    found.read()
    return {
        str(Path(file).relative_to(ROOT)): set(found.lines(file) or ())
        for file in found.measured_files()
        if Path(file).is_relative_to(ROOT)
    }


def ranges(numbers: Iterable[int]) -> str:
    """Write numbers as text: 1-3,7 for 1, 2, 3 and 7."""
    groups: list[list[int]] = []
    for number in sorted(numbers):
        if groups and number == groups[-1][1] + 1:
            groups[-1][1] = number
        else:
            groups.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in groups)


def numbers(text: str) -> set[int]:
    """Read numbers from the text that `ranges` writes."""
    parts = (part.partition("-") for part in text.split(",") if part)
    return {n for a, _, b in parts for n in range(int(a), int(b or a) + 1)}


def record(lines: Lines) -> None:
    """Write the lines and their commit."""
    files = {path: ranges(numbers) for path, numbers in sorted(lines.items()) if numbers}
    content = {"commit": git("rev-parse", "HEAD").strip(), "files": files}
    FILE.write_text(json.dumps(content, indent=1) + "\n")


def git(*arguments: str) -> str:
    """Return the output of a git command."""
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True
    ).stdout


def moved(commit: str) -> dict[str, str]:
    """Return the current path of each file that was renamed since a commit."""
    renamed = git("diff", "--name-status", "-M", "--diff-filter=R", commit).splitlines()
    return {old: new for _, old, new in (line.split("\t") for line in renamed)}


def lost(before: str, after: str, ran_before: set[int], ran_after: set[int]) -> list[int]:
    """Return new numbers of the lines that are in both texts and ran only before the change."""
    old, new = before.splitlines(), after.splitlines()
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    return [
        b + i + 1
        for a, b, size in blocks
        for i in range(size)
        if a + i + 1 in ran_before and b + i + 1 not in ran_after
    ]


def compare(lines: Lines) -> int:
    """Print the surviving lines that ran at the recorded commit but not in the last run."""
    known = json.loads(FILE.read_text())
    renamed, count = moved(known["commit"]), 0
    for path, text in known["files"].items():
        now = renamed.get(path, path)
        if not (ROOT / now).is_file():
            continue
        before, after = git("show", f"{known['commit']}:{path}"), (ROOT / now).read_text()
        if missing := lost(before, after, numbers(text), lines.get(now, set())):
            print(f"{now}: {ranges(missing)}")
            count += len(missing)
    print(f"{count} surviving lines were run at {known['commit'][:9]} and not now")
    return int(count > 0)


def main() -> int:
    match sys.argv[1:]:
        case ["run", *arguments]:
            return run(arguments)
        case ["record"]:
            record(measured())
            return 0
        case ["compare"]:
            return compare(measured())
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
