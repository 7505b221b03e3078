"""What `bench latency`, `bench throughput` and `bench training` have in common."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from benchmarks.failures import measuring
from griffin_eval.cli.options import check_figures_folder

if TYPE_CHECKING:
    from experiments.paper_speed.claims import Claim

Width = Annotated[int, typer.Option(help="Model width.")]
Layers = Annotated[int, typer.Option(help="Number of residual blocks.")]
Heads = Annotated[int, typer.Option(help="Number of attention heads, and of blocks of a gate.")]
Vocab = Annotated[int, typer.Option(help="Vocabulary size in tokens.")]
VisibleKeys = Annotated[int, typer.Option(help="Number of keys that Griffin's attention sees.")]
Frameworks = Annotated[
    str, typer.Option(help="Frameworks: torch (with transformers beside Griffin), jax.")
]
Memory = Annotated[
    str, typer.Option(help="Memory for weights, caches and logits, such as 500MB or 4GB.")
]
Steps = Annotated[
    int, typer.Option(help="Number of tokens sampled at each context; 2 s at most.", min=1, max=60)
]
Rounds = Annotated[int, typer.Option(help="Number of measurements of each, in turn.", min=1)]
Device = Annotated[str, typer.Option(help="Device, as the frameworks name it.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Folder for figures, PNG and SVG.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Printed JSON, nothing else.")]


def chosen_frameworks(frameworks: str) -> list[str]:
    """The distinct frameworks of a text such as ``torch,jax``, checked to be installed."""
    from griffin_eval.runners.load import choose_framework

    return [choose_framework(name) for name in dict.fromkeys(frameworks.split(","))]


def report(
    measure: Callable[[], dict[str, Any]],
    judge: Callable[[dict[str, Any]], "list[Claim]"],
    show: Callable[[Console, dict[str, Any], "Sequence[Claim]"], None],
    draw: str,
    output: Path | None,
    as_json: bool,
) -> None:
    """Measures, prints, and draws; a measurement that fails ends with one line and exit code 1.

    Args:
        measure: gives the results.
        judge: gives the claims that they bear out or not.
        show: prints both.
        draw: name of the function of `experiments.paper_speed.figures`.
        output: folder of the figures, if they are wanted.
        as_json: whether results and claims are printed as JSON instead.
    """
    check_figures_folder(output)
    with measuring():
        found = measure()
    claims = judge(found)
    if as_json:
        found["claims"] = [claim._asdict() for claim in claims]
        typer.echo(json.dumps(found, indent=1))
    else:
        show(Console(width=max(Console().width, 170)), found, claims)
    if output is not None:
        from experiments.paper_speed import figures

        for path in getattr(figures, draw)(found, output):
            typer.echo(str(path), err=as_json)
