"""The model's own speed on the CPU, beside the public implementations and the limits.

Every implementation has the same weights and a process of its own, and they take turns: in each
round first the limits, then every workload in every implementation. Two kinds of work:

- *prefill*: one document is read from its start, into a state to decode from, with the logits of
  its last position or of all. DeepMind's code gives all logits or none: without all, none.
- *decode*: every row reads one more token, for its logits, from a state that has read as many
  tokens as attention sees.

The limits: of prefill, the operations of its products of matrices (`benchmarks.flops`) at
the best rate that either framework reaches in this run on the shapes of the MLP; of decoding, of
any number of rows, those of its rows at that rate or the bytes of the weights at the best rate of
reading as many, whichever takes longer.

Times are medians of the rounds, and so are the fractions of the limits, each taken with the limit
of its own round, since a shared machine is not always equally fast. The logits of all
implementations are compared at some positions of the document, and at the first decoded tokens.
"""

import os
import statistics
import tempfile
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.model_flops import logit_flops, reading_flops
from benchmarks.peers import Absent, left_out
from benchmarks.products import Dtype
from benchmarks.random_checkpoint import write_weights
from benchmarks.timing import Job
from griffin_eval.config import GriffinConfig
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.codecs.encoding import Encoding
from griffin_eval.converters.convert import convert_checkpoint
from griffin_eval.converters.formats import FORMATS
from griffin_eval.converters.plan import make_plan
from griffin_eval.errors import ArgumentError
from griffin_eval.layout import param_specs

WORKER = "benchmarks.model.worker"
# Modules that each implementation imports, the twins first. DeepMind's torch code imports JAX.
NEEDS = {
    "torch": ("torch",),
    "torch-quantised": ("torch",),
    "jax": ("jax", "flax"),
    "jax-quantised": ("jax", "flax"),
    "transformers": ("torch", "transformers.models.recurrent_gemma.modeling_recurrent_gemma"),
    "deepmind-torch": ("torch", "jax", "flax", "recurrentgemma.torch.griffin"),
    "deepmind-jax": ("jax", "flax", "recurrentgemma.jax.griffin"),
}
TWINS = ("torch", "jax")
# Ours of a quantised checkpoint, beside the twins of the same frameworks.
QUANTISED = {"torch": "torch-quantised", "jax": "jax-quantised"}
# Of logits, as a part of the largest. In 16 bits every implementation rounds elsewhere.
TOLERANCES = {"float32": 5e-5, "bfloat16": 0.1, "float16": 0.02}


class Workload(NamedTuple):
    """Something to be timed.

    Attributes:
        name: for tables.
        request: to `benchmarks.model.worker.Worker`.
        tokens: that it reads.
    """

    name: str
    request: dict[str, Any]
    tokens: int


def workloads(tokens: int, batches: list[int], steps: int) -> list[Workload]:
    """What is timed, in this order.

    Args:
        tokens: of the document.
        batches: rows that are decoded together, each a workload.
        steps: tokens decoded in a round.
    """
    found = [
        Workload("prefill", {"do": "read", "tokens": tokens, "every": False}, tokens),
        Workload("prefill, all logits", {"do": "read", "tokens": tokens, "every": True}, tokens),
    ]
    for batch in batches:
        request = {"do": "decode", "batch": batch, "steps": steps}
        found.append(Workload(f"decode, batch {batch}", request, batch))
    return found


def make_config(
    *, width: int, layers: int, heads: int, vocab_size: int, visible_keys: int
) -> GriffinConfig:
    """A RecurrentGemma of this size, which every implementation can express.

    Raises:
        ArgumentError: sizes that do not fit together.
    """
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


