"""The paper's claims on speed, and whether the measurements confirm them.

A claim is made of parts that are true or not: all of them make "yes", none "no", some "in part".
Parts compare medians of the rounds. Short samples, where the Transformer may be faster, are named
with the others.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from rich.filesize import decimal

from experiments.paper_speed.decoding import PEER
from experiments.paper_speed.models import RECURRENT

Row = Mapping[str, Any]

ALIKE = 0.15  # two times are alike within this share
CLOSE = 1.5  # the byte model is close within this factor
MAX_ROWS = 128  # rows up to which section 5.1 calls decoding memory-bound
FIGURE_4_BATCH = 16
SAYS = {
    "T1": "at the shortest length Griffin and MQA train alike",
    "T2": "with longer sequences MQA gets slower and Griffin does not",
    "T3": "the narrower the model, the more MQA slows down",
    "I1": f"a step takes (parameters + batch x cache) / bandwidth, up to {MAX_ROWS} rows",
    "I2": "Hawk and Griffin sample long texts faster than MQA, the more the longer; Griffin is "
    "like Hawk",
    "I3": "Griffin and Hawk have more throughput than MQA, mostly by larger batches; Hawk more "
    "than Griffin",
    "I4": "prefill compares as training does",
    "F1": "caches: 2 N T d of attention, 2 T_WS d of a window, 4 D_RNN of a recurrent block; the "
    "Transformer turns from parameter-bound to cache-bound",
}


class Claim(NamedTuple):
    """A claim (T: section 4.3, I: section 5, F: appendix F.4), its verdict, and the numbers."""

    name: str
    says: str
    holds: str
    found: str


def _claim(name: str, parts: Iterable[bool], numbers: str) -> Claim:
    parts = list(parts)
    verdict = "yes" if all(parts) else "in part" if any(parts) else "no"
    return Claim(name, SAYS[name], verdict if parts else "not measured", numbers)


def latency_claims(findings: Row) -> list[Claim]:
    """Judge I1, I2 and F1 by the results of `latency_results`."""
    return [_steps(findings["steps"]), _latencies(findings["latencies"]), _caches(findings)]


def throughput_claims(findings: Row) -> list[Claim]:
    """Judge I1 and I3 by the results of `throughput_results`."""
    return [_steps(findings["steps"]), _throughputs(findings["throughputs"])]


def training_claims(findings: Row) -> list[Claim]:
    """Judge T1 to T3 and I4 by the results of `experiments.paper_speed.training`."""
    at = {(row["width"], row["model"], row["length"]): row for row in findings["steps"]}
    widths, _, lengths = (sorted(set(values)) for values in zip(*at, strict=True))
    short, long = lengths[0], lengths[-1]

    def slowdown(model: str) -> list[float]:
        both = ([median(at[w, model, n]["seconds"]) for n in (short, long)] for w in widths)
        return [last / first for first, last in both]

    mqa, griffin = slowdown("mqa"), slowdown("griffin")
    over = [at[width, "griffin", short]["over_mqa"] for width in widths]
    slower = [slow > 1 + ALIKE for slow in mqa] + [slow <= 1 + ALIKE for slow in griffin]
    compared = [at[width, "griffin", length] for width in widths for length in (short, long)]
    prefill, training = ([row[k] for row in compared] for k in ("prefill_over_mqa", "over_mqa"))
    times = f"{long} tokens over {short}"
    return [
        _claim("T1", map(_alike, over), f"Griffin over MQA at {short} tokens: {_shown(over)}"),
        _claim(
            "T2",
            slower if short < long else [],
            f"{times}: MQA {_shown(mqa)}; Griffin {_shown(griffin)}",
        ),
        _claim(
            "T3",
            [narrow > wide for narrow, wide in pairwise(mqa)],
            f"MQA, {times}, at widths {widths}: {_shown(mqa)}",
        ),
        _claim(
            "I4",
            [_alike(one / other) for one, other in zip(prefill, training, strict=True)],
            f"Griffin over MQA in prefill: {_shown(prefill)}; in training: {_shown(training)}",
        ),
    ]


JUDGES = {"latency": latency_claims, "throughput": throughput_claims, "training": training_claims}


def _steps(steps: Sequence[Row]) -> Claim:
    parts, texts = [], []
    for batch in sorted({step["batch"] for step in steps if step["batch"] <= MAX_ROWS}):
        ours = [s for s in steps if s["batch"] == batch and s["framework"] != PEER]
        by_bytes, modelled = (
            median(median(step["seconds"]) / step[kind] for step in ours)
            for kind in ("modelled_by_bytes", "modelled_seconds")
        )
        parts.append(1 / CLOSE <= by_bytes <= CLOSE)
        texts.append(f"batch {batch}: {by_bytes:.2f}, with products {modelled:.2f}")
    return _claim("I1", parts, f"measured over the time of the bytes: {'; '.join(texts)}")


def _latencies(rows: Sequence[Row]) -> Claim:
    batches = {row["batch"] for row in rows}
    batch = FIGURE_4_BATCH if FIGURE_4_BATCH in batches else max(batches)
    short, long = (choose(row["sampled"] for row in rows) for choose in (min, max))
    at = {
        (row["framework"], row["prompt"], row["model"], row["sampled"]): row
        for row in rows
        if row["batch"] == batch and row["framework"] != PEER
    }
    parts, texts = [], []
    for framework, prompt in dict.fromkeys(key[:2] for key in at):
        first, last = (
            [at[framework, prompt, model, count]["mqa_over_seconds"] for model in RECURRENT]
            for count in (short, long)
        )
        parts += [speed > 1 for speed in last]
        parts += [longer > shorter for shorter, longer in zip(first, last, strict=True)]
        parts.append(_alike(last[0] / last[1]))
        texts.append(
            f"{framework}, prompt {prompt}: {_shown(first)} at {short}, {_shown(last)} at {long}"
        )
    found = f"batch {batch}, speed of Griffin and Hawk over MQA's; {'; '.join(texts)}"
    return _claim("I2", parts, found)


def _throughputs(rows: Sequence[Row]) -> Claim:
    lengths = sorted({row["sampled"] for row in rows})
    parts, texts = [], []
    for framework in dict.fromkeys(row["framework"] for row in rows if row["framework"] != PEER):
        speeds = {}
        for model in RECURRENT:
            chosen = [row for row in rows if (row["framework"], row["model"]) == (framework, model)]
            over = speeds[model] = np.array([row["over_mqa"] for row in chosen])
            alone = np.array([row["over_mqa_at_its_batch"] for row in chosen])
            faster = bool((over > 1).all())
            # The gain of the larger batch, over / alone, exceeds that of cheaper steps.
            parts += [faster, faster and bool((over > alone**2).all())]
            texts.append(f"{framework}, {model}: {_shown(over)}, at MQA's batch {_shown(alone)}")
        parts.append(bool((speeds["hawk"] > speeds["griffin"]).all()))
    return _claim("I3", parts, f"over MQA at {lengths} tokens; {'; '.join(texts)}")


def _caches(findings: Row) -> Claim:
    states = findings["states"]
    equal = [state["bytes"] == state["formula_bytes"] for state in states]
    bounds = [b["cache_bound_from"] for b in findings["bounds"] if b["model"] == "mqa"]
    sizes = {state["model"]: f"{state['model']} {decimal(state['bytes'])}" for state in states}
    return _claim(
        "F1",
        [*equal, *(bound is not None for bound in bounds)],
        f"states of {states[0]['tokens']} tokens: {', '.join(sizes.values())}, {sum(equal)} of "
        f"{len(equal)} equal to the formula; MQA cache-bound from {bounds} tokens",
    )


def _alike(ratio: float) -> bool:
    return 1 / (1 + ALIKE) <= ratio <= 1 + ALIKE


def _shown(numbers: Iterable[float]) -> str:
    return ", ".join(f"{number:.2f}" for number in numbers)
