"""The command ``map``."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from griffin_eval.cli.options import (
    CheckpointOptions,
    check_figures_folder,
    takes_checkpoint_options,
)
from griffin_eval.errors import ArgumentError
from griffin_eval.messages import did_you_mean

if TYPE_CHECKING:
    from griffin_eval.analysis.causal_map import Component, Effects, Pair
    from griffin_eval.converters.checkpoint import Checkpoint
    from griffin_eval.intervals import Estimate

PAIRS = 32  # of a task
LENGTHS = {"phonebook": 20, "passkey": 1024, "induction_heads": 256}  # by task


@takes_checkpoint_options
def causal_map(
    checkpoint: Annotated[str, typer.Argument(help="Folder, .pt or .gguf file, or hub id.")],
    task: Annotated[
        str | None,
        typer.Option(
            help="Task of the pairs: phonebook, which is the default, passkey or induction_heads."
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
        bool, typer.Option("--groups", help="All recurrent states and all attention, no layers.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for the figure, PNG and SVG.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Printed JSON, nothing else.")] = False,
    framework: Annotated[str | None, typer.Option(help="Framework: torch or jax.")] = None,
    dtype: Annotated[str, typer.Option(help="dtype of weights and activations.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Device, as the framework names it.")] = None,
    *,
    options: CheckpointOptions,
) -> None:
    """Map where a checkpoint keeps a fact, by layer and distance.

    Pairs of documents differ in one fact. At each distance from it, parts of the state of one are
    put into the other: 1 means that the answer goes with the part, 0 that it does not.
    """
    from griffin_eval.analysis.causal_map import components, distances_of

    check_figures_folder(output)
    of_tasks = {"--task": task, "--pairs": pairs, "--length": length, "--seed": seed}
    given = [name for name, value in of_tasks.items() if value is not None]
    if text is not None and given:
        raise ArgumentError(f"a text of your own is one pair: leave out {', '.join(given)}")
    task = "phonebook" if task is None else task
    if task not in LENGTHS:
        raise ArgumentError(
            f"unknown --task {task!r}: expected {', '.join(LENGTHS)}{did_you_mean(task, LENGTHS)}"
        )
    own = {"--text": text, "--fact": fact, "--instead": instead, "--question": question}
    missing = [name for name, value in own.items() if value is None]
    if 0 < len(missing) < len(own):
        raise ArgumentError(f"a text of your own needs {', '.join(own)}: add {', '.join(missing)}")
    opened = options.open(checkpoint)
    if text is not None:
        name, drawn = str(text), [_own(opened, text, str(fact), str(instead), str(question))]
    else:
        size = LENGTHS[task] if length is None else length
        name = f"{task} of {size} {'entries' if task == 'phonebook' else 'tokens'}"
        drawn = _drawn(opened, task, pairs or PAIRS, size, seed or 0)
    parts, distances = components(opened.config, groups=groups), distances_of(drawn)
    half_lives = _half_lives(opened, drawn[0], framework, device)
    effects = _measure(opened, drawn, parts, distances, framework, dtype, device)
    local = "local_attention" in opened.config.block_types
    facts = {
        "checkpoint": checkpoint,
        "task": name,
        "pairs": len(drawn),
        "answered": int(effects.answered.sum()),
        "window": opened.config.visible_keys if local else None,
        "distances": distances,
        "components": [
            {"component": part.label}
            | {
                side: [
                    _cell(effects.share(getattr(effects, side), index, place))
                    for place in range(len(distances))
                ]
                for side in ("sufficient", "necessary")
            }
            for index, part in enumerate(parts)
        ],
        "half_lives": half_lives,
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=1, allow_nan=False))
    else:
        _print(facts)
    if output is not None:
        from griffin_eval.analysis.map_figure import draw

        typer.echo(str(draw(facts, output)), err=as_json)


def _tokenizer(opened: "Checkpoint") -> tuple[Any, bool]:
    from griffin_eval.converters.source.companions import tokenizer_folder
    from griffin_eval.text.load import load_tokenizer
    from griffin_eval.text.tokenizer import check_vocabulary, default_add_bos

    tokenizer = load_tokenizer(tokenizer_folder(opened.folder))
    check_vocabulary(tokenizer, opened.config.vocab_size)
    return tokenizer, default_add_bos(tokenizer, opened.config)


def _own(opened: "Checkpoint", path: Path, fact: str, instead: str, question: str) -> "Pair":
    from griffin_eval.analysis.map_pairs import own_pair
    from griffin_eval.cli.score import read_texts

    ((_, content),) = read_texts([path], False)
    return own_pair(*_tokenizer(opened), content, fact, instead, question)


def _drawn(opened: "Checkpoint", task: str, count: int, length: int, seed: int) -> "list[Pair]":
    from griffin_eval.analysis import map_pairs
    from griffin_eval.converters.source.companions import tokenizer_folder

    drawn = {"count": count, "length": length, "seed": seed}
    if task == "induction_heads":
        if opened.config.vocab_size != 16:
            raise ArgumentError(
                "--task induction_heads is for models of the paper's 16 symbols, and this one has "
                f"a vocabulary of {opened.config.vocab_size}: take phonebook or passkey"
            )
        return map_pairs.induction_pairs(**drawn)
    tokenizer, add_bos = _tokenizer(opened)
    if task == "phonebook":
        return map_pairs.phonebook_pairs(tokenizer, add_bos, **drawn)
    return map_pairs.passkey_pairs(
        tokenizer, add_bos, **drawn, folder=tokenizer_folder(opened.folder)
    )


def _half_lives(
    opened: "Checkpoint", pair: "Pair", framework: str | None, device: str | None
) -> list[dict[str, Any]]:
    """Half-lives by layer on the first document; none of a model without recurrent layers."""
    from griffin_eval.analysis.half_lives import measure, summary
    from griffin_eval.runners.load import choose_framework

    if "recurrent" not in opened.config.block_types:
        return []
    chosen = choose_framework(framework)
    layers = measure(opened, pair.original, framework=chosen, device=device)
    found = [summary(layer, None) for layer in layers]
    return [
        {"layer": each["layer"], "half_life_measured": _finite(each["half_life_measured"])}
        for each in found
    ]


def _measure(
    opened: "Checkpoint",
    pairs: "list[Pair]",
    parts: "list[Component]",
    distances: list[int | None],
    framework: str | None,
    dtype: str,
    device: str | None,
) -> "Effects":
    from rich.progress import Progress

    from griffin_eval.analysis.causal_map import measure
    from griffin_eval.runners.load import load_runner

    runner = load_runner(opened, framework=framework, dtype=dtype, device=device)
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("pairs", total=len(pairs))
        return measure(
            runner, pairs, parts, distances, progress=lambda count: bar.advance(task, count)
        )


def _cell(estimate: "Estimate | None") -> dict[str, Any] | None:
    if estimate is None:
        return None
    bounds = {"low": estimate.low, "high": estimate.high}
    return {"value": estimate.value, **_finite(bounds), "pairs": estimate.items}


def _finite(numbers: dict[str, float]) -> dict[str, float | None]:
    """The same with null for what has no bound, which JSON cannot say."""
    return {key: n if math.isfinite(n) else None for key, n in numbers.items()}


def _print(facts: dict[str, Any]) -> None:
    console = Console(width=max(Console().width, 110))
    for side, means in (
        ("sufficient", "put into the other document, it takes so much of the answer along"),
        ("necessary", "taken away, so much of the answer goes"),
    ):
        table = Table(title=f"{side}: {means}")
        table.add_column("tokens after the fact")
        for distance in facts["distances"]:
            table.add_column("end" if distance is None else f"{distance:,}", justify="right")
        for row in reversed(facts["components"]):
            table.add_row(row["component"], *map(_shown, row[side]))
        console.print(table)
    console.print(
        f"{facts['task']}: {facts['answered']} of {facts['pairs']} pairs, those whose two answers "
        "the model tells apart in both documents; 95 % intervals over them."
    )


def _shown(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "-"
    if cell["low"] is None:
        return f"{cell['value']:z.2f}"
    return f"{cell['value']:z.2f} ± {(cell['high'] - cell['low']) / 2:.2f}"
