"""Long mixed evaluation in one process that checks for leaks and changed answers.

``make soak MINUTES=45`` runs it once for each framework. A cycle has requests of all kinds on texts
from 1 to 5,000 tokens (every twentieth cycle one of 200,000), a cache, a Ctrl-C at a random time,
an out-of-memory error and NaN answers; every fifth cycle loads a second model. After each cycle,
resident memory, open files and threads are counted, and the requests of the start are repeated.

The exit code is 0 if nothing grows after the first third and every repeated answer equals the first
one bit for bit, and 1 otherwise.
"""

import argparse
import contextlib
import csv
import gc
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook, CachingLM

import griffin_eval
from griffin_eval import Evaluator
from griffin_eval.engine.scoring import NotFinite
from griffin_eval.lm.model import GriffinLM
from griffin_eval.process import tune_process

CHECKPOINT = Path(griffin_eval.__file__).parent / "checkpoints" / "bytes_griffin"
TEXT = "".join(topics[name] for name in sorted(topics))
LONGEST, LONG = 200_000, 5_000  # characters, equal to tokens in this model
LONGEST_EVERY, SECOND_MODEL_EVERY = 20, 5  # cycles
GROWTH = 0.03  # relative growth of memory after the first third that counts as noise
KINDS = ("loglikelihood", "loglikelihood_ablated", "loglikelihood_rolling", "generate_until")


class Sample(NamedTuple):
    """Resources of the process after a cycle.

    Attributes:
        seconds: Time since the start.
        memory: Resident bytes.
        files: Number of open files.
        threads: Number of threads.
    """

    seconds: float
    memory: int
    files: int
    threads: int


