"""Fail each request that a conversion to or from an object store makes, one request a run.

    make faults-remote             # every request
    make faults-remote SAMPLE=5    # five requests for each kind of fault

In each run the n-th request is refused, gets a server error or half an answer, is carried out
without an answer, or the process is killed before or after it. Afterwards the destination must be
empty, or no checkpoint, or the whole checkpoint. A conversion that is not killed must leave nothing
there when it fails, and its error must be one sentence with the address.
"""

import argparse
import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from urllib.request import Request, urlopen

HERE = Path(__file__).resolve().parent
SUPPORT = str(HERE.parent / "support")
SUPPORTED = {"PYTHONPATH": f"{HERE}{os.pathsep}{SUPPORT}"}  # helpers shared by tests
sys.path.append(SUPPORT)

import object_stores  # noqa: E402
import run  # noqa: E402
from store import CONTROL, Fault  # noqa: E402

FAULTS = {
    "refused": Fault(status=403),
    "refused from then on": Fault(status=403, stays=True),
    "error of the server": Fault(status=503),
    "half an answer": Fault(half=True),
    "no answer": Fault(lost=True),
    "killed before": Fault(kill=0),
    "killed after": Fault(kill=0, lost=True),
}
NO_FAULT = Fault()
FORMAT = ("--to", "griffin-orbax")


class Store:
    """A server of `store.py` that griffin-eval uses until the context ends."""

    def __init__(self, scheme: str):
        command = [sys.executable, HERE / "store.py", scheme]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=os.environ | SUPPORTED
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        self._scheme, self._buckets = scheme, 0
        os.environ.update(object_stores.environment(scheme, self.address))

    def arm(self, fault: Fault) -> None:
        self._ask(f"{CONTROL}fault", "PUT", json.dumps(dataclasses.asdict(fault)).encode())

    def count(self) -> int:
        return int(self._ask(f"{CONTROL}count"))

    def bucket(self) -> str:
        """Create a bucket and return its name."""
        self._buckets += 1
        name = f"bucket{self._buckets}"
        self.arm(NO_FAULT)
        object_stores.make_bucket(self._scheme, self.address, name)
        return name

    def names(self, bucket: str) -> list[str]:
        """Return the names of the objects in a bucket."""
        self.arm(NO_FAULT)
        if self._scheme == "s3":
            return re.findall("<Key>(.*?)</Key>", self._ask(f"/{bucket}?list-type=2").decode())
        found = json.loads(self._ask(f"/storage/v1/b/{bucket}/o"))
        return [item["name"] for item in found.get("items", [])]

    def url(self, bucket: str) -> str:
        return f"{self._scheme}://{bucket}/a/checkpoint"

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_) -> None:
        self._process.terminate()

    def _ask(self, path: str, method: str = "GET", body: bytes | None = None) -> bytes:
        asked = Request(self.address + path, body, {"Content-Type": "application/json"})
        asked.method = method
        with urlopen(asked) as answer:
            return answer.read()


