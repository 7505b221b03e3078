"""Options shared by several commands."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import Field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from griffin_eval.errors import ArgumentError, MissingExtraError
from griffin_eval.model_arguments import CHECKPOINT, FIELDS

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

    from griffin_eval.drawing import Files


MODEL_PANEL = "Model"
CHECKPOINT_PANEL = "Reading the checkpoint"


class PanelledCommand(TyperCommand):
    """A command whose help groups options by panel and shows names in full."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each panel: arguments, options without a panel, then the others."""
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            panel = getattr(parameter, "rich_help_panel", None) or kind
            record = parameter.get_help_record(ctx)
            if record is not None:
                panels.setdefault(panel, []).append(record)
        for panel, records in panels.items():
            if records:
                with formatter.section(panel):
                    formatter.write_dl(records)


CheckpointPath = Annotated[str, typer.Argument(help="Folder, .pt or .gguf file, or hub id.")]
JsonOnly = Annotated[bool, typer.Option("--json", help="Print JSON only.")]
# Fields of `ModelArguments` that configure how a model runs.
RUNNING = ("tokenizer", "framework", "dtype", "device", "check")


def takes_model_options(*names: str) -> Callable[..., Any]:
    """Add ``options``, a dict of fields of `ModelArguments`: ``names`` and `CHECKPOINT`."""
    return takes_options("options", {name: FIELDS[name] for name in (*names, *CHECKPOINT)})


def takes_options(name: str, fields: Mapping[str, Field]) -> Callable[..., Any]:
    """Replace a parameter of a command with options.

    Args:
        name: Parameter that gets a dict of the values that the user set, by field.
        fields: Fields made by `griffin_eval.arguments.option`, by name.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def wrapper(**arguments: Any) -> None:
            options = {field: arguments.pop(field) for field in fields}
            if "check" in options:  # the option is the negation, --no-check
                options["check"] = not options["check"]
            given = {field: value for field, value in options.items() if value not in (None, [])}
            command(**arguments, **{name: given})

        parameters = []
        for parameter in inspect.signature(command).parameters.values():
            if parameter.name == name:
                parameters += [_parameter(*field) for field in fields.items()]
            else:
                parameters.append(parameter)
        keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
        wrapper.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate


def _parameter(name: str, field: Field) -> inspect.Parameter:
    """Return the parameter of a command for a field."""
    kind, flag = field.metadata["kind"], field.metadata["flag"]
    panel: str | None = CHECKPOINT_PANEL if name in CHECKPOINT else MODEL_PANEL
    default = field.default if type(field.default) is kind else None
    if name == "check":  # the option is the negation, --no-check
        default = False
    if name == "check" or name not in FIELDS:
        panel = None
    option = typer.Option(
        *([] if flag is None else [flag]),
        **field.metadata["option"],
        rich_help_panel=panel,
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind | None if default is None else kind, option],
    )


FigureFormat = Annotated[
    str, typer.Option("--format", help="Formats of the figures: png, svg, pdf.", metavar="A,B,…")
]
FigureWidth = Annotated[
    float | None,
    typer.Option("--width", help="Width of the figures in inches; 3.3 for one column.", min=1),
]
FigureTitles = Annotated[
    bool,
    typer.Option(
        "--figure-titles/--no-figure-titles",
        help="Write titles into the figures; papers have them in captions.",
    ),
]


def check_figures_folder(output: Path | None, formats: str = "png,svg") -> None:
    """Check that figures can be written into ``--output``, before any other work.

    Raises:
        ArgumentError: The output is a file, or a format is unknown.
        MissingExtraError: matplotlib is not installed.
    """
    from griffin_eval.converters.files import existing_kind

    if output is None:
        return
    existing_kind(output)  # refuses a folder below a file
    if output.exists() and not output.is_dir():
        raise ArgumentError(f"--output {output} is a file: expected a folder")
    if find_spec("matplotlib") is None:
        raise MissingExtraError("matplotlib", "torch")
    figure_files(output, formats)


def figure_files(
    folder: Path, formats: str, width: float | None = None, *, titles: bool = True
) -> "Files":
    """Return the folder and the settings of the figures."""
    from griffin_eval.drawing import FORMATS, Files

    endings = list(dict.fromkeys(one.strip().lower() for one in formats.split(",") if one.strip()))
    if not endings or not set(endings) <= set(FORMATS):
        raise ArgumentError(f"--format {formats}: expected some of {', '.join(FORMATS)}")
    return Files(folder, endings, width, titles)


@contextmanager
def progress_on_terminal(*columns: "ProgressColumn") -> Iterator["Progress"]:
    """Show rich's progress on stderr if it is a terminal, with default columns or these."""
    from rich.progress import Progress

    console = Console(stderr=True)
    progress = Progress(*columns, console=console, disable=not console.is_terminal)
    # Releases of rich before 15 end a disabled progress with a blank line.
    with progress if console.is_terminal else nullcontext():
        yield progress


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar in bytes on a terminal; yield the function that advances it."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with progress_on_terminal(*columns) as progress:
        task = progress.add_task(what, total=total)
        yield lambda nbytes: progress.update(task, advance=nbytes)
