"""The model's own speed on the CPU, compared with the public implementations and the limits.

Every implementation has the same weights and a separate process, and they take turns: each round
measures the limits, and every workload in every implementation. There are two kinds of work:

- *prefill*: read one document from its start, into a state to decode from, with the logits of its
  last position or of all. DeepMind's code returns all logits or none: without all, none.
- *decode*: read one more token in every row, for its logits, from a state that has read as many
  tokens as attention sees.

The limit of prefill is the time of its matrix products (`benchmarks.model_flops`) at the best rate
of either framework in the same round for the shapes of the MLP. The limit of decoding is the time
of its products at that rate, or of the weights' bytes at the best reading rate, whichever is
longer. The logits of all implementations are compared at some positions of the document, and at the
first decoded tokens.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.commands import Interpreter, tell
from benchmarks.model.implementations import PEER_NEEDS
from benchmarks.model_flops import logit_flops, reading_flops
from benchmarks.peers import Absent, left_out
from benchmarks.products import Dtype
from benchmarks.random_checkpoint import write_weights
from benchmarks.report import Report, Row
from benchmarks.timing import Job, interleave, ratios, spread
from griffin_eval.analysis.cache_sizes import parameter_bytes
from griffin_eval.config import GriffinConfig
from griffin_eval.errors import ArgumentError

FRAMEWORKS = ("torch", "jax")
NEEDS = {"torch": ("torch",), "jax": ("jax", "flax")} | PEER_NEEDS  # modules to import
# Largest difference of logits over the largest logit. In 16 bits implementations round differently.
TOLERANCES = {"float32": 5e-5, "bfloat16": 0.1, "float16": 0.02}


Key = tuple[str, str]  # workload and implementation, or limit and framework


class Workload(NamedTuple):
    """A request to `benchmarks.model.worker.Worker` that is timed, and the least work for it.

    Attributes:
        flops: Operations of the products of matrices.
        nbytes: Bytes of the weights where reading them may take longer, or 0.
    """

    name: str
    request: dict[str, Any]
    tokens: int
    flops: int
    nbytes: int


def make_config(
    *, width: int, layers: int, heads: int, vocab_size: int, visible_keys: int
) -> GriffinConfig:
    """Return a RecurrentGemma of this size, which every implementation can express."""
    return GriffinConfig(
        vocab_size=vocab_size,
        width=width,
        mlp_width=3 * width,
        num_heads=heads,
        num_layers=layers,
        lru_width=width,
        gate_blocks=heads,
        visible_keys=visible_keys,
    )


@dataclass
class Bench:
    """A run of the benchmark."""

    config: GriffinConfig
    tokens: int  # length of the document
    batches: list[int]  # numbers of rows that are decoded together
    steps: int  # tokens decoded in a round
    chosen: Collection[str]  # names of NEEDS
    dtype: Dtype
    pythons: list[Interpreter]
    _absent: dict[str, str] = field(default_factory=dict)

    def run(self, rounds: int, report: Report) -> bool:
        """Measure, and return whether the logits of all implementations agree.

        Raises:
            ArgumentError: None of this package's implementations can be measured.
            Failed: An implementation did not come to its end.
        """
        with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
            folder = Path(temporary)
            write_weights(self.config, folder)
            jobs = self._start(folder, stack)
            timed: dict[Key, Callable[[], float]] = {
                (work.name, name): partial(job.ask, **work.request)
                for work in self._workloads
                for name, job in jobs.items()
            }
            results = interleave(rounds, self._limit_measurements(jobs) | timed, tell)
            stack.close()
            rates = {limit: _best(limit, results) for limit in ("products", "bandwidth")}
            title = f"{self.dtype}, {len(os.sched_getaffinity(0))} threads, tokens/s"
            report.tables[title] = [
                self._row(work, name, results, rates, list(jobs))
                for work in self._workloads
                for name in jobs
            ]
            products, reading = (
                spread([rate / 1e9 for rate in values]) for values in rates.values()
            )
            report.notes.append(f"rooflines: products {products} GFLOP/s, reading {reading} GB/s")
            report.notes += [left_out(name, reason) for name, reason in self._absent.items()]
            return self._compare(folder, list(jobs), report)

    @property
    def _workloads(self) -> list[Workload]:
        read = reading_flops(self.config, np.arange(self.tokens))
        logits = logit_flops(self.config)
        works = []
        for name, every in (("prefill", False), ("prefill, all logits", True)):
            request = {"do": "read", "tokens": self.tokens, "every": every}
            flops = read + logits * (self.tokens if every else 1)
            works.append(Workload(name, request, self.tokens, flops, 0))
        step = reading_flops(self.config, np.array([self.config.visible_keys - 1])) + logits
        for batch in self.batches:
            request = {"do": "decode", "batch": batch, "steps": self.steps}
            name = f"decode, batch {batch}"
            works.append(Workload(name, request, batch, batch * step, self._weight_bytes))
        return works

    @property
    def _weight_bytes(self) -> int:
        return parameter_bytes(self.config, 4 if self.dtype == "float32" else 2)

    def _implementations(self) -> dict[str, tuple[str, str]]:
        """Return the worker's name and the interpreter of each implementation."""
        names: dict[str, tuple[str, str]] = {}
        for name in (name for name in NEEDS if name in self.chosen):
            if name in FRAMEWORKS:
                names |= {python.named(name): (name, python.path) for python in self.pythons}
            else:
                names[name] = (name, sys.executable)
        return names

    def _start(self, folder: Path, stack: ExitStack) -> dict[str, Job]:
        """Start a warm process for each implementation; record missing or broken ones in
        ``_absent``."""
        jobs = {}
        for name, (worker, python) in self._implementations().items():
            tell(f"loading and compiling: {name}")
            arguments, environment = (worker, str(folder), self.dtype), {"JAX_PLATFORMS": "cpu"}
            job = Job("benchmarks.model.worker", *arguments, environment=environment, python=python)
            stack.enter_context(job)
            try:
                job.ask("load")
            except Absent as reason:
                self._absent[name] = str(reason)
                continue
            jobs[name] = job
            sizes = {"batches": self.batches, "prompt": self.config.visible_keys}
            path = str(folder / f"{_file(name)}.npz")
            job.ask("check", tokens=self.tokens, path=path, **sizes)
        if not any(map(is_ours, jobs)):
            raise ArgumentError("limits need one of ours, torch or jax, chosen and installed")
        return jobs

    def _limit_measurements(self, jobs: Mapping[str, Job]) -> dict[Key, Callable[[], float]]:
        sizes = {"width": self.config.width, "mlp_width": self.config.mlp_width}
        requests = {
            "products": {"tokens": self.tokens} | sizes,
            "bandwidth": {"nbytes": self._weight_bytes},
        }
        measurements: dict[Key, Callable[[], float]] = {}
        for framework in FRAMEWORKS:
            names = [name for name in jobs if name.startswith(f"griffin {framework}")]
            for limit, request in requests.items() if names else ():
                ask = partial(jobs[names[0]].ask, limit, framework=framework, **request)
                measurements[limit, framework] = ask
        return measurements

    def _row(
        self,
        work: Workload,
        name: str,
        results: Mapping[Key, list[float]],
        rates: Mapping[str, list[float]],
        names: list[str],
    ) -> Row:
        seconds = results[work.name, name]
        limits = [
            max(work.flops / products, work.nbytes / reading)
            for products, reading in zip(rates["products"], rates["bandwidth"], strict=True)
        ]
        row: dict[str, Any] = {
            "workload": work.name,
            "implementation": name,
            "tokens/s": [work.tokens / taken for taken in seconds],
            "of roofline": ratios(limits, seconds),
        }
        for peer in (peer for peer in names if not is_ours(peer) and is_ours(name)):
            row[f"over {peer}"] = ratios(results[work.name, peer], seconds)
        return row

    def _compare(self, folder: Path, names: list[str], report: Report) -> bool:
        """Note how far logits are from the reference's, and return whether all of them agree.

        The reference is the first peer, or else the first implementation.
        """
        reference = next((name for name in names if not is_ours(name)), names[0])
        arrays = {name: np.load(folder / f"{_file(name)}.npz") for name in names}
        tolerance, agree = TOLERANCES[self.dtype], True
        for work, expected in arrays.pop(reference).items():
            pairs = []
            for name, logits in arrays.items():
                if work in logits:
                    far = float(np.abs(logits[work] - expected).max() / np.abs(expected).max())
                    agree &= far <= tolerance
                    pairs.append(f"{name} - {reference} {far:.1e}")
            text = ", ".join(pairs) or "one model only"
            report.notes.append(f"largest difference of logits, {work}: {text}")
        same = "agree" if agree else "do NOT agree"
        report.notes.append(f"the logits {same} within {tolerance:g} of the largest")
        return agree


def _best(limit: str, results: Mapping[Key, list[float]]) -> list[float]:
    """Return the best rate of either framework in each round."""
    ways = [values for key, values in results.items() if key[0] == limit]
    return [max(rates) for rates in zip(*ways, strict=True)]


def is_ours(name: str) -> bool:
    """Return whether an implementation, by its name in tables, is this package's."""
    return name.startswith("griffin ")


def _file(name: str) -> str:
    return name.replace(" ", "-").replace("/", "-")