class Conversions:
    """Conversions of a checkpoint from this machine to a store, or the other way round."""

    def __init__(self, store: Store, source: Path, writes: bool, box: Path):
        self._store, self._source, self._writes, self._box = store, source, writes, box
        self._number = 0
        self.missed = 0
        box.mkdir()
        if not writes:
            self._whole = store.url(store.bucket())
            status, said = self._child(["convert", source, self._whole, *FORMAT])
            assert status == 0, said
        self.requests = self._count()

    def check(self, fault: Fault, at: int) -> None:
        """Run a conversion with a fault and check the destination and the error message.

        The number of requests varies, since tensorstore groups writes into commits by time. A
        conversion that ends before its fault must succeed; `missed` counts these.
        """
        arguments, out, url, bucket = self._next()
        status, said = self._child(arguments, dataclasses.replace(fault, at=at))
        made = self._store.count()
        where = f"request {at} of {made}: exit code {status}, {said!r}"
        killed = status == -signal.SIGKILL
        if made <= at:
            self.missed += 1
            assert status == 0, where
        else:
            assert killed == (fault.kill is not None), where
        if not killed:
            assert status in (0, 2), where
            assert "Traceback" not in said, where
        if status == 2:
            last = said.splitlines()[-1]
            assert last.startswith("griffin-eval: ") and url in last, where
        if not self._writes:
            beside = {entry for entry in os.listdir(self._box) if entry.startswith(out.name)}
            assert beside == ({out.name} if status == 0 else set()) or killed, f"{where}: {beside}"
            if out.exists():
                done = self._child(["verify", self._source, out])
                assert done[0] == 0, f"{where}: {done}"
            return
        names = self._store.names(bucket)
        if status == 2 and not fault.stays:
            assert names == [], f"{where}: left {names}"
        if status == 0 or self._child(["inspect", url])[0] == 0:
            done = self._child(["verify", self._source, url])
            assert done[0] == 0, f"{where}: {done}"
            assert not any(name.endswith(".griffin_partial") for name in names), where
        elif names:
            again, said = self._child(["convert", self._source, url, *FORMAT])
            assert again == 2 and url in said, f"{where}: the next run: {again}, {said!r}"
        else:
            again, said = self._child(["convert", self._source, url, *FORMAT])
            assert again == 0, f"{where}: the next run: {again}, {said!r}"

    def _next(self) -> tuple[list, Path, str, str]:
        """Return a conversion's arguments, its local path, and its URL and bucket in the store."""
        self._number += 1
        out = self._box / f"out{self._number}"
        if not self._writes:
            return ["convert", self._whole, out, "--to", "griffin"], out, self._whole, ""
        bucket = self._store.bucket()
        url = self._store.url(bucket)
        return ["convert", self._source, url, *FORMAT], out, url, bucket

    def _count(self) -> int:
        status, said = self._child(self._next()[0])
        assert status == 0, said
        return self._store.count()

    def _child(self, arguments: list, fault: Fault = NO_FAULT) -> tuple[int, str]:
        """Run the command line in a child process; return its exit code and its error messages."""
        said = self._box / "said"
        child = os.fork()
        if child == 0:
            signal.alarm(120)
            os.dup2(os.open(said, os.O_RDWR | os.O_CREAT | os.O_TRUNC), 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            kill = None if fault.kill is None else os.getpid()
            self._store.arm(dataclasses.replace(fault, kill=kill))
            code = run.main_of(arguments)
            sys.stderr.flush()
            os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return status, said.read_text()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sample", type=int, help="requests of each kind; all without it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stores", nargs="*", default=["s3", "gs"])
    parser.add_argument("--faults", nargs="*", default=list(FAULTS))
    options = parser.parse_args()
    run.import_all()
    draw, failures, missed, total = random.Random(options.seed), 0, 0, Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        code = "import sys, pathlib, tiny_checkpoints as t; t.write_all(pathlib.Path(sys.argv[1]))"
        made = [sys.executable, "-c", code, root / "made"]
        subprocess.run(made, env=os.environ | SUPPORTED, check=True)
        for scheme in options.stores:
            with Store(scheme) as store:
                for writes in (True, False):
                    box = root / f"{scheme}-{writes}"
                    conversions = Conversions(store, root / "made" / "hf", writes, box)
                    direction = f"{'to' if writes else 'from'} {scheme}"
                    for name in options.faults:
                        at = range(conversions.requests)
                        if options.sample is not None:
                            at = sorted(draw.sample(at, min(options.sample, len(at))))
                        total[name] += len(at)
                        for n in at:
                            text = run.failure(conversions.check, FAULTS[name], n)
                            failures += bool(text)
                            if text:
                                print(f"FAILED {direction}, {name}: {text}", flush=True)
                    missed += conversions.missed
                    print(f"{direction}: {conversions.requests} requests, done", flush=True)
    print(f"{sum(total.values())} faults, {failures} failures; {dict(total)}")
    print(f"{missed} of them at requests that were not made that time")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
