"""The results of ``python -m benchmarks.shard``, as JSON and as tables."""

import math
from collections import Counter
from typing import Any

from benchmarks.report import Report
from benchmarks.shard.collectives import elements
from benchmarks.shard.measured import Measured, Sizes
from benchmarks.shard.plan import (
    Need,
    differences,
    expected_sums,
    reading_needs,
    training_needs,
)
from benchmarks.shard.targets import MEMORY, Target, devices
from griffin_eval.config import GriffinConfig
from griffin_eval.errors import ArgumentError
from griffin_eval.layout import param_specs
from griffin_eval.sharding.split import Split, split_over


def measure(
    config: GriffinConfig,
    target: Target,
    replicas: int,
    sizes: Sizes,
    training: bool,
    framework: str = "jax",
) -> dict[str, Any]:
    """Compile the steps over the devices of a target, or run those of one PyTorch process.

    Replicas exchange nothing in evaluation, so one is compiled, for a slice of its own: on a part
    of a larger slice some TPUs run no program. With ``training``, only a training step is compiled.
    """
    each = target.count // replicas
    split, dtype = split_over(config, each), "bfloat16"
    if framework == "torch":
        from benchmarks.shard.steps_torch import run_steps

        steps = run_steps(config, each, dtype, sizes)
    else:
        from benchmarks.shard.steps import compile_steps, compile_training
        from griffin_eval.sharding.mesh_jax import make_mesh

        if training:
            steps = [compile_training(config, make_mesh(devices(target), replicas), dtype, sizes)]
        else:
            mine = Target(target.kind, each)
            steps = compile_steps(config, make_mesh(devices(mine)), dtype, sizes)
    rows = sizes.batch // replicas
    needs = training_needs(split, replicas, rows, sizes.length)
    results = []
    for step in steps:
        if not training:
            vectors = sizes.tokens if step.name == "scoring" else sizes.rows
            beside = unexpected(step, split, vectors, framework)
        elif target.kind == "cpu":
            beside = differences(step.collectives, needs, each, rows * sizes.length)
        else:  # the compiler of a TPU pads, and merges sums with scattering
            beside = []
        kept = sizes.pool + 1 if step.name == "scoring" else sizes.rows
        fit = None if training else _states_that_fit(step, MEMORY.get(target.kind), kept)
        results.append(_summary(step, beside) | {"states_that_fit": fit})
    whole = sum(spec.size for spec in split.replicated())
    return {
        "title": f"{target}, {framework}, {replicas} replicas",
        "replicas": replicas,
        "whole": split.whole,
        "whole_share": whole / sum(spec.size for spec in param_specs(config).values()),
        "sums": expected_sums(split),
        "needs": _by_purpose(needs) if training else [],
        "steps": results,
    }


def measure_reading(config: GriffinConfig, target: Target, sizes: Sizes) -> dict[str, Any]:
    """Compile the reading of a document by all devices of a target, and by one of them.

    Raises:
        ArgumentError: The document cannot be split so, or does not fit.
    """
    from benchmarks.shard.steps import compile_reading
    from griffin_eval.runners.jax_time import check_split
    from griffin_eval.sharding.mesh_jax import make_time_mesh

    check_split(config, sizes.tokens, target.count)
    there, steps = devices(target), []
    for count in (target.count, 1):
        name = f"reading, {count} devices"
        try:
            step = compile_reading(config, make_time_mesh(there[:count]), "bfloat16", sizes)
        except ArgumentError as error:
            if count > 1:
                raise
            steps.append({"step": name, "problem": str(error)})
            continue
        beside = differences(step.collectives, reading_needs(config, count), 0, 0)
        steps.append(_summary(step._replace(name=name), beside))
    return {
        "title": f"{target}: every device reads a part of {sizes.tokens} tokens",
        "needs": _by_purpose(reading_needs(config, target.count)),
        "steps": steps,
    }


