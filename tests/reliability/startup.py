"""Print the time that the plugin's start-up file adds to every start of Python.

    python tests/reliability/startup.py [--starts N]

Each start is a new interpreter without `site` that times the file's only line as `site` would run
it, with the package and its bytecode installed as pip does. The same line is also timed without
bytecode, so that each start compiles it, and an empty line shows the time of the measurement.
"""

import argparse
import compileall
import importlib.metadata
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import griffin_eval

TIMED = """
import os, sys, time  # site has os already
sys.path.append(sys.argv[1])
begin = time.perf_counter()
exec(sys.argv[2])
print(time.perf_counter() - begin)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints what the start-up file costs.")
    parser.add_argument("--starts", type=int, default=100, help="Interpreters that are started.")
    starts = parser.parse_args().starts
    file = importlib.metadata.distribution("griffin-eval").locate_file("griffin_eval_plugin.pth")
    line, found = Path(str(file)).read_text(), {}
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "griffin_eval")
        package.mkdir()
        for name in ("__init__.py", "_plugin.py"):
            shutil.copy(Path(griffin_eval.__file__).with_name(name), package)
        found["start-up file, without bytecode"] = [timed(folder, line) for _ in range(starts)]
        compileall.compile_dir(package, quiet=1)
        found["start-up file"] = [timed(folder, line) for _ in range(starts)]
        found["an empty line"] = [timed(folder, "") for _ in range(starts)]
    for name, seconds in found.items():
        micros, most = statistics.median(seconds) * 1e6, max(seconds) * 1e6
        print(f"{name}: {micros:.0f} µs at the median of {starts} starts, {most:.0f} µs at most")


def timed(folder: str, line: str) -> float:
    """Return the seconds that the line takes in a new interpreter with the folder on its path."""
    command = [sys.executable, "-P", "-S", "-B", "-c", TIMED, folder, line]
    return float(subprocess.check_output(command))


main()
