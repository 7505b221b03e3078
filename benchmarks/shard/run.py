"""What `griffin-eval bench shard` finds and prints."""

import math
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.shard.collectives import elements
from benchmarks.shard.measured import Measured, Sizes
from benchmarks.shard.plan import (
    Need,
    differences,
    expected_sums,
    reading_needs,
    training_needs,
)
from benchmarks.shard.targets import Target, devices
from griffin_eval.config import GriffinConfig
from griffin_eval.errors import ArgumentError
from griffin_eval.layout import param_specs
from griffin_eval.sharding.split import Split, split_over


def measure(
    config: GriffinConfig,
    target: Target,
    replicas: int,
    dtype: str,
    sizes: Sizes,
    training: bool,
    framework: str = "jax",
) -> dict[str, Any]:
    """Compiles the steps over the devices of a target, or runs those of one process of PyTorch; the
    results as in JSON.

    Args:
        config: of the model.
        target: whose devices hold the replicas.
        replicas: of the model, each on as many devices; their number divides that of the devices.
            In evaluation they have nothing to say to each other, so that one is compiled, for a
            slice of its own: on a part of a larger one some TPUs run no program.
        dtype: of the weights, or that a training step computes in.
        sizes: of the steps.
        training: whether to compile a training step, and no others; in JAX alone.
        framework: ``jax`` or ``torch``, which needs none of the devices.
    """
    each = target.count // replicas
    split = split_over(config, each)
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
    whole = sum(spec.size for spec in split.replicated())
    needs = training_needs(split, replicas, sizes.batch // replicas, sizes.length)
    return {
        "target": f"{target.kind}-{target.count}",
        "framework": framework,
        "replicas": replicas,
        "dtype": dtype,
        "sizes": sizes._asdict(),
        "memory": target.memory,
        "whole": split.whole,
        "whole_share": whole / sum(spec.size for spec in param_specs(config).values()),
        "sums": expected_sums(split),
        "needs": _by_purpose(needs) if training else [],
        "steps": [_step(step, split, replicas, target, sizes, needs, framework) for step in steps],
    }


def _step(
    step: Measured,
    split: Split,
    replicas: int,
    target: Target,
    sizes: Sizes,
    needs: list[Need],
    framework: str,
) -> dict[str, Any]:
    vectors = sizes.tokens if step.name == "scoring" else sizes.rows
    count, rows = Counter(), sizes.pool + 1 if step.name == "scoring" else sizes.rows
    for each in step.collectives:
        count[each.kind] += 1
    used = step.weights + step.states + step.temporaries
    a_state = math.ceil(step.states / rows)
    fit = None if target.memory is None else (target.memory - used) // a_state + rows
    training = step.name == "training"
    if not training:
        beside = unexpected(step, split, vectors, framework)
    elif target.kind == "cpu":
        mine = sizes.batch // replicas * sizes.length
        beside = differences(step.collectives, needs, split.devices, mine)
    else:  # whose compiler pads, and merges sums with scattering
        beside = []
    return {
        "step": step.name,
        "collectives": {
            kind: {
                "count": number,
                "bytes": sum(each.nbytes for each in step.collectives if each.kind == kind),
            }
            for kind, number in count.items()
        },
        "unexpected": beside,
        "kernels": step.kernels,
        "weights": step.weights,
        "states": step.states,
        "bytes_a_state": None if training else a_state,
        "temporaries": step.temporaries,
        "used": used,
        "states_that_fit": None if training else fit,
    }


def measure_reading(
    config: GriffinConfig, target: Target, dtype: str, sizes: Sizes
) -> dict[str, Any]:
    """Compiles the reading of a document by all devices of a target, each a part of its tokens, and
    by one of them; the results as in JSON.

    Args:
        config: of the model, which lies whole on every device.
        target: whose devices read.
        dtype: of the weights.
        sizes: of the document, its ``tokens``.

    Raises:
        ArgumentError: the document cannot be split so, or does not fit.
    """
    from benchmarks.shard.steps import compile_reading
    from griffin_eval.runners.jax_time import check_split
    from griffin_eval.sharding.mesh_jax import make_time_mesh

    check_split(config, sizes.tokens, target.count)
    there, steps = devices(target), []
    for count in (target.count, 1):
        try:
            step = compile_reading(config, make_time_mesh(there[:count]), dtype, sizes)
        except ArgumentError as error:
            if count > 1:
                raise
            steps.append({"devices": 1, "problem": str(error)})
            continue
        needs, found = reading_needs(config, count), Counter(each.kind for each in step.collectives)
        steps.append(
            {
                "devices": count,
                "collectives": {
                    kind: {
                        "count": number,
                        "bytes": sum(e.nbytes for e in step.collectives if e.kind == kind),
                    }
                    for kind, number in found.items()
                },
                "unexpected": differences(step.collectives, needs, 0, 0),
                "kernels": step.kernels,
                "weights": step.weights,
                "states": step.states,
                "temporaries": step.temporaries,
                "flops": step.flops,
                "cycles": step.cycles,
            }
        )
    return {
        "target": f"{target.kind}-{target.count}",
        "split": "time",
        "dtype": dtype,
        "tokens": sizes.tokens,
        "memory": target.memory,
        "needs": _by_purpose(reading_needs(config, target.count)),
        "steps": steps,
    }


def print_reading(console: Console, result: dict[str, Any]) -> None:
    """Prints the results of `measure_reading` as tables."""
    console.print(
        f"{result['target']}, {result['dtype']}: one document of {result['tokens']} tokens, of "
        "which every device reads a part"
    )
    _print_needs(console, result["needs"], "what a document that is split along time needs")
    table = Table(title="a device; operations and cycles without those of kernels")
    names = ("weights", "states", "temporaries")
    for heading in (
        "devices",
        *(f"{n}, MB" for n in names),
        "GFLOP",
        "million cycles",
        "not needed",
    ):
        table.add_column(heading, justify="left" if heading == "not needed" else "right")
    for step in result["steps"]:
        if "problem" in step:
            table.add_row(str(step["devices"]), *"-----", step["problem"])
            continue
        cycles = step["cycles"]
        table.add_row(
            str(step["devices"]),
            *(f"{step[name] / 1e6:,.1f}" for name in names),
            f"{step['flops'] / 1e9:,.1f}",
            "-" if cycles is None else f"{cycles / 1e6:,.1f}",
            "; ".join(step["unexpected"]) or "nothing",
        )
    console.print(table)


def _print_needs(console: Console, needs: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title)
    for heading in ("what", "operation", "along", "number", "million numbers"):
        table.add_column(heading, justify="left" if heading[0] in "woa" else "right")
    for need in needs:
        row = need["what"], need["operation"], need["axis"], str(need["count"])
        table.add_row(*row, f"{need['numbers'] / 1e6:,.2f}")
    console.print(table)


def _by_purpose(needs: list[Need]) -> list[dict[str, Any]]:
    """Numbers and counts of operations, by what they are for."""
    found: dict[tuple[str, str, str], Counter] = {}
    for need in needs:
        sums = found.setdefault((need.what, need.kind, need.axis), Counter())
        sums.update(count=need.times, numbers=need.times * need.numbers)
    return [
        {"what": what, "operation": kind, "axis": axis, **sums}
        for (what, kind, axis), sums in found.items()
    ]


def unexpected(step: Measured, split: Split, vectors: int, framework: str = "jax") -> list[str]:
    """What a step says to other devices beside what the split needs: sums of vectors of the
    model's width, and where the vocabulary is split, a few of one number a vector. Of these PyTorch
    gathers some.

    Args:
        step: as it was compiled, or ran.
        split: of the model.
        vectors: hidden vectors of the step.
        framework: ``jax`` or ``torch``.
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
        found.append(f"{sums} sums of vectors, and not {expected_sums(split)}")
    return found


def print_result(console: Console, result: dict[str, Any]) -> None:
    """Prints the results as tables."""
    sizes, whole = result["sizes"], result["whole"]
    what = (
        f"a scoring step of {sizes['tokens']} tokens of {sizes['documents']} documents, "
        f"{sizes['pool']} states kept; a decoding step of {sizes['rows']} rows"
    )
    training = result["steps"][0]["step"] == "training"
    if training:
        what = f"a training step of {sizes['batch']} rows of {sizes['length']} tokens"
    console.print(
        f"{result['target']}, {result['framework']}, {result['replicas']} replicas, "
        f"{result['dtype']}: {what}"
    )
    parts = ", ".join(sorted(set(whole.values())))
    console.print(
        f"whole on every device, since they do not divide: {parts} "
        f"({result['whole_share']:.0%} of the parameters)"
        if whole
        else "every parameter that can be is split"
    )
    table = Table(title="collective operations of a step, and their bytes on a device")
    for heading in ("step", "operation", "number", "MB", "not needed"):
        table.add_column(heading, justify="right" if heading in ("number", "MB") else "left")
    for step in result["steps"]:
        for kind, found in step["collectives"].items() or [("none", {"count": 0, "bytes": 0})]:
            beside = "; ".join(step["unexpected"]) or "nothing"
            table.add_row(
                step["step"], kind, str(found["count"]), f"{found['bytes'] / 1e6:.2f}", beside
            )
    console.print(table)
    if training:
        title = "what the split needs, beside sums of single numbers"
        _print_needs(console, result["needs"], title)
    else:
        needed = f"{result['sums']} sums of vectors, and a few of one number a vector"
        console.print(f"the split needs: {needed}")
    memory = Table(title="bytes of a device, MB")
    names = ("weights", "states", "temporaries", "used")
    for heading in ("step", *names, "of", "states that fit", "kernels"):
        memory.add_column(heading, justify="left" if heading == "step" else "right")
    for step in result["steps"]:
        fit, most = step["states_that_fit"], result["memory"]
        memory.add_row(
            step["step"],
            *(f"{step[name] / 1e6:,.1f}" for name in names),
            "-" if most is None else f"{most / 1e6:,.0f}",
            "-" if fit is None else str(fit),
            str(step["kernels"]),
        )
    console.print(memory)