def _summary(step: Measured, unexpected: list[str]) -> dict[str, Any]:
    kinds: dict[str, Counter[str]] = {}
    for each in step.collectives:
        kinds.setdefault(each.kind, Counter()).update(count=1, bytes=each.nbytes)
    figures = step._asdict() | {"collectives": kinds, "unexpected": unexpected}
    return {"step": figures.pop("name")} | figures


def _states_that_fit(step: Measured, memory: int | None, pool_size: int) -> int | None:
    """Return the number of states that fit on a device, from a step with ``pool_size`` states."""
    if memory is None:
        return None
    free = memory - step.weights - step.states - step.temporaries
    return free // math.ceil(step.states / pool_size) + pool_size


def _by_purpose(needs: list[Need]) -> list[dict[str, Any]]:
    """Return numbers and counts of operations by their purpose."""
    found: dict[tuple[str, str, str], Counter] = {}
    for need in needs:
        sums = found.setdefault((need.what, need.kind, need.axis), Counter())
        sums.update(count=need.times, numbers=need.times * need.numbers)
    return [
        {"what": what, "operation": kind, "axis": axis, **sums}
        for (what, kind, axis), sums in found.items()
    ]


def unexpected(step: Measured, split: Split, vectors: int, framework: str = "jax") -> list[str]:
    """Return the collective operations of a step that the split does not need.

    It needs sums of vectors of the model's width and, where the vocabulary is split, a few of one
    number for each of the ``vectors``, some of which PyTorch gathers.
    """
    found, sums = [], 0
    gathers = framework == "torch" and "vocab" not in split.whole
    for each in step.collectives:
        numbers = [elements(shape) for shape in each.shapes]
        wide = sum(n == vectors * split.config.width for n in numbers)
        narrow = sum(n <= vectors for n in numbers) if "vocab" not in split.whole else 0
        sums += wide
        kind = each.kind == "all-reduce" or (gathers and each.kind == "all-gather" and not wide)
        if not kind or each.in_loop or wide + narrow < len(numbers):
            found.append(f"{each.kind} of {', '.join(each.shapes)}{' in a loop' * each.in_loop}")
    if sums != expected_sums(split):
        found.append(f"{sums} sums of vectors, expected {expected_sums(split)}")
    return found


def report_of(result: dict[str, Any]) -> Report:
    """Return the results of `measure` or `measure_reading` as tables."""
    report = Report()
    if whole := result.get("whole"):
        parts = ", ".join(sorted(set(whole.values())))
        share = f"{result['whole_share']:.0%} of the parameters"
        report.notes.append(f"whole on every device, since they do not divide: {parts} ({share})")
    if result["needs"]:
        title = "operations that the split needs, beside sums of single numbers"
        report.tables[title] = result["needs"]
    elif "sums" in result:
        sums = f"{result['sums']} sums of vectors, and a few of one number a vector"
        report.notes.append(f"the split needs: {sums}")
    title = f"{result['title']}; bytes of a device in MB, GFLOP and Mcycles without kernels"
    rows = report.tables[title] = []
    for step in result["steps"]:
        if "problem" in step:
            report.notes.append(f"{step['step']}: {step['problem']}")
            continue
        report.notes += [f"{step['step']}: not needed: {each}" for each in step["unexpected"]]
        operations = [
            f"{kind}: {each['count']}, {each['bytes'] / 1e6:.2f}"
            for kind, each in step["collectives"].items()
        ]
        cycles = step["cycles"]
        rows.append(
            {"step": step["step"], "operations: number, MB": "\n".join(operations) or "none"}
            | {name: step[name] / 1e6 for name in ("weights", "states", "temporaries")}
            | {"states that fit": step.get("states_that_fit"), "GFLOP": step["flops"] / 1e9}
            | {"Mcycles": None if cycles is None else cycles / 1e6, "kernels": step["kernels"]}
        )
    return report
