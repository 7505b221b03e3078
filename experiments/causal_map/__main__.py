"""The command ``map``."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from griffin_eval.cli.ending import run_command
from griffin_eval.cli.options import (
    CheckpointOptions,
    check_figures_folder,
    progress_on_terminal,
    takes_checkpoint_options,
    tokenizer_of,
)
from griffin_eval.errors import ArgumentError
from griffin_eval.messages import did_you_mean

if TYPE_CHECKING:
    import numpy as np

    from experiments.causal_map.causal_map import Component, Effects, Pair
    from griffin_eval.converters.checkpoint import Checkpoint
    from griffin_eval.intervals import Estimate
    from griffin_eval.runners.protocol import Runner

PAIRS = 32  # of a task
LENGTHS = {  # by task
    "phonebook": 20,
    "passkey": 1024,
    "induction_heads": 256,
    "selective_copying": 1024,
}
OF_SYMBOLS = ("induction_heads", "selective_copying")
SIDES = ("sufficient", "necessary")


class Drawn(NamedTuple):
    """The pairs of a map.

    Attributes:
        name: of the task or text.
        pairs: documents and questions.
        symbols: which symbol of selective copying each pair asks for; None of other tasks.
    """

    name: str
    pairs: "list[Pair]"
    symbols: list[int] | None = None


class Asked(NamedTuple):
    """How a checkpoint is run, and what is measured."""

    framework: str | None
    dtype: str
    device: str | None
    groups: bool
    control: bool


@takes_checkpoint_options
def causal_map(
    checkpoints: Annotated[
        list[str], typer.Argument(help="Folders, .pt files or hub ids, a row of the figure each.")
    ],
    task: Annotated[
        str | None,
        typer.Option(
            help="Task of the pairs: phonebook, which is the default, passkey, induction_heads or "
            "selective_copying."
        ),
    ] = None,
    pairs: Annotated[
        int | None, typer.Option(help="Number of pairs of documents; 32 by default.", min=1)
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(help="Entries of a phonebook, or tokens of a document of other tasks.", min=4),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the pairs; 0 by default.", min=0)
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 file with a document of your own; one pair.")
    ] = None,
    fact: Annotated[str | None, typer.Option(help="Words of --text that are the fact.")] = None,
    instead: Annotated[
        str | None, typer.Option(help="Words in their place, of as many tokens.")
    ] = None,
    question: Annotated[
        str | None, typer.Option(help="Words after --text, which the fact answers.")
    ] = None,
    groups: Annotated[
        bool,
        typer.Option("--groups", help="Kinds and halves of the depth instead of single layers."),
    ] = False,
    control: Annotated[
        bool,
        typer.Option("--control", help="A second map, with the answers of other pairs: flat."),
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for the figure, PNG and SVG.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Printed JSON, a list with a map each, nothing else.")
    ] = False,
    framework: Annotated[str | None, typer.Option(help="Framework: torch or jax.")] = None,
    dtype: Annotated[str, typer.Option(help="dtype of weights and activations.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Device, as the framework names it.")] = None,
    *,
    options: CheckpointOptions,
) -> None:
    """Map where checkpoints keep a fact, by layer and distance.

    Pairs of documents differ in one fact. At each distance from it, parts of the state of one are
    put into the other: 1 means that the answer goes with the part, 0 that it does not.
    """
    check_figures_folder(output)
    of_tasks = {"--task": task, "--pairs": pairs, "--length": length, "--seed": seed}
    given = [name for name, value in of_tasks.items() if value is not None]
    if text is not None and given:
        raise ArgumentError(f"a text of your own is one pair: leave out {', '.join(given)}")
    if control and (text is not None or pairs == 1):
        raise ArgumentError("--control takes the answers of other pairs: expected two or more")
    task = "phonebook" if task is None else task
    if task not in LENGTHS:
        raise ArgumentError(
            f"unknown --task {task!r}: expected {', '.join(LENGTHS)}{did_you_mean(task, LENGTHS)}"
        )
    own = {"--text": text, "--fact": fact, "--instead": instead, "--question": question}
    missing = [name for name, value in own.items() if value is None]
    if 0 < len(missing) < len(own):
        raise ArgumentError(f"a text of your own needs {', '.join(own)}: add {', '.join(missing)}")
    size = LENGTHS[task] if length is None else length
    asked = Asked(framework, dtype, device, groups, control)
    # Every checkpoint must be one before the first is measured.
    found = []
    for name in checkpoints:
        opened = options.open(name)
        if text is not None:
            drawn = Drawn(str(text), [_own(opened, text, str(fact), str(instead), str(question))])
        else:
            drawn = _drawn(opened, task, pairs or PAIRS, size, seed or 0)
        found.append((name, opened, drawn))
    facts = [_facts(name, opened, drawn, asked) for name, opened, drawn in found]
    if as_json:
        typer.echo(json.dumps(facts, indent=1, allow_nan=False))
    else:
        for one in facts:
            _print(one)
    if output is not None:
        from experiments.causal_map.map_figure import draw

        typer.echo(str(draw(facts, output)), err=as_json)


def _own(opened: "Checkpoint", path: Path, fact: str, instead: str, question: str) -> "Pair":
    from experiments.causal_map.map_pairs import own_pair
    from griffin_eval.cli.score import read_texts

    ((_, content),) = read_texts([path], False)
    return own_pair(*tokenizer_of(opened), content, fact, instead, question)


def _drawn(opened: "Checkpoint", task: str, count: int, length: int, seed: int) -> Drawn:
    from experiments.causal_map import map_pairs
    from griffin_eval.converters.source.companions import tokenizer_folder

    drawn = {"count": count, "length": length, "seed": seed}
    name = f"{task} of {length} {'entries' if task == 'phonebook' else 'tokens'}"
    if task in OF_SYMBOLS:
        if opened.config.vocab_size != 16:
            raise ArgumentError(
                f"--task {task} is for models of the paper's 16 symbols, and this one has "
                f"a vocabulary of {opened.config.vocab_size}: take phonebook or passkey"
            )
        if task == "induction_heads":
            return Drawn(name, map_pairs.induction_pairs(**drawn))
        if length < map_pairs.SYMBOLS:
            raise ArgumentError(
                f"--length {length}: selective_copying has {map_pairs.SYMBOLS} data symbols, so "
                "that it takes as many tokens at least"
            )
        return Drawn(name, *map_pairs.copying_pairs(**drawn))
    tokenizer, add_bos = tokenizer_of(opened)
    if task == "phonebook":
        return Drawn(name, map_pairs.phonebook_pairs(tokenizer, add_bos, **drawn))
    folder = tokenizer_folder(opened.folder)
    return Drawn(name, map_pairs.passkey_pairs(tokenizer, add_bos, **drawn, folder=folder))


def _facts(name: str, opened: "Checkpoint", drawn: Drawn, asked: Asked) -> dict[str, Any]:
    """Everything about one checkpoint, as ``--json`` prints it."""
    from experiments.causal_map.causal_map import components, distances_of, permuted
    from experiments.causal_map.map_pairs import SYMBOLS
    from experiments.causal_map.withheld import bins, lost_keys, lost_writes
    from griffin_eval.runners.load import load_runner

    config, pairs = opened.config, drawn.pairs
    parts = components(config, groups=asked.groups)
    distances = distances_of(pairs) if drawn.symbols is None else [None]
    runner = load_runner(opened, framework=asked.framework, dtype=asked.dtype, device=asked.device)

    def measured(some: "list[Pair]") -> "Effects":
        effects = _measure(runner, some, parts, distances)
        return effects if drawn.symbols is None else effects.apart(drawn.symbols, SYMBOLS)

    effects = measured(pairs)
    between = effects.between
    lost = lost_writes(runner, pairs, parts, between)
    local = "local_attention" in config.block_types
    attention = [part for part in parts if part.kinds == ("attention",)]
    ages = bins(pairs, config.visible_keys if local else None) if attention else []
    hidden = lost_keys(runner, pairs, attention, ages, between)
    columns = range(effects.sufficient.shape[2])
    shares = {side: _cells(effects, getattr(effects, side)) for side in SIDES}
    facts = {
        "checkpoint": name,
        "task": drawn.name,
        "pairs": len(pairs),
        "answered": int(effects.answered.sum()),
        "window": config.visible_keys if local else None,
        "distances": distances if drawn.symbols is None else None,
        "symbols": None if drawn.symbols is None else [column + 1 for column in columns],
        "components": [
            {"component": part.label, "kind": part.kinds[0]}
            | {side: shares[side][index] for side in SIDES}
            | {"not_written": _cell(effects.share_of(lost[:, index]))}
            for index, part in enumerate(parts)
        ],
        "keys_hidden": [
            {
                "component": part.label,
                "ages": [
                    {"from": low, "to": high - 1}
                    | {"lost": _cell(effects.share_of(hidden[:, index, place]))}
                    for place, (low, high) in enumerate(ages)
                ],
            }
            for index, part in enumerate(attention)
        ],
    }
    if asked.control:
        other = measured(permuted(pairs))
        cells = [
            cell
            for side in SIDES
            for row in _cells(effects, getattr(other, side))
            for cell in row
            if cell is not None and cell["low"] is not None
        ]
        apart = sum(not cell["low"] <= 0 <= cell["high"] for cell in cells)
        largest = max((abs(cell["value"]) for cell in cells), default=0.0)
        facts["control"] = {"cells": len(cells), "without_0": apart, "largest": largest}
    return facts | _gates(opened, pairs[0], distances, runner)


def _gates(
    opened: "Checkpoint", pair: "Pair", distances: "Sequence[int | None]", runner: "Runner"
) -> dict[str, Any]:
    """Half-lives by layer on the first document, and what its gates leave of the fact at each
    distance; empty for a model without recurrent layers."""
    from griffin_eval.analysis.half_lives import left, measure, quantiles, summary

    if "recurrent" not in opened.config.block_types:
        return {"half_lives": [], "left_by_gates": []}
    loaded: Any = runner
    given: Any = {"framework": runner.framework, "model": loaded.model}
    found = [summary(layer, None) for layer in measure(opened, pair.original, **given)]
    cuts = [cut for each in distances if (cut := pair.cut(each)) is not None]
    shares = left(opened, pair.original, pair.fact_end, cuts, **given)
    return {
        "half_lives": [
            {"layer": each["layer"], "half_life_measured": _finite(each["half_life_measured"])}
            for each in found
        ],
        "left_by_gates": [
            {
                "layer": layer,
                "left": [
                    {"tokens": cut - pair.fact_end} | quantiles(channels[:, place])
                    for place, cut in enumerate(cuts)
                ],
            }
            for layer, channels in shares
        ],
    }


def _measure(
    runner: "Runner",
    pairs: "list[Pair]",
    parts: "list[Component]",
    distances: "Sequence[int | None]",
) -> "Effects":

    from experiments.causal_map.causal_map import measure

    with progress_on_terminal() as bar:
        task = bar.add_task("pairs", total=len(pairs))
        return measure(
            runner, pairs, parts, distances, progress=lambda count: bar.advance(task, count)
        )


def _cells(effects: "Effects", values: "np.ndarray") -> list[list[dict[str, Any] | None]]:
    """The share of each component at each distance."""
    _, parts, columns = values.shape
    return [
        [_cell(effects.share(values, part, column)) for column in range(columns)]
        for part in range(parts)
    ]


def _cell(estimate: "Estimate | None") -> dict[str, Any] | None:
    if estimate is None:
        return None
    bounds = {"low": estimate.low, "high": estimate.high}
    return {"value": estimate.value, **_finite(bounds), "pairs": estimate.items}


def _finite(numbers: dict[str, float]) -> dict[str, float | None]:
    """The same with null for what has no bound, which JSON cannot say."""
    return {key: n if math.isfinite(n) else None for key, n in numbers.items()}


def _print(facts: dict[str, Any]) -> None:
    if facts["symbols"] is None:
        what = "tokens after the fact"
        columns = ["end" if each is None else f"{each:,}" for each in facts["distances"]]
    else:
        what, columns = "before the first marker; symbol", [*map(str, facts["symbols"])]
    for side, means in (
        ("sufficient", "put into the other document, it takes so much of the answer along"),
        ("necessary", "taken away, so much of the answer goes"),
    ):
        table = _table(f"{facts['checkpoint']}, {side}: {means}", what, columns)
        if side == "necessary":
            table.add_column("not written", justify="right")
        for row in reversed(facts["components"]):
            written = [_shown(row["not_written"])] if side == "necessary" else []
            table.add_row(row["component"], *map(_shown, row[side]), *written)
        _print_whole(table)
    if facts["keys_hidden"]:
        ages = [f"{one['from']:,}-{one['to']:,}" for one in facts["keys_hidden"][0]["ages"]]
        title = "lost where no query sees keys so many tokens before it"
        table = _table(title, "age", ages)
        for row in reversed(facts["keys_hidden"]):
            table.add_row(row["component"], *(_shown(one["lost"]) for one in row["ages"]))
        _print_whole(table)
    print(
        f"{facts['task']}: {facts['answered']} of {facts['pairs']} pairs, those whose two answers "
        "the model tells apart in both documents; 95 % intervals over them."
    )
    if control := facts.get("control"):
        print(
            f"control, with the answers of other pairs: {control['without_0']} of "
            f"{control['cells']} intervals leave 0 out (one in 20 by chance); the largest share is "
            f"{control['largest']:.2f}."
        )


def _print_whole(table: Table) -> None:
    """Prints a table with no cell cut, however narrow the terminal is."""
    width = Console(width=10_000).measure(table).maximum
    Console(width=max(Console().width, width)).print(table)


def _table(title: str, first: str, columns: list[str]) -> Table:
    table = Table(title=title)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _shown(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "-"
    if cell["low"] is None:
        return f"{cell['value']:z.2f}"
    return f"{cell['value']:z.2f} ± {(cell['high'] - cell['low']) / 2:.2f}"


if __name__ == "__main__":
    run_command(lambda: typer.run(causal_map))