class Bench:
    """A run of the benchmark.

    Args:
        config: a RecurrentGemma.
        tokens: of the document.
        batches: rows that are decoded together.
        steps: tokens decoded in a round.
        chosen: of `NEEDS`, what is measured if it is installed.
        dtype: of weights and activations.
        encoding: in which the weights are quantised; those of `QUANTISED` leave them so, of each
            framework that is chosen, and all others have them dequantised. None for weights that
            were never quantised.
    """

    def __init__(
        self,
        config: GriffinConfig,
        tokens: int,
        batches: list[int],
        steps: int,
        chosen: Collection[str],
        dtype: Dtype = "float32",
        encoding: Encoding | None = None,
    ):
        self._config, self._tokens, self._batches = config, tokens, batches
        self._workloads = workloads(tokens, batches, steps)
        self._dtype, self._encoding = dtype, encoding
        asked = {*chosen} - {*QUANTISED.values()}
        if encoding is not None:
            asked |= {QUANTISED[name] for name in TWINS if name in chosen}
        self._names = [name for name in NEEDS if name in asked]
        self.absent: dict[str, str] = {}

    def run(self, rounds: int, say: Any) -> dict[str, Any]:
        """Measures, and gives what was found as it is written in JSON.

        Args:
            rounds: measurements of everything, in turn.
            say: called with a line about each.

        Raises:
            ArgumentError: neither of this package's implementations can be measured.
            Failed: an implementation did not come to its end.
        """
        seconds: dict[tuple[str, str], list[float]] = {}
        limits: dict[str, dict[str, list[float]]] = {}
        with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
            folder = Path(temporary)
            write_weights(self._config, folder)
            if self._encoding is not None:
                self._quantise(folder, self._encoding)
            jobs = self._start(folder, stack, say)
            for number in range(rounds):
                say(f"round {number + 1} of {rounds}")
                for name in self._twins:
                    self._measure_limits(name, jobs[name], limits)
                for work in self._workloads:
                    for name, job in jobs.items():
                        measured = job.ask(**work.request)["seconds"]
                        seconds.setdefault((work.name, name), []).append(measured)
            stack.close()
            agreement = self._compare(folder)
        return self._results(seconds, limits, agreement)

    def _quantise(self, folder: Path, encoding: Encoding) -> None:
        """Quantises the weights in a folder, and dequantises them again beside that."""
        plan = make_plan(
            Checkpoint(folder), FORMATS["hf"], dtypes={"": self._dtype}, encoding=encoding
        )
        convert_checkpoint(plan, folder / "quantised")
        convert_checkpoint(
            make_plan(Checkpoint(folder / "quantised"), FORMATS["hf"]), folder / "dequantised"
        )

    def _folder_of(self, name: str, folder: Path) -> Path:
        if self._encoding is None:
            return folder
        return folder / ("quantised" if name in QUANTISED.values() else "dequantised")

    def _start(self, folder: Path, stack: ExitStack, say: Any) -> dict[str, Job]:
        """A process for each implementation, ready to be timed; those that are missing or broken
        are noted in ``absent``."""
        jobs = {}
        for name in self._names:
            say(f"loading and compiling: {name}")
            weights = str(self._folder_of(name, folder))
            job = stack.enter_context(
                Job(WORKER, name, weights, self._dtype, environment={"JAX_PLATFORMS": "cpu"})
            )
            try:
                job.ask("load")
            except Absent as reason:
                self.absent[name] = str(reason)
                continue
            jobs[name] = job
            job.ask(
                "check",
                tokens=self._tokens,
                batches=self._batches,
                prompt=self._config.visible_keys,
                path=str(folder / f"{name}.npz"),
            )
        self._names = list(jobs)
        self._twins = [name for name in TWINS if name in jobs]
        if not self._twins:
            raise ArgumentError("limits need one of ours, torch or jax, chosen and installed")
        return jobs

    def _measure_limits(
        self, framework: str, job: Job, limits: dict[str, dict[str, list[float]]]
    ) -> None:
        asked: dict[str, dict[str, Any]] = {
            "products": {"do": "products", "tokens": self._tokens},
            "reading": {"do": "bandwidth", "nbytes": self._weight_bytes},
        }
        for name, request in asked.items():
            for way, value in job.ask(framework=framework, **request).items():
                limits.setdefault(name, {}).setdefault(way, []).append(value)

    @property
    def _weight_bytes(self) -> int:
        return sum(
            spec.size * (4 if spec.keep_float32 or self._dtype == "float32" else 2)
            for spec in param_specs(self._config).values()
        )

    def _limits(self, work: Workload, limits: dict[str, dict[str, list[float]]]) -> list[float]:
        """Seconds, in each round."""

        def best(name: str, choose: Any) -> list[float]:
            return [choose(ways) for ways in zip(*limits[name].values(), strict=True)]

        if work.request["do"] == "read":
            flops = reading_flops(self._config, np.arange(self._tokens))
            flops += logit_flops(self._config) * (self._tokens if work.request["every"] else 1)
            return [flops / rate for rate in best("products", max)]
        last = np.array([self._config.visible_keys - 1])
        flops = work.tokens * (reading_flops(self._config, last) + logit_flops(self._config))
        return [
            max(flops / products, self._weight_bytes / reading)
            for products, reading in zip(best("products", max), best("reading", max), strict=True)
        ]

    def _results(
        self,
        seconds: dict[tuple[str, str], list[float]],
        limits: dict[str, dict[str, list[float]]],
        agreement: dict[str, dict[str, float]],
    ) -> dict[str, Any]:
        rows = []
        for work in self._workloads:
            least = self._limits(work, limits)
            medians = {n: statistics.median(seconds[work.name, n]) for n in self._names}
            for name, median in medians.items():
                taken = seconds[work.name, name]
                parts = [limit / each for limit, each in zip(least, taken, strict=True)]
                rows.append(
                    {
                        "workload": work.name,
                        "implementation": name,
                        "tokens_per_second": work.tokens / median,
                        "seconds": taken,
                        "of_limit": statistics.median(parts),
                        "limit_tokens_per_second": work.tokens / statistics.median(least),
                        "times": {twin: median / medians[twin] for twin in self._twins},
                    }
                )
        return {
            "config": self._config.__dict__,
            "dtype": self._dtype,
            "quantised": None if self._encoding is None else self._encoding.name,
            "threads": len(os.sched_getaffinity(0)),
            "tokens": self._tokens,
            "absent": self.absent,
            "limits": limits,
            "rows": rows,
            "largest_difference": agreement,
            "agree": all(
                d <= TOLERANCES[self._dtype] for pair in agreement.values() for d in pair.values()
            ),
        }

    def _compare(self, folder: Path) -> dict[str, dict[str, float]]:
        """Largest difference of a logit from the reference's, over the largest logit: by workload,
        of each implementation. The reference is the first that is not ours."""
        ours = {*TWINS, *QUANTISED.values()}
        reference = next((n for n in self._names if n not in ours), self._names[0])
        arrays = {name: np.load(folder / f"{name}.npz") for name in self._names}
        expected = arrays[reference]
        return {
            work: {
                f"{name} - {reference}": float(
                    np.abs(found[work] - expected[work]).max() / np.abs(expected[work]).max()
                )
                for name, found in arrays.items()
                if name != reference and work in found
            }
            for work in expected
        }


