"""Options and messages that several benchmark commands share."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console

from benchmarks.peers import Absent
from benchmarks.timing import Failed
from griffin_eval.config import PRESETS, GriffinConfig
from griffin_eval.errors import ArgumentError
from griffin_eval.messages import did_you_mean

Rounds = Annotated[int, typer.Option(help="Number of interleaved rounds.", min=1)]
Framework = Annotated[str, typer.Option(help="Framework: torch or jax.")]
AnyDtype = Annotated[str, typer.Option(help="Dtype of weights and activations.")]
Figures = Annotated[
    Path | None, typer.Option("--output", "-o", help="Folder for figures, PNG and SVG.")
]
Model = Annotated[str, typer.Argument(help="Folder, .pt or .gguf file, or hub id.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON only.")]
Pythons = Annotated[
    list[Path] | None,
    typer.Option(
        "--python",
        help="Interpreter of an environment to measure, by default this one. Repeat it to compare "
        "several.",
        exists=True,
        dir_okay=False,
    ),
]


class Interpreter(NamedTuple):
    """A measured environment: a suffix, empty if it is the only one, and the path of its Python."""

    label: str
    path: str

    def named(self, framework: str) -> str:
        """Return the name of this package's implementation in a table."""
        return f"griffin {framework}{self.label}"


def interpreters(paths: Sequence[Path] | None) -> list[Interpreter]:
    """Return the interpreters of `Pythons`, by default the one that runs this."""
    # Paths are not resolved, since an environment's Python is a link to another one.
    absolute = [Path(os.path.abspath(path)) for path in paths or [sys.executable]]
    if len(absolute) == 1:
        return [Interpreter("", str(absolute[0]))]
    return [
        Interpreter(f", {number} {path.parent.parent.name}", str(path))
        for number, path in enumerate(absolute, 1)
    ]


def chosen_preset(name: str) -> GriffinConfig:
    """Return the config of a preset; ArgumentError for other names."""
    if name not in PRESETS:
        raise ArgumentError(
            f"unknown preset {name!r}: expected one of {', '.join(PRESETS)}"
            f"{did_you_mean(name, PRESETS)}"
        )
    return PRESETS[name]


def tell(text: str) -> None:
    """Print a line about long work on a terminal, nothing in a pipe."""
    console = Console(stderr=True)
    if console.is_terminal:
        console.print(text, highlight=False, markup=False)


@contextmanager
def measuring() -> Iterator[None]:
    """End the command with one line and exit code 1 if a measurement fails."""
    try:
        yield
    except (Absent, Failed) as error:
        typer.echo(f"a measurement failed: {error}", err=True)
        raise typer.Exit(1) from None
