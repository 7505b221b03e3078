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
from griffin_eval.config import GriffinConfig
from griffin_eval.errors import ArgumentError
from griffin_eval.layout import param_specs

FRAMEWORKS = ("torch", "jax")
NEEDS = {"torch": ("torch",), "jax": ("jax", "flax")} | PEER_NEEDS  # modules to import
# Largest difference of logits over the largest logit. In 16 bits implementations round differently.
TOLERANCES = {"float32": 5e-5, "bfloat16": 0.1, "float16": 0.02}


class Workload(NamedTuple):
    """Work to be timed."""

    name: str
    request: dict[str, Any]  # request to `benchmarks.model.worker.Worker`
    tokens: int  # tokens that it reads
    flops: int  # operations of its matrix products
    nbytes: int  # bytes of the weights if reading them may take longer, otherwise 0


def make_config(
    *, width: int, layers: int, heads: int, vocab_size: int, visible_keys: int
) -> GriffinConfig:
    """Return a RecurrentGemma of this size, which every implementation supports."""
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
        """Measure; return whether the logits of all implementations agree."""
        with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
            folder = Path(temporary)
            write_weights(self.config, folder)
            jobs = self._start(folder, stack)
            limits = self._limit_measurements(jobs)
            timed: dict[tuple[str, str], Callable[[], float]] = {
                (work.name, name): partial(job.ask, **work.request)
                for work in self._workloads
                for name, job in jobs.items()
            }
            results = interleave(rounds, limits | timed, tell)
            stack.close()
            differences = self._differences(folder, list(jobs))
        rates = {limit: _best(limit, results) for limit in ("products", "bandwidth")}
        title = f"{self.dtype}, {len(os.sched_getaffinity(0))} threads, tokens/s"
        report.tables[title] = [
            self._row(work, name, results, rates, list(jobs))
            for work in self._workloads
            for name in jobs
        ]
        gigas = {limit: spread([rate / 1e9 for rate in values]) for limit, values in rates.items()}
        report.notes.append(
            f"rooflines: products {gigas['products']} GFLOP/s, reading {gigas['bandwidth']} GB/s"
        )
        report.notes += [left_out(name, reason) for name, reason in self._absent.items()]
        return self._compare(differences, report)

    @property
    def _workloads(self) -> list[Workload]:
        read = reading_flops(self.config, np.arange(self.tokens))
        logits = logit_flops(self.config)
        works = [
            Workload(
                "prefill" + ", all logits" * every,
                {"do": "read", "tokens": self.tokens, "every": every},
                self.tokens,
                read + logits * (self.tokens if every else 1),
                0,
            )
            for every in (False, True)
        ]
        step = reading_flops(self.config, np.array([self.config.visible_keys - 1])) + logits
        for batch in self.batches:
            request = {"do": "decode", "batch": batch, "steps": self.steps}
            name = f"decode, batch {batch}"
            works.append(Workload(name, request, batch, batch * step, self._weight_bytes))
        return works

    @property
    def _weight_bytes(self) -> int:
        return sum(
            spec.size * (4 if spec.keep_float32 or self.dtype == "float32" else 2)
            for spec in param_specs(self.config).values()
        )

    def _implementations(self) -> dict[str, tuple[str, str]]:
        """Return the worker's name and the interpreter of each implementation."""
        names: dict[str, tuple[str, str]] = {}
        for name in (name for name in NEEDS if name in self.chosen):
            if name not in FRAMEWORKS:
                names[name] = (name, sys.executable)
                continue
            for python in self.pythons:
                names[python.named(name)] = (name, python.path)
        return names

    def _start(self, folder: Path, stack: ExitStack) -> dict[str, Job]:
        """Start a warm process for each implementation; record missing or broken ones in
        ``_absent``."""
        jobs = {}
        for name, (worker, python) in self._implementations().items():
            tell(f"loading and compiling: {name}")
            job = stack.enter_context(
                Job(
                    "benchmarks.model.worker",
                    *(worker, str(folder), self.dtype),
                    environment={"JAX_PLATFORMS": "cpu"},
                    python=python,
                )
            )
            try:
                job.ask("load")
            except Absent as reason:
                self._absent[name] = str(reason)
                continue
            jobs[name] = job
            job.ask(
                "check",
                tokens=self.tokens,
                batches=self.batches,
                prompt=self.config.visible_keys,
                path=str(folder / f"{_file(name)}.npz"),
            )
        if not any(map(is_ours, jobs)):
            raise ArgumentError("limits need one of ours, torch or jax, chosen and installed")
        return jobs

    def _limit_measurements(
        self, jobs: Mapping[str, Job]
    ) -> dict[tuple[str, str], Callable[[], float]]:
        sizes = {"width": self.config.width, "mlp_width": self.config.mlp_width}
        measurements: dict[tuple[str, str], Callable[[], float]] = {}
        for framework in FRAMEWORKS:
            name = next((name for name in jobs if name.startswith(f"griffin {framework}")), None)
            if name is None:
                continue
            ask = partial(jobs[name].ask, framework=framework)
            measurements["products", framework] = partial(
                ask, "products", tokens=self.tokens, **sizes
            )
            measurements["bandwidth", framework] = partial(
                ask, "bandwidth", nbytes=self._weight_bytes
            )
        return measurements

    def _row(
        self,
        work: Workload,
        name: str,
        results: Mapping[tuple[str, str], list[float]],
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

    def _differences(self, folder: Path, names: list[str]) -> dict[str, dict[str, float]]:
        """Return the differences of logits from the reference, over the largest logit.

        The reference is the first peer, or else the first implementation.
        """
        reference = next((name for name in names if not is_ours(name)), names[0])
        arrays = {name: np.load(folder / f"{_file(name)}.npz") for name in names}
        expected = arrays.pop(reference)
        return {
            work: {
                f"{name} - {reference}": float(
                    np.abs(found[work] - expected[work]).max() / np.abs(expected[work]).max()
                )
                for name, found in arrays.items()
                if work in found
            }
            for work in expected
        }

    def _compare(self, differences: Mapping[str, Mapping[str, float]], report: Report) -> bool:
        tolerance = TOLERANCES[self.dtype]
        for work, pairs in differences.items():
            text = ", ".join(f"{pair} {value:.1e}" for pair, value in pairs.items())
            report.notes.append(f"largest difference of logits, {work}: {text or 'one model only'}")
        agree = all(d <= tolerance for pairs in differences.values() for d in pairs.values())
        same = "agree" if agree else "do NOT agree"
        report.notes.append(f"the logits {same} within {tolerance:g} of the largest")
        return agree


def _best(limit: str, results: Mapping[tuple[str, str], list[float]]) -> list[float]:
    """Return the best rate of either framework in each round."""
    ways = [values for key, values in results.items() if key[0] == limit]
    return [max(rates) for rates in zip(*ways, strict=True)]


def is_ours(name: str) -> bool:
    """Return whether an implementation, by its name in tables, is this package's."""
    return name.startswith("griffin ")


def _file(name: str) -> str:
    return name.replace(" ", "-").replace("/", "-")
