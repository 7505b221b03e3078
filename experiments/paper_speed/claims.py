"""The paper's claims on speed, and whether what was measured here bears them out.

A claim is made of parts that are true or not: all of them make "yes", none "no", some "in part".
What is compared are the rows of the results, medians of the rounds; short samples, where the
Transformer may be faster, are told with the others.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

ALIKE = 0.15  # two times are alike within this share
CLOSE = 1.5  # the byte model is right within this factor
MOST_ROWS = 128  # up to which section 5.1 calls decoding memory-bound
FIGURE_4_BATCH = 16
NAMES = {"griffin": "Griffin", "hawk": "Hawk", "mqa": "MQA"}


class Claim(NamedTuple):
    """A claim and what became of it.

    Attributes:
        name: T1 to T4 of section 4.3, I1 to I4 of section 5, F1 of appendix F.4.
        says: the claim in short.
        holds: yes, in part, no, or not measured.
        found: the numbers that decide it.
    """

    name: str
    says: str
    holds: str
    found: str


def latency_claims(found: dict[str, Any]) -> list[Claim]:
    """I1, I2 and F1 from the results of `experiments.paper_speed.latency`."""
    return [_step_times(found["steps"]), _latencies(found["latencies"]), _cache_sizes(found)]


def throughput_claims(found: dict[str, Any]) -> list[Claim]:
    """I1 and I3 from the results of `experiments.paper_speed.throughput`."""
    return [_step_times(found["steps"]), _throughputs(found["throughputs"])]


def training_claims(found: dict[str, Any]) -> list[Claim]:
    """T1 to T4 and I4 from the results of `experiments.paper_speed.training`."""
    rows = found["steps"]
    return [
        _short_sequences(rows),
        _long_sequences(rows),
        _widths(rows),
        _parameters(rows, found["presets"]),
        _prefill(rows),
    ]


def _verdict(parts: Iterable[bool]) -> str:
    parts = list(parts)
    return "yes" if all(parts) else "in part" if any(parts) else "no"


def _step_times(steps: Sequence[dict[str, Any]]) -> Claim:
    says = f"a step takes (parameters + batch x cache) / bandwidth, up to {MOST_ROWS} rows"
    parts, texts = [], []
    for batch in sorted({step["batch"] for step in steps if step["batch"] <= MOST_ROWS}):
        ours = [s for s in steps if s["batch"] == batch and s["framework"] != "transformers"]
        seconds = np.array([np.median(step["seconds"]) for step in ours])
        by_bytes, modelled = (
            seconds / np.array([step[kind] for step in ours])
            for kind in ("modelled_by_bytes", "modelled_seconds")
        )
        parts.append(bool(1 / CLOSE <= np.median(by_bytes) <= CLOSE))
        texts.append(
            f"batch {batch}: {np.median(by_bytes):.2f} ({by_bytes.min():.2f} to "
            f"{by_bytes.max():.2f}), with products {np.median(modelled):.2f}"
        )
    if not parts:
        return Claim("I1", says, "not measured", f"every batch is above {MOST_ROWS} rows")
    return Claim(
        "I1",
        says,
        _verdict(parts),
        f"measured over the time of the bytes, median and range ({CLOSE} is close): "
        + "; ".join(texts),
    )


def _latencies(rows: Sequence[dict[str, Any]]) -> Claim:
    batches = {row["batch"] for row in rows}
    batch = FIGURE_4_BATCH if FIGURE_4_BATCH in batches else max(batches)
    short, long = (choose(row["sampled"] for row in rows) for choose in (min, max))
    at = {
        (r["framework"], r["prompt"], r["model"], r["sampled"]): r
        for r in rows
        if r["batch"] == batch and r["framework"] != "transformers"
    }
    parts, texts = [], []
    for framework, prompt in dict.fromkeys(key[:2] for key in at):
        told = []
        for model in ("griffin", "hawk"):
            first, last = (
                at[framework, prompt, model, n]["mqa_over_seconds"] for n in (short, long)
            )
            parts += [last > 1, last > first]
            told.append(f"{NAMES[model]} {_speed(first)} at {short}, {_speed(last)} at {long}")
        both = [at[framework, prompt, model, long]["seconds"] for model in ("griffin", "hawk")]
        parts.append(_alike(both[0] / both[1]))
        told.append(f"Griffin over Hawk {both[0] / both[1]:.2f}")
        texts.append(f"{framework}, prompt {prompt}: {', '.join(told)}")
    return Claim(
        "I2",
        "Hawk and Griffin sample long texts faster than MQA, the more the longer; Griffin is like "
        "Hawk",
        _verdict(parts),
        f"batch {batch}, speed over MQA's; " + "; ".join(texts),
    )


def _throughputs(rows: Sequence[dict[str, Any]]) -> Claim:
    ours = [row for row in rows if row["framework"] != "transformers"]
    at = {(r["framework"], r["sampled"], r["model"]): r for r in ours}
    parts, texts = [], []
    for framework in dict.fromkeys(row["framework"] for row in ours):
        lengths = sorted({key[1] for key in at if key[0] == framework})
        for model in ("griffin", "hawk"):
            chosen = [at[framework, length, model] for length in lengths]
            over = [row["over_mqa"] for row in chosen]
            parts.append(min(over) > 1)
            # The larger batch brings more than the shorter time of a step at one batch does.
            parts.append(
                all(row["over_mqa"] > row["over_mqa_at_its_batch"] ** 2 for row in chosen)
                and min(over) > 1
            )
            texts.append(
                f"{framework}: {NAMES[model]} {_speed(over[0])} at {lengths[0]}, "
                f"{_speed(over[-1])} at {lengths[-1]}, at MQA's batch "
                f"{_speed(chosen[-1]['over_mqa_at_its_batch'])}"
            )
        parts.append(
            all(
                at[framework, n, "hawk"]["over_mqa"] > at[framework, n, "griffin"]["over_mqa"]
                for n in lengths
            )
        )
    return Claim(
        "I3",
        "Griffin and Hawk have more throughput than MQA, mostly by larger batches; Hawk more than "
        "Griffin",
        _verdict(parts),
        "; ".join(texts),
    )


def _cache_sizes(found: dict[str, Any]) -> Claim:
    states = found["states"]
    equal = [state["bytes"] == state["formula_bytes"] for state in states]
    sizes = {state["model"]: state for state in states}
    told = ", ".join(
        f"{NAMES[name]} {state['bytes'] / 1e6:.3g} MB" for name, state in sizes.items()
    )
    bounds = ", ".join(
        f"{NAMES[bound['model']]} {_tokens(bound['cache_bound_from'])} at batch {bound['batch']}"
        for bound in found["bounds"]
    )
    grows = [b["cache_bound_from"] is not None for b in found["bounds"] if b["model"] == "mqa"]
    return Claim(
        "F1",
        "caches: 2 N T d of attention, 2 T_WS d of a window, 4 D_RNN of a recurrent block; the "
        "Transformer turns from parameter-bound to cache-bound",
        _verdict([*equal, *grows]),
        f"states of {states[0]['tokens']} tokens: {told}, "
        f"{sum(equal)} of {len(equal)} equal to the formula; cache-bound from {bounds}",
    )


def _of(rows: Sequence[dict[str, Any]]) -> dict[tuple[int, str, int], dict[str, Any]]:
    return {(row["width"], row["model"], row["length"]): row for row in rows}


def _sizes(rows: Sequence[dict[str, Any]]) -> tuple[list[int], int, int]:
    """The widths, and the shortest and the longest length."""
    lengths = [row["length"] for row in rows]
    return sorted({row["width"] for row in rows}), min(lengths), max(lengths)


def _short_sequences(rows: Sequence[dict[str, Any]]) -> Claim:
    at, (widths, short, _) = _of(rows), _sizes(rows)
    ratios = {w: at[w, "griffin", short]["over_mqa"] for w in widths}
    told = ", ".join(f"{ratio:.2f} at width {width}" for width, ratio in ratios.items())
    return Claim(
        "T1",
        "at the shortest length Griffin and MQA train alike",
        _verdict(_alike(ratio) for ratio in ratios.values()),
        f"a step at {short} tokens, Griffin over MQA: {told}",
    )


def _slow_downs(rows: Sequence[dict[str, Any]], model: str) -> dict[int, float]:
    """By width, the time of a step at the longest length over that at the shortest."""
    at, (widths, short, long) = _of(rows), _sizes(rows)
    return {w: at[w, model, long]["seconds"] / at[w, model, short]["seconds"] for w in widths}


def _long_sequences(rows: Sequence[dict[str, Any]]) -> Claim:
    _, short, long = _sizes(rows)
    mqa, griffin = (_slow_downs(rows, model) for model in ("mqa", "griffin"))
    told = ", ".join(f"width {w}: MQA {mqa[w]:.2f}, Griffin {griffin[w]:.2f}" for w in mqa)
    return Claim(
        "T2",
        "with longer sequences MQA gets slower and Griffin does not",
        "not measured"
        if short == long
        else _verdict(
            [slow > 1 + ALIKE for slow in mqa.values()]
            + [slow <= 1 + ALIKE for slow in griffin.values()]
        ),
        f"a step at {long} tokens over one at {short}: {told}",
    )


def _widths(rows: Sequence[dict[str, Any]]) -> Claim:
    says = "the narrower the model, the more MQA slows down"
    slow = _slow_downs(rows, "mqa")
    if len(slow) < 2:
        return Claim("T3", says, "not measured", "needs several --widths")
    told = ", ".join(f"{ratio:.2f} at width {width}" for width, ratio in slow.items())
    falls = [a > b for a, b in zip(list(slow.values()), list(slow.values())[1:], strict=False)]
    return Claim("T3", says, _verdict(falls), f"MQA, longest over shortest: {told}")


def _parameters(rows: Sequence[dict[str, Any]], presets: Sequence[dict[str, Any]]) -> Claim:
    at, (widths, short, _) = _of(rows), _sizes(rows)
    here = at[widths[-1], "griffin", short]
    mqa = at[widths[-1], "mqa", short]
    largest = max(presets, key=lambda row: row["parameters"]["griffin"])
    flops = largest["flops_over_mqa"][0]
    return Claim(
        "T4",
        "at 7B and short sequences Griffin has more parameters and operations, hence is slightly "
        "slower (counted, not timed)",
        _verdict([flops > 1, largest["parameters"]["griffin"] > largest["parameters"]["mqa"]]),
        f"counted, operations of Griffin over MQA at {largest['size']} and "
        f"{largest['lengths'][0]} tokens: {flops:.3f}; measured here at width {widths[-1]} and "
        f"{short} tokens: operations "
        f"{here['flops'] / mqa['flops']:.3f}, time {here['over_mqa']:.2f}",
    )


def _prefill(rows: Sequence[dict[str, Any]]) -> Claim:
    at, (widths, short, long) = _of(rows), _sizes(rows)
    parts, texts = [], []
    for width in widths:
        for length in dict.fromkeys((short, long)):
            row = at[width, "griffin", length]
            parts.append(_alike(row["prefill_over_mqa"] / row["over_mqa"]))
            texts.append(
                f"width {width}, {length} tokens: {row['prefill_over_mqa']:.2f} and "
                f"{row['over_mqa']:.2f}"
            )
    return Claim(
        "I4",
        "prefill compares as training does",
        _verdict(parts),
        "Griffin over MQA, prefill and training: " + "; ".join(texts),
    )


def _alike(ratio: float) -> bool:
    return 1 / (1 + ALIKE) <= ratio <= 1 + ALIKE


def _speed(over: float) -> str:
    return f"{over:.2f}x"


def _tokens(tokens: int | None) -> str:
    return "never" if tokens is None else f"{tokens:,} tokens"
