"""The command ``verify``."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from griffin_eval.cli.options import (
    CheckpointPath,
    JsonOnly,
    check_figures_folder,
    progress_bar,
    takes_model_options,
)
from griffin_eval.errors import ArgumentError
from griffin_eval.messages import printable

if TYPE_CHECKING:
    from griffin_eval.converters.verify import Difference

WORST = 10  # parameters printed without --all
KINDS = {  # worst first
    "missing": "are only in one of them",
    "shape": "have another shape",
    "values": "have other values",
    "rounded": "are equal once they are cast to the other dtype",
    "dtype": "have equal values in another dtype",
}


@takes_model_options("check")
def verify(
    one: CheckpointPath,
    other: Annotated[
        str | None,
        typer.Argument(
            help="Second folder, file or hub id in any format (default: the manifest of the first)."
        ),
    ] = None,
    any_dtype: Annotated[
        bool,
        typer.Option(
            "--any-dtype", help="Accept tensors that differ only by a cast to another dtype."
        ),
    ] = False,
    all_tensors: Annotated[
        bool, typer.Option("--all", help="Print every tensor that differs, not the ten worst.")
    ] = False,
    as_json: JsonOnly = False,
    logits: Annotated[
        bool,
        typer.Option("--logits", help="Also run every implementation and compare the results."),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Folder for a figure of the layers, PNG and SVG, with --logits."
        ),
    ] = None,
    *,
    options: dict[str, Any],
) -> None:
    """Compare two checkpoints tensor by tensor; exit code 1 if they differ.

    A single checkpoint is compared with the manifest that its conversion wrote, and with the
    checksums in a .pt file and of files from the hub.

    --logits also reads the same tokens, in float32 on the CPU, in PyTorch, in JAX, and in
    transformers and DeepMind's recurrentgemma if these are installed. It compares the output of
    every layer, and for two checkpoints that differ the divergence of their next tokens. --names,
    --accept-differences, --item, --revision and --subfolder apply to the first checkpoint only.
    """
    if output is not None and (other is None or not logits):
        raise ArgumentError("--output draws two checkpoints: name both, and add --logits")
    if as_json and logits:
        raise ArgumentError("--json does not support --logits: leave one of them out")
    if "check" in options and not options["check"] and not logits:
        raise ArgumentError("--no-check needs --logits: comparing tensors reads no manifest")
    if any_dtype and other is None:
        raise ArgumentError("--any-dtype compares two checkpoints: name another one")
    check_figures_folder(output)
    from griffin_eval.model_arguments import parse_arguments
    from griffin_eval.opened import open_checkpoint, open_model

    first = parse_arguments(options | {"pretrained": one})
    checkpoints = [(one, open_checkpoint(first))]
    if other is not None:
        own = dict.fromkeys(("names", "item", "revision", "subfolder"))
        second = first.named(pretrained=other, accept_differences=False, **own)
        checkpoints.append((other, open_checkpoint(second)))
        same = _print_tensors(checkpoints, any_dtype, all_tensors, as_json)
    else:
        same = logits or _print_check(*checkpoints[0], as_json)
    if logits:
        for name, checkpoint in checkpoints:
            model = open_model(
                first.named(pretrained=name), checkpoint=checkpoint, reads_texts=False
            )
            model.confirm_weights()
        same = _print_logits(checkpoints, output) and same
    if not same:
        raise typer.Exit(1)


def _print_check(path, checkpoint, as_json) -> bool:
    """Compare a checkpoint with its manifest, print differences, and return whether it agrees."""
    from griffin_eval.converters.output.manifest import check, recorded
    from griffin_eval.layout import param_specs

    total = sum(spec.size for spec in param_specs(checkpoint.config).values()) * 4
    with progress_bar("checking", total) as progress:
        count, problems = check(checkpoint, progress)
    if as_json:
        facts = {"same": not problems, "compared": count, "problems": problems}
        typer.echo(json.dumps(facts, indent=1))
        return not problems
    known = recorded(checkpoint)
    says = "its manifest says" if known else "their checksums say"
    for problem in problems:
        typer.echo(problem)
    typer.echo(
        f"{printable(str(path))}: {count - len(problems)} of {count} parameters are as {says}"
    )
    return not problems


def _print_tensors(checkpoints, any_dtype, all_tensors, as_json) -> bool:
    """Compare the tensors of two (path, checkpoint) pairs, print differences, and return whether
    they are the same, ignoring dtypes if that is accepted."""
    from griffin_eval.converters.verify import compare
    from griffin_eval.layout import param_specs

    (one, a), (other, b) = checkpoints
    total = sum(spec.size for spec in param_specs(a.config).values()) * 4
    with progress_bar("comparing", total) as progress:
        result = compare(a, b, progress)
    same = result.same_but_for_dtypes if any_dtype else result.same
    count = result.compared - len(result.tensors)
    if as_json:
        tensors = [
            d._asdict() | {"largest": d.largest if math.isfinite(d.largest) else None}
            for d in result.tensors
        ]
        facts = {"same": same, "compared": result.compared, "identical": count}
        typer.echo(json.dumps(facts | {"config": result.config, "tensors": tensors}, indent=1))
        return same
    for field in result.config:
        typer.echo(f"config differs in {field}")
    worst = sorted(result.tensors, key=_badness, reverse=True)
    for difference in worst if all_tensors else worst[:WORST]:
        typer.echo(f"{difference.name}: {difference.what}{_at_most([difference])}")
    if len(worst) > WORST and not all_tensors:
        typer.echo(f"and {len(worst) - WORST} more parameters, which --all lists")
    typer.echo(
        f"{one} ({a.format.name}) and {other} ({b.format.name}): "
        f"{count} of {result.compared} parameters are the same bit for bit"
    )
    for kind, meaning in KINDS.items():
        alike = [each for each in result.tensors if each.kind == kind]
        if alike:
            typer.echo(f"{len(alike)} {meaning}{_at_most(alike)}")
    if not same and result.same_but_for_dtypes:
        typer.echo("they differ in their dtypes alone, which --any-dtype accepts")
    return same


def _badness(difference: "Difference") -> tuple[int, float]:
    """Return a sort key that is larger for worse differences."""
    largest = difference.largest
    return list(KINDS)[::-1].index(difference.kind), math.inf if math.isnan(largest) else largest


def _at_most(differences: "list[Difference]") -> str:
    """Return a clause on the largest difference of values, or "" if no values differ."""
    if differences[0].kind not in ("values", "rounded"):
        return ""
    largest = max(math.inf if math.isnan(each.largest) else each.largest for each in differences)
    return f", by at most {largest:.3g}" if math.isfinite(largest) else ", some not finite"


def _print_logits(checkpoints, output) -> bool:
    """Run checkpoints, print the tables of `verify --logits`, and return whether all agree."""
    from griffin_eval.crosscheck import logits as v

    letters = {letter: opened for letter, (_, opened) in zip("AB", checkpoints, strict=False)}
    configs = [checkpoint.config for checkpoint in letters.values()]
    if reason := v.mismatch(configs[0], configs[-1]):
        typer.echo(f"logits are not compared: {reason}")
        return False
    probe = v.make_probe(configs)
    table = Table(
        title=f"{probe.tokens.shape[1]} tokens, {len(probe.keep)} positions compared, float32"
    )
    for heading in (
        "pair",
        "largest logit difference",
        f"first above {v.TOLERANCE:g}, relative",
        "by at most",
    ):
        table.add_column(heading)
    comparisons = list(v.run(letters, probe, lambda text: typer.echo(text, err=True)))
    for pair, gap, _ in comparisons:
        largest = "" if gap.first is None else f"{gap.largest:.3g}"
        table.add_row(pair, f"{gap.logits:.3g}", gap.first or "none", largest)
    console = Console(width=max(Console().width, 100))
    console.print(table)
    apart = next((c for c in comparisons if c.distance is not None and c.agreement.logits), None)
    if apart is not None:
        _print_distance(console, apart)
    if output is not None:
        _draw(comparisons, configs[0], output)
    for letter, (path, _) in zip("AB", checkpoints, strict=False):
        typer.echo(f"{letter}: {path}")
    if not probe.past_window:
        typer.echo("the window is larger than the probe, so that its end was not tested")
    return all(one.agreement.first is None for one in comparisons)


def _print_distance(console, comparison) -> None:
    """Print the distance between two checkpoints, layer by layer."""
    pair, _, distance = comparison
    table = Table(title=f"{pair}, layer by layer")
    for heading in ("vectors behind", "largest difference", "over the largest value of A"):
        table.add_column(heading)
    rows = zip(distance.places, distance.largest, distance.relative, strict=True)
    for place, largest, relative in rows:
        table.add_row(place, f"{largest:.3g}", f"{relative:.3g}")
    console.print(table)
    kl = distance.divergence
    typer.echo(
        f"{pair}: KL of the next token, B from A, {kl.mean():.3g} nats in the mean of {len(kl)} "
        f"positions of random tokens, {kl.max():.3g} at most"
    )


def _draw(comparisons, config, output) -> None:
    from griffin_eval.crosscheck.figure import draw

    pair, _, distance = next(one for one in comparisons if one.distance is not None)
    typer.echo(str(draw(distance, config, pair, output)))