def print_results(console: Console, found: dict[str, Any]) -> None:
    """Prints what `Bench.run` found: a table of times, the rooflines, and how the logits agree."""
    twins = list(found["rows"][0]["times"])
    quantised = "" if found["quantised"] is None else f", quantised: {found['quantised']}"
    table = Table(title=f"{found['dtype']}{quantised}, {found['threads']} threads, medians")
    for heading in ("workload", "implementation"):
        table.add_column(heading, no_wrap=True)
    for heading in ("tokens/s", "roofline", "of roofline", *(f"our {twin} is" for twin in twins)):
        table.add_column(heading, justify="right")
    before = None
    for row in found["rows"]:
        if before not in (None, row["workload"]):
            table.add_section()
        name = row["implementation"]
        table.add_row(
            row["workload"] if row["workload"] != before else "",
            f"griffin {name}" if name in (*TWINS, *QUANTISED.values()) else name,
            f"{row['tokens_per_second']:.0f}",
            f"{row['limit_tokens_per_second']:.0f}",
            f"{row['of_limit']:.2f}",
            *("" if name == twin else f"{row['times'][twin]:.2f}x as fast" for twin in twins),
        )
        before = row["workload"]
    console.print(table)
    scales = {"products": (1e9, "GFLOP/s"), "reading": (1e9, "GB/s")}
    for limit, ways in found["limits"].items():
        scale, unit = scales[limit]
        medians = {way: statistics.median(values) for way, values in ways.items()}
        text = ", ".join(f"{way} {value / scale:.1f}" for way, value in medians.items())
        _line(console, f"roofline: {limit}, {unit}: {text}")
    for work, pairs in found["largest_difference"].items():
        text = ", ".join(f"{pair} {value:.1e}" for pair, value in pairs.items())
        _line(console, f"largest difference of logits, {work}: {text or 'nothing to compare'}")
    for name, reason in found["absent"].items():
        _line(console, left_out(name, reason))
    same = "agree" if found["agree"] else "do NOT agree"
    _line(console, f"the logits {same} within {TOLERANCES[found['dtype']]:g} of the largest")


def _line(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
