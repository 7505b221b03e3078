"""Settings that every test runs under, and the parity table printed at the end of a run."""

import contextlib
import datetime
import gc
import logging
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import hypothesis
import pytest
from xla_options import QUICK_FLAGS

pytest_plugins = ["fixtures_checkpoint"]

ROOT = Path(__file__).resolve().parent.parent

# Keep transformers from importing the repository's folder `kernels` as PyPI's package `kernels`.
# PYTHONSAFEPATH does the same for the processes that tests start.
sys.path.insert(0, str(ROOT))
import experiments  # noqa: E402, F401 - found beside the tests; it takes the checkout from the path

os.environ["PYTHONSAFEPATH"] = "1"

# The libraries read these variables when they are imported, here and in processes of tests.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch: one thread for each test process
# The processes of this run share a folder of compiled programs. Caches of other programs stay
# in the user's folder.
if "PYTEST_XDIST_WORKER" not in os.environ:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("HF_HOME", str(caches / "huggingface"))
    os.environ.setdefault("MPLCONFIGDIR", str(caches / "matplotlib"))
    own_caches = tempfile.TemporaryDirectory(
        prefix="griffin-eval-tests-"
    )  # removed when this process ends
    os.environ["XDG_CACHE_HOME"] = own_caches.name
    os.environ["LM_EVAL_INDEX"] = str(Path(own_caches.name, "lm_eval_index"))
    # startup/sitecustomize.py describes this variable.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "tests" / "startup"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    ).rstrip(os.pathsep)
# Compiling takes most of the tests' time, so JAX optimizes less here; results agree to rounding.
# `make test-all` sets this variable to nothing and compiles as users do.
os.environ.setdefault("XLA_FLAGS", QUICK_FLAGS)

# No deadline: compiling takes seconds the first time, and cores may be shared. `make test` draws
# the same examples in every run; `make test-all` chooses the other profile by --hypothesis-profile.
hypothesis.settings.register_profile("griffin", deadline=None, derandomize=True)
hypothesis.settings.register_profile("all", deadline=None, print_blob=True)
hypothesis.settings.load_profile("griffin")


@pytest.fixture(autouse=True)
def our_logs_can_be_read():
    """Reset our loggers, which lm_eval's command line changes when it runs in this process."""
    logging.disable(logging.NOTSET)
    for name, ours in logging.root.manager.loggerDict.items():
        if name.split(".")[0] == "griffin_eval" and isinstance(ours, logging.Logger):
            ours.handlers, ours.propagate, ours.disabled = [], True, False
            ours.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def relaxed_jax():
    """Return a context manager in which reference code may mix dtypes and ranks."""

    @contextlib.contextmanager
    def relaxed():
        import jax

        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            yield

    return relaxed


# The parity table: (pair, quantity) -> (largest error, its tolerance).
Parity = dict[tuple[str, str], tuple[float, float]]
PARITY = pytest.StashKey[Parity]()


def keep_largest(table: Parity, key: tuple[str, str], error: float, tolerance: float) -> None:
    known, _ = table.get(key, (-math.inf, 0.0))
    if not math.isnan(known) and not error <= known:  # NaN counts as the largest error
        table[key] = (error, tolerance)


@pytest.fixture(scope="session")
def record_parity(pytestconfig):
    """Return `record(pair, quantity, error, tolerance)`, which asserts error <= tolerance and keeps
    the largest error of each (pair, quantity) for the table at the end of the run."""

    def record(pair: str, quantity: str, error: float, tolerance: float) -> None:
        error, tolerance = float(error), float(tolerance)
        keep_largest(pytestconfig.stash[PARITY], (pair, quantity), error, tolerance)
        assert error <= tolerance, f"{pair}, {quantity}: error {error:.3g} > {tolerance:.3g}"

    return record


# Disable the garbage collector: it would traverse all of torch, JAX and transformers during their
# import and in every test, although none of their objects is ever freed.
gc.disable()


def pytest_collection_finish():
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # runs before pytest applies -m
def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("ci"):
            item.add_marker(pytest.mark.slow)


def pytest_configure(config):
    config.stash[PARITY] = {}


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # a worker of pytest-xdist returns its rows
        rows = [[*key, *value] for key, value in session.config.stash[PARITY].items()]
        session.config.workeroutput["parity"] = rows


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    for pair, quantity, *value in getattr(node, "workeroutput", {}).get("parity", []):
        keep_largest(node.config.stash[PARITY], (pair, quantity), *value)


def commit_and_date() -> str:
    """Return the commit and the day of this run, for pages that quote its parity table."""
    describe = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, capture_output=True, text=True).stdout.strip()
    return f"commit {commit or 'unknown'}, {datetime.date.today():%d %B %Y}"


def pytest_terminal_summary(terminalreporter, config):
    table = config.stash[PARITY]
    if not table:
        return
    rows = [("pair", "quantity", "largest error", "tolerance")]
    rows += [(*key, f"{error:.2e}", f"{tol:.2e}") for key, (error, tol) in sorted(table.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    terminalreporter.section(f"parity at {commit_and_date()}")
    for row in rows:
        cells = [
            cell.ljust(w) if i < 2 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        terminalreporter.write_line("  ".join(cells).rstrip())
