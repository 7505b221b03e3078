"""Measurements of decoding steps of the three models, each in a separate process, in turn.

Each step is timed at its context: the state is filled as after that many tokens, and some tokens
are sampled from it. The time to sample many tokens is the sum of the times of their steps,
interpolated linearly between the measured contexts, since bytes and operations are linear.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from benchmarks.timing import Job
from experiments.paper_speed.byte_model import Rates, filled
from experiments.paper_speed.models import ITEMSIZE
from griffin_eval.analysis.cache_sizes import parameter_bytes
from griffin_eval.config import GriffinConfig

WORKER = "experiments.paper_speed.decoding_worker"
PEER = "transformers"  # measured beside Griffin only, since it has no Hawk and no Transformer
PRODUCT_ROWS = 2048  # rows of the matrix products that give the best rate


class Point(NamedTuple):
    """A decoding step to measure.

    Attributes:
        framework: torch, jax or transformers.
        model: Name in `experiments.paper_speed.models.PATTERNS`.
        batch: Number of rows.
        context: Number of tokens of each row before the step, from `byte_model.filled`.
    """

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
    wanted: Mapping[str, Iterable[tuple[int, int]]],
    rounds: int,
    device: str,
    say: Callable[[str], Any],
) -> Measured:
    """Time every step in every framework in turn, in each round.

    Args:
        frameworks: torch, jax or both; transformers is measured beside torch on the CPU.
    """
    contexts = {
        name: sorted({(batch, filled(models[name], context)) for batch, context in points})
        for name, points in wanted.items()
    }
    longest = max(context for points in wanted.values() for _, context in points)
    runners = [(framework, name) for framework in frameworks for name in models]
    if "torch" in frameworks and device == "cpu":
        runners.append((PEER, "griffin"))
    with ExitStack() as stack:
        jobs: dict[tuple[str, str], Job] = {}
        for framework, name in runners:
            say(f"loading: {framework}, {name}")
            jobs[framework, name] = job = stack.enter_context(
                start(WORKER, models[name], device, framework)
            )
            job.ask("load")
        ours = {pair: job for pair, job in jobs.items() if pair[0] != PEER}
        seconds: dict[Point, list[float]] = {}
        rates: list[Rates] = []
        for number in range(1, rounds + 1):
            rates.append(_best_rates([ours[name, "mqa"] for name in frameworks], models["mqa"]))
            for batch, context in sorted(set().union(*contexts.values())):
                say(f"round {number} of {rounds}: batch {batch}, {context} tokens")
                for (framework, name), job in jobs.items():
                    if (batch, context) in contexts[name]:
                        point = Point(framework, name, batch, context)
                        taken = job.ask("steps", batch=batch, context=context)
                        seconds.setdefault(point, []).append(taken)
        state_bytes = {pair: job.ask("state_bytes", context=longest) for pair, job in ours.items()}
    return Measured(
        models,
        {point: np.array(taken) for point, taken in seconds.items()},
        Rates(*np.median(rates, 0).tolist()),
        state_bytes,
        longest,
        device,
    )


def start(worker: str, config: GriffinConfig, device: str, *arguments: str) -> Job:
    """Start a worker process for a model; accelerators are hidden if the device is the CPU."""
    environment = {"JAX_PLATFORMS": "cpu"} if device == "cpu" else None
    return Job(worker, json.dumps(config.__dict__), device, *arguments, environment=environment)


def _best_rates(jobs: Sequence[Job], config: GriffinConfig) -> Rates:
    nbytes = parameter_bytes(config, ITEMSIZE)
    reading = [job.ask("reading", nbytes=nbytes) for job in jobs]
    products = [job.ask("products", tokens=PRODUCT_ROWS) for job in jobs]
    return Rates(
        *(max(rate for job in kind for rate in job.values()) for kind in (reading, products))
    )


def machine(device: str) -> dict[str, Any]:
    """Return the device and the number of processors, as results have them."""
    return {"device": device, "threads": len(os.sched_getaffinity(0))}
