"""Options that several commands have."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from griffin_eval.converters.naming.user_table import SHIPPED
from griffin_eval.converters.overrides import Overrides
from griffin_eval.errors import ArgumentError, MissingExtraError

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

    from griffin_eval.converters.checkpoint import Checkpoint
    from griffin_eval.converters.overrides import Overrides
    from griffin_eval.text.tokenizer import Tokenizer


MODEL_PANEL = "Model"
CHECKPOINT_PANEL = "Reading the checkpoint"


class PanelledCommand(TyperCommand):
    """A command whose help lists options by their panels, each name in full."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each panel; arguments come first, options without a panel next."""
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


JsonOnly = Annotated[bool, typer.Option("--json", help="Print JSON only.")]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        help="Folder or hub id of a LoRA, rsLoRA or DoRA of peft to merge, with a weight if "
        "you like: DIR=0.7. Several are added up.",
        rich_help_panel=MODEL_PANEL,
    ),
]
TokenizerFolder = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        help="Folder of the tokenizer; the checkpoint's own by default.",
        rich_help_panel=MODEL_PANEL,
    ),
]
Framework = Annotated[
    str | None, typer.Option(help="Framework: torch or jax.", rich_help_panel=MODEL_PANEL)
]
Dtype = Annotated[
    str,
    typer.Option(
        help="Dtype of weights and activations: auto is the checkpoint's own.",
        rich_help_panel=MODEL_PANEL,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="Device, as the framework names it: cpu, cuda:0.", rich_help_panel=MODEL_PANEL
    ),
]
NoCheck = Annotated[
    bool, typer.Option("--no-check", help="Skip the checksum verification of the weights.")
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """How a checkpoint is found, and what is stated where its files do not.

    Attributes are the options of the same names; see `griffin_eval.converters.overrides.Overrides`.
    """

    preset: Annotated[
        str | None, typer.Option(help="Preset that supplies what neither config nor shapes say.")
    ] = None
    item: Annotated[
        str | None, typer.Option(help="Item of an Orbax checkpoint or .pt file with the weights.")
    ] = None
    visible_keys: Annotated[
        int | None, typer.Option(help="Number of keys that local attention sees.")
    ] = None
    embedding_scale: Annotated[
        bool | None, typer.Option(help="Scaled embeddings, or embeddings as they are stored.")
    ] = None
    logits_soft_cap: Annotated[
        float | None, typer.Option(help="Soft cap of the logits; 0 for none.")
    ] = None
    names: Annotated[
        str | None,
        typer.Option(
            help="TOML file that maps the tensor names of this checkpoint, or one that ships: "
            f"{', '.join(SHIPPED)}."
        ),
    ] = None
    accept_differences: Annotated[
        bool,
        typer.Option(
            "--accept-differences",
            help="Weights of a trainer that computes otherwise, read as they are.",
        ),
    ] = False
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None
    subfolder: Annotated[str | None, typer.Option(help="Subfolder that holds the checkpoint.")] = (
        None
    )

    @property
    def overrides(self) -> "Overrides":
        """The facts that replace those of the files."""
        from griffin_eval.converters.overrides import Overrides

        return Overrides(
            preset=self.preset,
            item=self.item,
            visible_keys=self.visible_keys,
            embedding_scale=self.embedding_scale,
            logits_soft_cap=self.logits_soft_cap,
            names=self.names,
            accept_differences=self.accept_differences,
        )

    def find(self, path: str) -> Path:
        """The folder or file of a checkpoint, downloaded if it is on the hub."""
        from griffin_eval.converters.source.resolve import resolve

        return resolve(path, revision=self.revision, subfolder=self.subfolder)

    def open(self, path: str, adapters: Sequence[str] = ()) -> "Checkpoint":
        """The checkpoint at a path or hub id.

        Args:
            path: folder, file or hub id.
            adapters: those to merge, as ``--adapter`` has them.

        Raises:
            CheckpointError: it cannot be read as a model; or an adapter does not fit it.
        """
        from griffin_eval.converters.adapters.adapter import parse_adapters
        from griffin_eval.converters.checkpoint import Checkpoint
        from griffin_eval.converters.source.resolve import resolve_adapter

        places = parse_adapters(adapters, "--adapter")
        found = tuple((resolve_adapter(place), weight) for place, weight in places)
        return Checkpoint(self.find(path), dataclasses.replace(self.overrides, adapters=found))


def takes_checkpoint_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of `CheckpointOptions`, which it gets as ``options``."""
    fields = inspect.signature(CheckpointOptions).parameters

    @functools.wraps(command)
    def wrapper(**arguments: Any) -> None:
        options = CheckpointOptions(**{name: arguments.pop(name) for name in fields})
        command(**arguments, options=options)

    parameters = []
    for field in fields.values():
        field.annotation.__metadata__[0].rich_help_panel = CHECKPOINT_PANEL
    for parameter in inspect.signature(command).parameters.values():
        parameters += fields.values() if parameter.name == "options" else [parameter]
    keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    wrapper.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper


def tokenizer_of(opened: "Checkpoint") -> "tuple[Tokenizer, bool]":
    """The tokenizer of a checkpoint, and whether its documents begin with BOS.

    Raises:
        CheckpointError: there is none, or it is of another model.
    """
    from griffin_eval.converters.source.companions import tokenizer_folder
    from griffin_eval.text.bounded import bounded
    from griffin_eval.text.load import load_tokenizer
    from griffin_eval.text.tokenizer import default_add_bos

    tokenizer = load_tokenizer(tokenizer_folder(opened.folder))
    tokenizer = bounded(tokenizer, opened.config.vocab_size)
    return tokenizer, default_add_bos(tokenizer, opened.config)


def check_figures_folder(output: Path | None) -> None:
    """Checks before anything else is done that figures can be written into ``--output``.

    Raises:
        ArgumentError: it is a file.
        MissingExtraError: matplotlib is not installed.
    """
    if output is None:
        return
    if output.exists() and not output.is_dir():
        raise ArgumentError(f"--output {output} is a file: expected a folder")
    if find_spec("matplotlib") is None:
        raise MissingExtraError("matplotlib", "torch")


@contextmanager
def progress_on_terminal(*columns: "ProgressColumn") -> Iterator["Progress"]:
    """rich's progress on stderr, with its own columns or these; in a pipe nothing is written."""
    from rich.progress import Progress

    console = Console(stderr=True)
    progress = Progress(*columns, console=console, disable=not console.is_terminal)
    # One that is disabled ends with a blank line in releases of rich before 15.
    with progress if console.is_terminal else nullcontext():
        yield progress


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar in bytes on a terminal, nothing in a pipe; gives the function to call."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with progress_on_terminal(*columns) as progress:
        task = progress.add_task(what, total=total)
        yield lambda nbytes: progress.update(task, advance=nbytes)