def sample(started: float) -> Sample:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    memory = pages * os.sysconf("SC_PAGE_SIZE")
    return Sample(time.monotonic() - started, memory, files, threads)


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Return the median slope of all pairs (Theil-Sen estimator), which is robust to outliers."""
    first, second = np.triu_indices(len(times), 1)
    t, v = np.asarray(times, float), np.asarray(values, float)
    return float(np.median((v[second] - v[first]) / (t[second] - t[first])))


def verdict(samples: Sequence[Sample]) -> tuple[str, bool]:
    """Return a line with the slopes after the first third, and whether nothing grows."""
    settled = [one for one in samples if one.seconds >= samples[-1].seconds / 3]
    if len(settled) < 4:
        return "too few cycles to tell whether anything grows: ask for more minutes", False
    times = [one.seconds for one in settled]
    hours = (times[-1] - times[0]) / 3600
    columns = zip(*((one.memory, one.files, one.threads) for one in settled), strict=True)
    memory, files, threads = (3600 * slope(times, column) for column in columns)
    level = float(np.median([one.memory for one in settled]))
    flat = memory * hours <= GROWTH * level and files * hours < 1 and threads * hours < 1
    line = (
        f"{len(settled)} cycles in {60 * hours:.1f} minutes after the first third: memory "
        f"{level / 1e6:.0f} MB {memory / 1e6:+.1f} MB an hour, files {settled[-1].files} "
        f"{files:+.2f} an hour, threads {settled[-1].threads} {threads:+.2f} an hour: "
        f"{'flat' if flat else 'GROWS'}"
    )
    return line, flat


class Soak:
    """A model and the requests of a cycle."""

    def __init__(self, framework: str, folder: Path):
        self.framework, self.folder = framework, folder
        self.lm = GriffinLM(str(CHECKPOINT), framework, dtype="float32", device="cpu")
        self.rng = np.random.default_rng(0)
        self.counts: dict[str, int] = {}

    def text(self, longest: int, rng: np.random.Generator) -> str:
        """Return a piece of text whose length is log-uniform up to ``longest`` characters."""
        length = int(np.exp(rng.uniform(0, np.log(longest))))
        begin = int(rng.integers(len(TEXT) - length)) if length < len(TEXT) else 0
        return (TEXT[begin:] * (1 + length // len(TEXT[begin:])))[:length]

    def requests(self, kind: str, rng: np.random.Generator, longest: int) -> list[Instance]:
        arguments: list[tuple[Any, ...]]
        if kind == "loglikelihood_rolling":
            arguments = [(self.text(longest, rng),) for _ in range(2)]
        elif kind == "generate_until":
            contexts = [self.text(longest // 8, rng) for _ in range(4)]
            greedy = {"until": ["\n\n"], "max_gen_toks": 24}
            drawn = greedy | {"do_sample": True, "temperature": 0.8, "top_k": 20, "until": ["@"]}
            arguments = [(text, settings) for text in contexts for settings in (greedy, drawn)]
        else:
            more = ([], [["nothing"], ["recurrent"], ["attention"]])[kind.endswith("ablated")]
            arguments = [
                (context, continuation, *rest)
                for context in [self.text(longest // 4, rng) for _ in range(3)]
                for continuation in (" the", " a list of names", self.text(60, rng))
                for rest in (more or [[]])
            ]
        return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]  # type: ignore[arg-type]

    def ask(self, kind: str, requests: list[Instance], lm: Any = None) -> Any:
        self.counts[kind] = self.counts.get(kind, 0) + len(requests)
        np.random.seed(1)  # the seed of sampling
        method = getattr(lm or self.lm, kind)
        return method(requests) if lm else method(requests, disable_tqdm=True)

    def probe(self) -> list[bytes]:
        """Return the answers to a fixed set of requests of all kinds, as bytes."""
        rng = np.random.default_rng(7)
        found = [self.ask(kind, self.requests(kind, rng, 3000)) for kind in KINDS]
        found.append([score.tokens.tobytes() for score in found[2]])
        return [repr(each).encode() for each in found]

    def longest(self) -> bytes:
        (score,) = self.ask("loglikelihood_rolling", [_rolling((TEXT * 2)[:LONGEST])])
        return score.tokens.tobytes()

    def cycle(self, number: int) -> None:
        rng = self.rng
        for kind in rng.permutation(KINDS):
            self.ask(kind, self.requests(kind, rng, LONG))
        self.with_cache()
        self.cancelled(KINDS[number % len(KINDS)])
        self.out_of_memory()
        self.not_finite()
        if number % SECOND_MODEL_EVERY == 1:
            self.second_model()
        if number % LONGEST_EVERY == LONGEST_EVERY // 2:
            self.longest()

    def with_cache(self) -> None:
        """Ask half of the requests, then all of them, through a cache."""
        requests = self.requests("loglikelihood", self.rng, 500)
        path = self.folder / "cache.db"
        path.unlink(missing_ok=True)
        for asked in (requests[: len(requests) // 2], requests):
            cached = CachingLM(self.lm, str(path))
            with contextlib.redirect_stderr(open(os.devnull, "w")) as quiet, quiet:
                self.ask("loglikelihood", asked, cached)
            cached.dbdict.close()
            self.lm.set_cache_hook(CacheHook(None))  # type: ignore[arg-type]

    def cancelled(self, kind: str) -> None:
        """Interrupt requests by SIGALRM, handled as Ctrl-C, at a random time."""
        requests = self.requests(kind, self.rng, LONG)
        with contextlib.suppress(KeyboardInterrupt):
            try:
                signal.setitimer(signal.ITIMER_REAL, float(self.rng.uniform(0.001, 1.5)))
                self.ask(kind, requests)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)

    def out_of_memory(self) -> None:
        """Raise an out-of-memory error in the second step; the engine retries smaller steps."""
        calls = iter([None, RuntimeError("out of memory")])

        def read(original: Callable[..., Any], *arguments: Any) -> Any:
            if error := next(calls, None):
                raise error
            return original(*arguments)

        with self._runner_with("read", read):
            self.ask("loglikelihood", self.requests("loglikelihood", self.rng, LONG))

    def not_finite(self) -> None:
        """Make every answer NaN and assert that the engine raises NotFinite."""

        def score(original: Callable[..., Any], *arguments: Any) -> Any:
            logprobs, greedy = original(*arguments)
            return np.full_like(logprobs, np.nan), greedy

        with self._runner_with("score", score):
            try:
                self.ask("loglikelihood", self.requests("loglikelihood", self.rng, 100))
            except NotFinite:
                return
        raise AssertionError("answers that are NaN were not named")

    @contextlib.contextmanager
    def _runner_with(self, name: str, function: Callable[..., Any]) -> Iterator[None]:
        runner: Any = self.lm.runner
        original = getattr(runner, name)
        setattr(runner, name, lambda *arguments: function(original, *arguments))
        try:
            yield
        finally:
            delattr(runner, name)

    def second_model(self) -> None:
        """Load another model, score a text, and drop the model."""
        Evaluator(CHECKPOINT, framework=self.framework).score([self.text(1000, self.rng)])


def _rolling(text: str) -> Instance:
    return Instance("loglikelihood_rolling", {}, (text,), 0)


def main() -> int:
    tune_process()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--framework", choices=("torch", "jax"), required=True)
    parser.add_argument("--minutes", type=float, default=45)
    parser.add_argument("--out", type=Path, default=Path("build/soak"), help="folder for a table")
    given = parser.parse_args()
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    given.out.mkdir(parents=True, exist_ok=True)
    started, samples, wrong = time.monotonic(), [], 0
    with (
        tempfile.TemporaryDirectory() as folder,
        (given.out / f"{given.framework}.csv").open("w", newline="", encoding="utf-8") as file,
    ):
        table = csv.writer(file)
        table.writerow(Sample._fields)
        soak = Soak(given.framework, Path(folder))
        first, first_longest = soak.probe(), soak.longest()
        while not samples or time.monotonic() - started < 60 * given.minutes:
            soak.cycle(len(samples))
            same = soak.probe() == first
            wrong += not same
            samples.append(sample(started))
            table.writerow(samples[-1])
            file.flush()
            now = samples[-1]
            print(
                f"{given.framework} cycle {len(samples)}, {now.seconds / 60:.1f} minutes: "
                f"{now.memory / 1e6:.1f} MB, {now.files} files, {now.threads} threads, "
                f"{soak.lm.runner.compilations} compilations, "
                f"answers {'the same' if same else 'OTHERS'}",
                flush=True,
            )
        wrong += soak.longest() != first_longest
    line, flat = verdict(samples)
    asked = ", ".join(f"{count} {kind}" for kind, count in soak.counts.items())
    print(f"{given.framework}: {line}")
    print(f"{given.framework}: {asked}; answers unlike the first ones: {wrong}")
    return 0 if flat and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
