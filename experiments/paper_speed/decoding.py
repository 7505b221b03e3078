"""Measurements of decoding steps of the three models, each in a separate process, in turn.

Each step is timed at its context: the state is filled as after that many tokens, and some tokens
are sampled from it. The time to sample many tokens is the sum of the times of their steps,
interpolated linearly between the measured contexts, since bytes and operations are linear.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks.commands import tell
from benchmarks.timing import Job, interleave
from experiments.paper_speed.byte_model import Rates, filled
from experiments.paper_speed.models import ITEMSIZE
from griffin_eval.analysis.cache_sizes import parameter_bytes
from griffin_eval.config import GriffinConfig

PEER = "transformers"  # It has no Hawk and no Transformer, so it is measured beside Griffin only.
PRODUCT_ROWS = 2048  # rows of the matrix products that give the best rate


class Point(NamedTuple):
    """A decoding step to measure: its rows, and the tokens of each row before it (`filled`)."""

    framework: str
    model: str
    batch: int
    context: int


class Measured(NamedTuple):
    """Measurements of decoding.

    Attributes:
        models: Configs by name.
        steps: Seconds of each point, float64 [rounds].
        rates: Best rates of the machine, medians of the rounds.
        state_bytes: Bytes of a document's state of ``longest`` tokens, by framework and model.
        longest: Longest context.
        device: Device of all measurements.
    """

    models: Mapping[str, GriffinConfig]
    steps: dict[Point, np.ndarray]
    rates: Rates
    state_bytes: dict[tuple[str, str], int]
    longest: int
    device: str

    def runners(self) -> list[tuple[str, str]]:
        """Return the pairs of framework and model, in the order of the measurements."""
        return list(dict.fromkeys((point.framework, point.model) for point in self.steps))

    def step_seconds(
        self, framework: str, model: str, batch: int, contexts: np.ndarray
    ) -> np.ndarray:
        """Return the seconds of a step, float64 [rounds, N], at each of N contexts."""
        points = sorted(p for p in self.steps if p[:3] == (framework, model, batch))
        knots = [point.context for point in points]
        rounds = np.stack([self.steps[point] for point in points], 1)
        return np.stack([np.interp(contexts, knots, seconds) for seconds in rounds])


def baseline(framework: str) -> str:
    """Return the framework whose Transformer a framework is compared with."""
    return "torch" if framework == PEER else framework


def measure(
    models: Mapping[str, GriffinConfig],
    frameworks: Sequence[str],
    grid: Mapping[str, Iterable[tuple[int, int]]],
    rounds: int,
    device: str,
) -> Measured:
    """Time every step of the batches and contexts of ``grid`` in every framework in turn.

    transformers is measured beside torch on the CPU.
    """
    runners = [(framework, name) for framework in frameworks for name in models]
    if "torch" in frameworks and device == "cpu":
        runners.append((PEER, "griffin"))
    longest = max(context for points in grid.values() for _, context in points)
    nbytes = parameter_bytes(models["mqa"], ITEMSIZE)
    with ExitStack() as stack:
        jobs = {}
        for framework, name in runners:
            tell(f"loading: {framework}, {name}")
            job = start("decoding_worker", models[name], device, framework)
            jobs[framework, name] = stack.enter_context(job)
            job.ask("load")
        mqa = [jobs[framework, "mqa"] for framework in frameworks]
        measurements: dict[Any, Callable[[], float]] = {
            "reading": partial(_best_rate, mqa, "reading", nbytes=nbytes),
            "products": partial(_best_rate, mqa, "products", tokens=PRODUCT_ROWS),
        }
        points = [
            Point(*runner, batch, filled(models[runner[1]], context))
            for runner in runners
            for batch, context in grid[runner[1]]
        ]
        for point in sorted(points, key=lambda point: (point.batch, point.context)):
            sizes = {"batch": point.batch, "context": point.context}
            measurements[point] = partial(jobs[point[:2]].ask, "steps", **sizes)
        seconds = interleave(rounds, measurements, tell)
        rates = Rates(*(float(np.median(seconds.pop(kind))) for kind in ("reading", "products")))
        state_bytes = {
            pair: job.ask("state_bytes", context=longest)
            for pair, job in jobs.items()
            if pair[0] != PEER
        }
    steps = {point: np.array(taken) for point, taken in seconds.items()}
    return Measured(models, steps, rates, state_bytes, longest, device)


def start(worker: str, config: GriffinConfig, device: str, *arguments: str) -> Job:
    """Start a worker process for a model; accelerators are hidden if the device is the CPU."""
    environment = {"JAX_PLATFORMS": "cpu"} if device == "cpu" else None
    fields = json.dumps(config.__dict__)
    module = f"experiments.paper_speed.{worker}"
    return Job(module, fields, device, *arguments, environment=environment)


def _best_rate(jobs: Sequence[Job], kind: str, **sizes: int) -> float:
    return max(rate for job in jobs for rate in job.ask(kind, **sizes).values())


def machine(device: str) -> dict[str, Any]:
    """Return the device and the number of processors, as results have them."""
    return {"device": device, "threads": len(os.sched_getaffinity(0))}
