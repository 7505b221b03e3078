"""The command ``score``."""

import csv
import io
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TextIO

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from griffin_eval.cli.options import (
    RUNNING,
    CheckpointPath,
    progress_on_terminal,
    takes_model_options,
)
from griffin_eval.errors import ArgumentError
from griffin_eval.process import tune_process

if TYPE_CHECKING:
    import numpy as np

    from griffin_eval.evaluator import Score

TOKEN_COLUMNS = ("text", "index", "id", "token", "start", "end", "word", "nats", "bits", "rank")
TOKEN_COLUMNS += ("entropy",)
WORD_COLUMNS = ("text", "word", "characters", "start", "end", "tokens", "nats", "bits")


class Scored(NamedTuple):
    """A text and its scores.

    Attributes:
        name: Name of the text in the output.
        score: Scores of the text, of which N tokens are scored.
        spans: int64 [N, 2], first and end character of each scored token.
        start: First scored character: 0 unless the text spells its BOS.
    """

    name: str
    text: str
    score: "Score"
    spans: "np.ndarray"
    start: int


@takes_model_options("peft", *RUNNING)
def score(
    checkpoint: CheckpointPath,
    texts: Annotated[list[Path], typer.Argument(help="UTF-8 files, one text each; - for stdin.")],
    lines: Annotated[
        bool, typer.Option("--lines", help="Treat each non-empty line as a separate text.")
    ] = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print CSV only, with a row for every token.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="New file for the CSV (default: standard output)."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace --output if it exists.")
    ] = False,
    words: Annotated[
        bool, typer.Option("--words", help="Make the rows of --csv words instead of tokens.")
    ] = False,
    states: Annotated[
        Path | None,
        typer.Option(help="New folder for states and gates of all layers, one file per text."),
    ] = None,
    *,
    options: dict[str, Any],
) -> None:
    """Score texts: compute the log-probability, rank and entropy of every token.

    Each text is read as a whole, after one BOS (or EOS if there is no BOS), which is not scored.
    """
    from griffin_eval.converters.files import existing_kind

    if words and not as_csv:
        raise ArgumentError("--words needs --csv: add --csv")
    if output is not None and not as_csv:
        raise ArgumentError("--output needs --csv: add --csv")
    found = None if output is None else existing_kind(output)
    if found not in (None, "a file"):
        raise ArgumentError(f"--output {output} is {found}: name a new file")
    if found is not None and not overwrite:
        raise ArgumentError(f"--output {output} exists already: name a new file, or --overwrite")
    if states is not None and states.exists() and (states.is_file() or any(states.iterdir())):
        raise ArgumentError(f"--states {states}: expected a new or an empty folder")
    named = list(read_texts(texts, lines))
    scored = _score(named, checkpoint, options, states)
    if not as_csv:
        _print(scored)
        return
    if output is None:
        _write_csv(scored, sys.stdout, words)
        return
    from griffin_eval.json_files import write_whole

    content = io.StringIO(newline="")
    _write_csv(scored, content, words)
    write_whole(output, content.getvalue().encode())


def _write_csv(scored: list[Scored], file: TextIO, words: bool) -> None:
    """Write a row for every token or word; texts are quoted, since they may contain line ends."""
    table = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    table.writerow(WORD_COLUMNS if words else TOKEN_COLUMNS)
    for one in scored:
        table.writerows(word_rows(one) if words else token_rows(one))


def read_texts(files: list[Path], lines: bool) -> Iterator[tuple[str, str]]:
    """Yield the name and content of every text.

    Args:
        lines: Whether each line is a separate text, named ``file:number`` from 1.

    Raises:
        ArgumentError: A file cannot be read, or has no text.
    """
    for file in files:
        try:
            content = _bytes_of(file).decode("utf-8")  # keeps line ends
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise ArgumentError(f"{file} cannot be read as a text: {reason}") from None
        if not content.strip():
            raise ArgumentError(f"{file} has no text: expected at least one character to score")
        if not lines:
            yield as_unicode(file), content
            continue
        for number, line in enumerate(content.split("\n"), 1):
            if line.strip():
                yield f"{as_unicode(file)}:{number}", line.removesuffix("\r")


