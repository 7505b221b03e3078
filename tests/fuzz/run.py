"""Fuzz every kind of file that belongs to a checkpoint, each kind in separate processes.

    make fuzz SECONDS=180 SEED=1            # all kinds, 180 seconds in total
    make fuzz RUNS=10000 TARGETS="torch"    # 10,000 cases of one kind
    make fuzz CASE=build/fuzz/torch-…       # one failed case again

A case must end in a one-sentence error or the right result, within 10 s and 2 GB. Failing cases are
kept in build/fuzz with their output beside them, and the command then exits with code 1.
"""

import argparse
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
KEEP = HERE.parents[1] / "build" / "fuzz"
ATTEMPTS = 20  # crashed processes after which a target is given up


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=int)
    parser.add_argument("--runs", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=Path)
    parser.add_argument("--keep", type=Path, default=KEEP)
    parser.add_argument("targets", nargs="*")
    options = parser.parse_args()
    options.keep.mkdir(parents=True, exist_ok=True)
    before = set(options.keep.iterdir())
    shm = Path("/dev/shm")  # temporary files; fsync is slow on disks
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as folder:
        seeds = Path(folder) / "seeds"
        _python("-c", f"import seeds, pathlib; seeds.write_seeds(pathlib.Path({str(seeds)!r}))")
        if options.case:
            name = max(
                (p.name for p in seeds.iterdir() if options.case.name.startswith(p.name + "-")),
                key=len,
            )
            work = Path(folder) / "work"
            work.mkdir()
            done = _worker(name, seeds, work, options.keep, case=str(options.case))
            print(done.stdout[-3000:])
            return done.returncode
        names = options.targets or sorted(p.name for p in seeds.iterdir())
        workers = min(len(os.sched_getaffinity(0)), len(names))
        limits = {}
        if options.runs:
            limits["runs"] = options.runs
        else:
            limits["seconds"] = max(1, (options.seconds or 60) * workers // len(names))
        with ThreadPoolExecutor(workers) as pool:
            jobs = [
                pool.submit(_fuzz, name, seeds, Path(folder), options.keep, options.seed, limits)
                for name in names
            ]
            for name, job in zip(names, jobs, strict=True):
                print(f"{name}: {job.result()}", flush=True)
    found = sorted(set(options.keep.iterdir()) - before)
    cases = [path for path in found if path.suffix != ".txt"]
    for path in cases:
        text = path.with_suffix(".txt")
        last = text.read_text().strip().splitlines()[-1] if text.exists() else "killed the process"
        print(f"FAILED (seed {options.seed}): {path}: {last[:300]}")
    return 1 if cases else 0


def _fuzz(name: str, seeds: Path, root: Path, keep: Path, seed: int, limits: dict) -> str:
    """Fuzz a target, restarting after every crash; return a summary."""
    total, began, left = 0, time.monotonic(), dict(limits)
    for attempt in range(ATTEMPTS):
        work = root / f"{name}-{attempt}"
        work.mkdir()
        done = _worker(name, seeds, work, keep, seed=seed + attempt, **left)
        count = work / "count"
        cases = struct.unpack("<Q", count.read_bytes())[0] if count.exists() else 0
        total += cases
        shutil.rmtree(work)
        if done.returncode == 0:
            break
        if not cases:
            raise SystemExit(f"{name}: the fuzzer does not start:\n{done.stdout[-3000:]}")
        (keep / f"{name}-{seed + attempt}.txt").write_text(done.stdout[-5000:])
        if "runs" in left:
            left["runs"] = max(1, limits["runs"] - total)
        else:
            left["seconds"] = int(max(1, limits["seconds"] - (time.monotonic() - began)))
    crashes = f", {attempt} crashes" if attempt else ""
    return f"{total} cases in {time.monotonic() - began:.0f} s{crashes}"


def _worker(name: str, seeds: Path, work: Path, keep: Path, **more) -> subprocess.CompletedProcess:
    given = {"target": name, "seeds": str(seeds), "work": str(work), "keep": str(keep), **more}
    return _python(str(HERE / "worker.py"), json.dumps(given), check=False)


def _python(*arguments: str, check: bool = True) -> subprocess.CompletedProcess:
    environment = os.environ | {
        "PYTHONPATH": f"{HERE}:{HERE.parent / 'support'}",
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "TERM": "dumb",
    }
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if check and done.returncode:
        raise SystemExit(done.stdout)
    return done


if __name__ == "__main__":
    sys.exit(main())
