"""The command ``verify``."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from griffin_eval.cli.options import (
    CheckpointOptions,
    check_figures_folder,
    progress_bar,
    takes_checkpoint_options,
)
from griffin_eval.errors import ArgumentError


@takes_checkpoint_options
def verify(
    one: Annotated[str, typer.Argument(help="Folder, .pt or .gguf file, or hub id.")],
    other: Annotated[
        str | None,
        typer.Argument(
            help="Other folder, file or hub id, in any format; without it, the manifest."
        ),
    ] = None,
    logits: Annotated[
        bool,
        typer.Option(
            "--logits", help="Comparison of what every implementation computes with them."
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Folder for a figure of the layers, PNG and SVG, with --logits."
        ),
    ] = None,
    *,
    options: CheckpointOptions,
) -> None:
    """Compare two checkpoints tensor by tensor; exit code 1 if they are not the same.

    One alone is compared with its own manifest, which conversions leave, and with the checksums
    in a .pt file and of files from the hub.

    With --logits they also read the same tokens, in float32 on the CPU, in PyTorch and in JAX and
    in transformers and DeepMind's recurrentgemma where these are installed; what every layer
    computes is compared, and of two that differ also the divergence of their next tokens. --names,
    --accept-differences, --item, --revision and --subfolder are of the first one alone.
    """
    if output is not None and (other is None or not logits):
        raise ArgumentError("--output draws two checkpoints: name both, and add --logits")
    check_figures_folder(output)
    checkpoints = [(one, options.open(one))]
    if other is not None:
        own = dict.fromkeys(("names", "item", "revision", "subfolder"))
        shared = dataclasses.replace(options, **own, accept_differences=False)
        checkpoints.append((other, shared.open(other)))
    if other is not None:
        same = _print_tensors(*checkpoints)
    else:
        same = logits or _print_check(*checkpoints[0])
    if logits:
        same = _print_logits(checkpoints, output) and same
    if not same:
        raise typer.Exit(1)


def _print_check(path, checkpoint) -> bool:
    """Compares a checkpoint with its manifest, prints what differs; whether nothing does."""
    from griffin_eval.converters.output.manifest import check, recorded
    from griffin_eval.layout import param_specs

    total = sum(spec.size for spec in param_specs(checkpoint.config).values()) * 4
    with progress_bar("checking", total) as progress:
        count, problems = check(checkpoint, progress)
    known = recorded(checkpoint)
    says = "its manifest says" if known else "their checksums say"
    for problem in problems:
        typer.echo(problem)
    typer.echo(f"{path}: {count - len(problems)} of {count} parameters are as {says}")
    return not problems


def _print_tensors(one, other) -> bool:
    """Compares tensors of two (path, checkpoint), prints what differs; whether nothing does."""
    from griffin_eval.converters.verify import compare
    from griffin_eval.layout import param_specs

    (one, a), (other, b) = one, other
    total = sum(spec.size for spec in param_specs(a.config).values()) * 4
    with progress_bar("comparing", total) as progress:
        result = compare(a, b, progress)
    for field in result.config:
        typer.echo(f"config differs in {field}")
    for difference in result.tensors:
        typer.echo(f"{difference.name}: {difference.what}, at most by {difference.largest:.3g}")
    count = result.compared - len(result.tensors)
    typer.echo(
        f"{one} ({a.format.name}) and {other} ({b.format.name}): "
        f"{count} of {result.compared} parameters are the same bit for bit"
    )
    return result.same


def _print_logits(checkpoints, output) -> bool:
    """Runs checkpoints, prints the tables of `verify --logits`; whether all of them agree."""
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
    found = list(v.run(letters, probe, lambda text: typer.echo(text, err=True)))
    for pair, gap, _ in found:
        largest = "" if gap.first is None else f"{gap.largest:.3g}"
        table.add_row(pair, f"{gap.logits:.3g}", gap.first or "none", largest)
    console = Console(width=max(Console().width, 100))
    console.print(table)
    apart = next((one for one in found if one.distance is not None and one.agreement.logits), None)
    if apart is not None:
        _print_distance(console, apart)
    if output is not None:
        _draw(found, configs[0], output)
    for letter, (path, _) in zip("AB", checkpoints, strict=False):
        typer.echo(f"{letter}: {path}")
    if not probe.past_window:
        typer.echo("the window is larger than the probe, so that its end was not tested")
    return all(one.agreement.first is None for one in found)


def _print_distance(console, comparison) -> None:
    """Prints how far two checkpoints are apart."""
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


def _draw(found, config, output) -> None:
    from griffin_eval.crosscheck.figure import draw

    pair, _, distance = next(one for one in found if one.distance is not None)
    typer.echo(str(draw(distance, config, pair, output)))
