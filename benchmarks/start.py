"""Run a module of this checkout in any environment: ``PYTHON -P benchmarks/start.py MODULE …``."""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
del sys.argv[0]

import experiments  # noqa: E402, F401 - found beside this file; it removes the checkout's path

runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
