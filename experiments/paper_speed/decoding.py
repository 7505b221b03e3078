"""Measures decoding steps of the three models, each in a process of its own, taking turns.

Every step is timed at the context it belongs to: the state is filled as if so many tokens had been
read, and some tokens are sampled from there. The time to sample many tokens is the sum of the times
of their steps, where those between two measured contexts lie on a straight line, as bytes and
operations do.
"""

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from benchmarks.peers import Absent
from benchmarks.timing import Job
from experiments.paper_speed.byte_model import Rates, filled
from experiments.paper_speed.models import ITEMSIZE
from griffin_eval.analysis.cache_sizes import parameter_bytes
from griffin_eval.config import GriffinConfig

WORKER = "experiments.paper_speed.decode_worker"
PEER = "transformers"  # has RecurrentGemma alone, and is measured beside Griffin
PRODUCT_ROWS = 2048  # of the products that give the best rate


class Point(NamedTuple):
    """A step that is measured.

    Attributes:
        framework: torch, jax or transformers.
        model: one of `experiments.paper_speed.models.PATTERNS`.
        batch: rows.
        context: tokens that they have read, `experiments.paper_speed.byte_model.filled`.
    """

    framework: str
    model: str
    batch: int
    context: int


class Measured(NamedTuple):
    """What was found.

    Attributes:
        models: configs by name.
        steps: float64 [rounds], seconds of each point.
        rates: the best of the machine: medians of the rounds.
        state_bytes: bytes of a document's state of `Measured.longest` tokens, of ours.
        longest: the longest context that was asked for.
        absent: why frameworks are left out, by name.
        device: that all ran on.
        threads: processors that this process may use.
    """

    models: Mapping[str, GriffinConfig]
    steps: dict[Point, np.ndarray]
    rates: Rates
    state_bytes: dict[tuple[str, str], int]
    longest: int
    absent: dict[str, str]
    device: str
    threads: int

    def runners(self) -> list[tuple[str, str]]:
        """Pairs of framework and model that were measured, in order."""
        return list(dict.fromkeys((point.framework, point.model) for point in self.steps))

    def step_seconds(
        self, framework: str, model: str, batch: int, contexts: np.ndarray
    ) -> np.ndarray:
        """float64 [rounds, N], seconds of a step at each of N contexts between measured ones."""
        points = sorted(p for p in self.steps if p[:3] == (framework, model, batch))
        knots = [point.context for point in points]
        seconds = np.stack([self.steps[point] for point in points], 1)
        return np.stack([np.interp(contexts, knots, each) for each in seconds])


def measure(
    models: Mapping[str, GriffinConfig],
    frameworks: Iterable[str],
    wanted: Mapping[str, Iterable[tuple[int, int]]],
    *,
    steps: int,
    rounds: int,
    device: str,
    say: Any,
) -> Measured:
    """Times the steps in rounds; in each, every point in every framework in turn.

    Args:
        models: configs by name.
        frameworks: torch, jax or both; transformers is measured beside torch.
        wanted: batches and contexts of each model.
        steps: that are timed at each point.
        rounds: times that each point is measured.
        device: as the frameworks name it.
        say: called with a line about each stage.

    Raises:
        ArgumentError: no framework is left, or one finds no such device.
        Failed: a process did not come to its end.
    """
    contexts = {
        name: sorted({(batch, filled(models[name], context)) for batch, context in pairs})
        for name, pairs in wanted.items()
    }
    longest = max(context for pairs in wanted.values() for _, context in pairs)
    pairs = [(framework, name) for framework in frameworks for name in models]
    if "torch" in frameworks and device == "cpu":
        pairs.append((PEER, "griffin"))
    absent: dict[str, str] = {}
    seconds: dict[Point, list[float]] = {}
    rates: dict[str, list[float]] = {"reading": [], "products": []}
    with ExitStack() as stack:
        jobs: dict[tuple[str, str], Job] = {}
        for framework, name in pairs:
            say(f"loading: {framework}, {name}")
            config = json.dumps(models[name].__dict__)
            environment = {"JAX_PLATFORMS": "cpu"} if device == "cpu" else None
            job = stack.enter_context(
                Job(WORKER, framework, config, device, environment=environment)
            )
            try:
                job.ask("load")
            except Absent as reason:
                absent[framework] = str(reason)
                continue
            jobs[framework, name] = job
        ours = {pair: job for pair, job in jobs.items() if pair[0] != PEER}
        one_each = {framework: job for (framework, _), job in ours.items()}
        nbytes = parameter_bytes(models["mqa"], ITEMSIZE)
        for number in range(rounds):
            for kind, request in (
                ("reading", {"nbytes": nbytes}),
                ("products", {"tokens": PRODUCT_ROWS}),
            ):
                ways = [job.ask(kind, **request) for job in one_each.values()]
                rates[kind].append(max(rate for way in ways for rate in way.values()))
            for batch in sorted({batch for pairs in contexts.values() for batch, _ in pairs}):
                say(f"round {number + 1} of {rounds}: batch {batch}")
                for context in sorted({n for pairs in contexts.values() for _, n in pairs}):
                    for (framework, name), job in jobs.items():
                        if (batch, context) in contexts[name]:
                            point = Point(framework, name, batch, context)
                            taken = job.ask("steps", batch=batch, context=context, steps=steps)
                            seconds.setdefault(point, []).append(taken)
        state_bytes = {pair: job.ask("state_bytes", context=longest) for pair, job in ours.items()}
    return Measured(
        models,
        {point: np.array(taken) for point, taken in seconds.items()},
        Rates(float(np.median(rates["reading"])), float(np.median(rates["products"]))),
        state_bytes,
        longest,
        absent,
        device,
        processors(),
    )


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))