def _bytes_of(file: Path) -> bytes:
    """Return the content of a file, or of stdin for ``-``."""
    return sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()


def as_unicode(path: str | Path) -> str:
    """Return a path as text, with replacement characters for bytes that are not UTF-8."""
    return os.fsencode(path).decode("utf-8", "replace")


def token_rows(scored: Scored) -> Iterator[tuple[Any, ...]]:
    """Yield a row of `TOKEN_COLUMNS` for each token; nats and bits are -log p, entropy in nats."""
    from griffin_eval.text.words import word_spans, words_of_tokens

    found = scored.score
    assert found.ranks is not None and found.entropies is not None
    word = words_of_tokens(word_spans(scored.text), scored.spans)
    for index, (start, end) in enumerate(scored.spans.tolist()):
        nats = 0.0 - found.logprobs[index]
        yield (
            *(scored.name, index, int(found.tokens[index + 1]), scored.text[start:end]),
            *(start, end, int(word[index]), _number(nats), _number(nats / math.log(2))),
            *(int(found.ranks[index]), _number(found.entropies[index])),
        )


def word_rows(scored: Scored) -> Iterator[tuple[Any, ...]]:
    """Yield a row of `WORD_COLUMNS` for each word, with sums over its tokens."""
    import numpy as np

    from griffin_eval.text.words import word_spans, words_of_tokens

    spans = word_spans(scored.text)
    word = words_of_tokens(spans, scored.spans)
    tokens = np.bincount(word, minlength=len(spans))
    nats = np.bincount(word, -scored.score.logprobs, minlength=len(spans))
    for index, (start, end) in enumerate(spans.tolist()):
        bits = nats[index] / math.log(2)
        yield (
            *(scored.name, index, scored.text[start:end], start, end),
            *(int(tokens[index]), _number(nats[index]), _number(bits)),
        )


def _score(
    named: list[tuple[str, str]],
    checkpoint: str,
    options: dict[str, Any],
    states: Path | None,
) -> list[Scored]:
    tune_process()
    from griffin_eval.evaluator import Evaluator
    from griffin_eval.model_arguments import parse_arguments
    from griffin_eval.opened import open_model
    from griffin_eval.states.saved_state import save_whole

    model = Evaluator(open_model(parse_arguments(options | {"pretrained": checkpoint})))
    with progress_on_terminal() as progress:
        bar = progress.add_task("tokens", total=None)
        scores = model.score(
            [text for _, text in named],
            details=True,
            progress=lambda tokens: progress.advance(bar, tokens),
        )
    scored = []
    for (name, text), score in zip(named, scores, strict=True):
        spans, count = model.tokenizer.spans(text), len(score.logprobs)
        if not 0 < count <= len(spans):
            raise ArgumentError(f"{name} has no token to score")
        # If the text spells BOS at its start, that token is the unscored one.
        start = 0 if count == len(spans) else int(spans[-count - 1, 1])
        scored.append(Scored(name, text, score, spans[-count:], start))
    if states is not None:
        for index, one in enumerate(scored):
            metadata = {
                "text": one.name,
                "checkpoint": as_unicode(checkpoint),
                "dtype": model.dtype,
            }
            save_whole(states / f"{index}.safetensors", model.layer_states(one.text), metadata)
    return scored


def _number(value: float) -> float:
    return float(f"{value:.8g}")


def _print(scored: list[Scored]) -> None:
    table = Table()
    for heading in ("text", "tokens", "nats", "bits a token", "bits a byte", "perplexity"):
        table.add_column(heading, justify="left" if heading == "text" else "right")
    for name, text, score, _, start in scored:
        nats, tokens = -score.total, len(score.logprobs)
        table.add_row(
            escape(name),
            str(tokens),
            f"{nats:.2f}",
            f"{nats / tokens / math.log(2):.4f}",
            f"{nats / len(text[start:].encode()) / math.log(2):.4f}",
            f"{math.exp(min(nats / tokens, 700)):.4g}",
        )
    Console().print(table)
