"""Section 5.1: the time to sample tokens behind a prompt, beside the byte model's."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.paper_speed import predictions
from experiments.paper_speed.byte_model import (
    Rates,
    cache_bound_from,
    compute_bound_from,
    faster_from,
    formula_bytes,
    step_costs,
)
from experiments.paper_speed.decoding import PEER, Measured
from experiments.paper_speed.models import DTYPE, RECURRENT
from griffin_eval.config import GriffinConfig


def contexts_to_measure(
    models: Mapping[str, GriffinConfig], prompts: Iterable[int], sampled: Iterable[int]
) -> list[int]:
    """The contexts whose steps are timed: where prompts end, where samples end, and where the
    window of local attention is full."""
    window = models["griffin"].visible_keys - 1
    ends = {prompt + n for prompt in prompts for n in sampled}
    contexts = {*prompts, *ends}
    return sorted(contexts | ({window} if min(contexts) < window < max(contexts) else set()))


def results(
    measured: Measured, prompts: Sequence[int], sampled: Sequence[int], batches: Sequence[int]
) -> dict[str, Any]:
    """What was found, as it is written in JSON. Times are seconds, sizes bytes, rates per second.

    Args:
        measured: at all `contexts_to_measure` for all batches.
        prompts: tokens that were read before.
        sampled: numbers of tokens.
        batches: numbers of rows.
    """
    rows, crossings = [], []
    for batch in batches:
        for framework, name in measured.runners():
            config = measured.models[name]
            for prompt in prompts:
                contexts = np.arange(prompt, prompt + max(sampled))
                totals = measured.step_seconds(framework, name, batch, contexts).cumsum(1)
                costs = step_costs(config, batch, contexts)
                least = costs.seconds(measured.rates).cumsum()
                nbytes, flops = costs.nbytes.cumsum(), costs.flops.cumsum()
                for n in sampled:
                    seconds = float(np.median(totals[:, n - 1]))
                    row = {
                        "batch": batch,
                        "prompt": prompt,
                        "sampled": n,
                        "framework": framework,
                        "model": name,
                        "seconds": seconds,
                        "fastest": float(totals[:, n - 1].min()),
                        "slowest": float(totals[:, n - 1].max()),
                        "seconds_per_token": seconds / n,
                        "modelled_seconds": float(least[n - 1]),
                        "bytes_per_step": float(nbytes[n - 1] / n),
                        "bandwidth": float(nbytes[n - 1] / seconds),
                        "of_bandwidth": float(nbytes[n - 1] / seconds / measured.rates.bandwidth),
                        "flops": float(flops[n - 1] / seconds),
                    }
                    rows.append(row)
                if name in RECURRENT:
                    crossings.append(_crossing(measured, framework, name, batch, contexts))
    _compare_with_mqa(rows)
    return {
        "device": measured.device,
        "threads": measured.threads,
        "dtype": DTYPE,
        "rates": measured.rates._asdict(),
        "latencies": rows,
        "crossings": crossings,
        "bounds": [
            {"batch": batch, "model": name, "cache_bound_from": cache_bound_from(config, batch)}
            for batch in batches
            for name, config in measured.models.items()
        ],
        "compute_bound_from_batch": {
            name: compute_bound_from(config, measured.rates, 0)
            for name, config in measured.models.items()
        },
        "steps": steps_measured(measured),
        "states": states_measured(measured),
        "absent": measured.absent,
        "predictions": predictions.latencies(),
    }


def steps_measured(measured: Measured) -> list[dict[str, Any]]:
    """Every measured step beside the model's, with the model's time by its bytes alone."""
    rows = []
    for point, seconds in measured.steps.items():
        config = measured.models[point.model]
        costs = step_costs(config, point.batch, np.array([point.context]))
        bytes_alone = costs.seconds(Rates(measured.rates.bandwidth, np.inf))
        rows.append(
            point._asdict()
            | {
                "seconds": seconds.tolist(),
                "modelled_seconds": float(costs.seconds(measured.rates)[0]),
                "modelled_by_bytes": float(bytes_alone[0]),
            }
        )
    return rows


def states_measured(measured: Measured) -> list[dict[str, Any]]:
    """The bytes of the states that our models have, beside the formulas of F.4."""
    return [
        {
            "framework": framework,
            "model": name,
            "tokens": measured.longest,
            "bytes": nbytes,
            "formula_bytes": formula_bytes(measured.models[name], measured.longest),
        }
        for (framework, name), nbytes in measured.state_bytes.items()
    ]


def _crossing(
    measured: Measured, framework: str, name: str, batch: int, contexts: np.ndarray
) -> dict[str, Any]:
    """From how many sampled tokens on a model is faster than the Transformer; None: never here."""
    baseline = "torch" if framework == PEER else framework
    ours, mqa = (
        np.median(measured.step_seconds(where, model, batch, contexts), 0)
        for where, model in ((framework, name), (baseline, "mqa"))
    )
    least = {
        model: step_costs(measured.models[model], batch, contexts).seconds(measured.rates)
        for model in (name, "mqa")
    }
    return {
        "batch": batch,
        "prompt": int(contexts[0]),
        "framework": framework,
        "model": name,
        "faster_from": faster_from(ours, mqa),
        "modelled_faster_from": faster_from(least[name], least["mqa"]),
    }


def _compare_with_mqa(rows: list[dict[str, Any]]) -> None:
    """Adds the Transformer's time over that of each row; transformers' is compared with torch's."""

    def key(row: dict[str, Any], framework: str) -> tuple:
        return framework, row["batch"], row["prompt"], row["sampled"]

    mqa = {key(row, row["framework"]): row for row in rows if row["model"] == "mqa"}
    for row in rows:
        baseline = mqa[key(row, "torch" if row["framework"] == PEER else row["framework"])]
        for kind in ("seconds", "modelled_seconds"):
            row[f"mqa_over_{kind}"] = baseline[kind] / row[kind]
