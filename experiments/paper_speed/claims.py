"""The paper's claims on speed, and whether the measurements confirm them.

A claim consists of parts that are true or false: if all are true it is "yes", if none "no",
otherwise "in part". Parts compare rows of the results, which are medians of the rounds. Short
samples, for which the Transformer may be faster, are listed with the others.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from rich.filesize import decimal

from experiments.paper_speed.decoding import PEER
from experiments.paper_speed.models import RECURRENT

Row = Mapping[str, Any]

ALIKE = 0.15  # largest relative difference of times that count as equal
CLOSE = 1.5  # largest factor between the byte model and a close measurement
MOST_ROWS = 128  # rows up to which section 5.1 calls decoding memory-bound
FIGURE_4_BATCH = 16
SAYS = {
    "T1": "at the shortest length Griffin and MQA train alike",
    "T2": "with longer sequences MQA gets slower and Griffin does not",
    "T3": "the narrower the model, the more MQA slows down",
    "T4": "at 7B and short sequences Griffin has more parameters and operations, hence is slightly "
    "slower (counted, not timed)",
    "I1": f"a step takes (parameters + batch x cache) / bandwidth, up to {MOST_ROWS} rows",
    "I2": "Hawk and Griffin sample long texts faster than MQA, the more the longer; Griffin is "
    "like Hawk",
    "I3": "Griffin and Hawk have more throughput than MQA, mostly by larger batches; Hawk more "
    "than Griffin",
    "I4": "prefill compares as training does",
    "F1": "caches: 2 N T d of attention, 2 T_WS d of a window, 4 D_RNN of a recurrent block; the "
    "Transformer turns from parameter-bound to cache-bound",
}


class Claim(NamedTuple):
    """A claim and its verdict.

    Attributes:
        name: T1 to T4 of section 4.3, I1 to I4 of section 5, F1 of appendix F.4.
        says: The claim in short.
        holds: yes, in part, no, or not measured.
        found: The numbers that decide it.
    """

    name: str
    says: str
    holds: str
    found: str


def _claim(name: str, parts: Iterable[bool], found: str) -> Claim:
    parts = list(parts)
    verdict = "yes" if all(parts) else "in part" if any(parts) else "no"
    return Claim(name, SAYS[name], verdict if parts else "not measured", found)


def latency_claims(findings: Row) -> list[Claim]:
    """Judge I1, I2 and F1 by the results of `experiments.paper_speed.latency`."""
    return [_steps(findings["steps"]), _latencies(findings["latencies"]), _caches(findings)]


def throughput_claims(findings: Row) -> list[Claim]:
    """Judge I1 and I3 by the results of `experiments.paper_speed.throughput`."""
    return [_steps(findings["steps"]), _throughputs(findings["throughputs"])]


def training_claims(findings: Row) -> list[Claim]:
    """Judge T1 to T4 and I4 by the results of `experiments.paper_speed.training`."""
    at = {(row["width"], row["model"], row["length"]): row for row in findings["steps"]}
    widths, _, lengths = (sorted(set(values)) for values in zip(*at, strict=True))
    short, long = lengths[0], lengths[-1]
    over = [at[width, "griffin", short]["over_mqa"] for width in widths]
    mqa, griffin = (
        [at[w, model, long]["seconds"] / at[w, model, short]["seconds"] for w in widths]
        for model in ("mqa", "griffin")
    )
    slower = [slow > 1 + ALIKE for slow in mqa] + [slow <= 1 + ALIKE for slow in griffin]
    largest = max(findings["presets"], key=lambda row: row["griffin_parameters"])
    counted = largest["flops_over_mqa_at_2048"]
    compared = [at[width, "griffin", length] for width in widths for length in (short, long)]
    both = [(row["prefill_over_mqa"], row["over_mqa"]) for row in compared]
    return [
        _claim("T1", map(_alike, over), f"Griffin over MQA at {short} tokens: {_shown(over)}"),
        _claim(
            "T2",
            slower if short < long else [],
            f"{long} tokens over {short}: MQA {_shown(mqa)}; Griffin {_shown(griffin)}",
        ),
        _claim(
            "T3",
            [narrow > wide for narrow, wide in pairwise(mqa)],
            f"MQA at {long} tokens over {short}, at widths {widths}: {_shown(mqa)}",
        ),
        _claim(
            "T4",
            [counted > 1, largest["griffin_parameters"] > largest["mqa_parameters"]],
            f"operations of Griffin over MQA at {largest['size']} and 2048 tokens: {counted:.3f}",
        ),
        _claim(
            "I4",
            [_alike(prefill / training) for prefill, training in both],
            f"Griffin over MQA in prefill: {_shown(pair[0] for pair in both)}; in training: "
            f"{_shown(pair[1] for pair in both)}",
        ),
    ]


JUDGES = {
    "latency": latency_claims,
    "throughput": throughput_claims,
    "training": training_claims,
}


def _steps(steps: Sequence[Row]) -> Claim:
    parts, texts = [], []
    for batch in sorted({step["batch"] for step in steps if step["batch"] <= MOST_ROWS}):
        ours = [s for s in steps if s["batch"] == batch and s["framework"] != PEER]
        seconds = np.array([np.median(step["seconds"]) for step in ours])
        by_bytes, modelled = (
            float(np.median(seconds / np.array([step[kind] for step in ours])))
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
    at = {(row["framework"], row["model"], row["sampled"]): row for row in rows}
    lengths = sorted({row["sampled"] for row in rows})
    parts, texts = [], []
    for framework in dict.fromkeys(row["framework"] for row in rows if row["framework"] != PEER):
        speeds = {}
        for model in RECURRENT:
            chosen = [at[framework, model, length] for length in lengths]
            speeds[model] = [row["over_mqa"] for row in chosen]
            alone = [row["over_mqa_at_its_batch"] for row in chosen]
            faster = min(speeds[model]) > 1
            # The gain of the larger batch, over / at_its_batch, exceeds that of cheaper steps.
            pairs = zip(speeds[model], alone, strict=True)
            parts += [faster, faster and all(over > cheaper**2 for over, cheaper in pairs)]
            texts.append(
                f"{framework}, {model}: {_shown(speeds[model])}, at MQA's batch {_shown(alone)}"
            )
        parts.append(all(h > g for g, h in zip(speeds["griffin"], speeds["hawk"], strict=True)))
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
