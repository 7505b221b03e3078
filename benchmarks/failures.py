"""How a benchmark ends that cannot be measured to its end."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from benchmarks.peers import Absent
from benchmarks.timing import Failed


@contextmanager
def measuring() -> Iterator[None]:
    """Ends the command with one line and exit code 1 if what is measured within fails."""
    try:
        yield
    except (Absent, Failed) as error:
        typer.echo(f"a measurement failed: {error}", err=True)
        raise typer.Exit(1) from None
