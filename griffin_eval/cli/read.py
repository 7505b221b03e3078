"""The command ``read``."""

from pathlib import Path
from typing import Annotated, Any

import typer

from griffin_eval.cli.options import (
    RUNNING,
    CheckpointPath,
    progress_on_terminal,
    takes_model_options,
)
from griffin_eval.cli.score import read_texts
from griffin_eval.errors import ArgumentError
from griffin_eval.process import tune_process


@takes_model_options("peft", *RUNNING)
def read(
    checkpoint: CheckpointPath,
    text: Annotated[Path, typer.Argument(help="UTF-8 file to read from its start; - for stdin.")],
    save: Annotated[
        Path, typer.Option(help="File for the state, in safetensors; replaces an older state.")
    ],
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Read the text as a user's first message, for chats."),
    ] = False,
    chat_template: Annotated[
        str | None,
        typer.Option(help="Template file instead of the tokenizer's, or plain; with --chat."),
    ] = None,
    *,
    options: dict[str, Any],
) -> None:
    """Read a text once and save the model's state, which any number of requests can continue.

    The state has a fixed size for any length of the text, unless the model has global attention.
    ``lm_eval --model griffin --model_args ...,state=FILE`` continues it, in either framework.
    """
    from griffin_eval.evaluator import Evaluator
    from griffin_eval.model_arguments import parse_arguments
    from griffin_eval.opened import open_model
    from griffin_eval.states.saved_state import check_replaceable
    from griffin_eval.text.chat import template_option

    if chat_template is not None and not chat:
        raise ArgumentError("--chat-template needs --chat: add --chat, or leave it out")
    arguments = parse_arguments(options | {"pretrained": checkpoint})
    tune_process()
    check_replaceable(save)
    template = template_option(chat_template)
    ((name, content),) = read_texts([text], False)
    model = Evaluator(open_model(arguments))
    with progress_on_terminal() as progress:
        bar = progress.add_task("tokens", total=None)
        state = model.read(
            content,
            name=name,
            chat=chat,
            chat_template=template,
            progress=lambda tokens: progress.advance(bar, tokens),
        )
    state.save(save)
    size = save.stat().st_size
    typer.echo(f"{save}: the state after {state.origin.tokens} tokens, {size:,} bytes")
