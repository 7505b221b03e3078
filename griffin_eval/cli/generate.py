"""The command ``generate``."""

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from griffin_eval.cli.options import RUNNING, CheckpointPath, JsonOnly, takes_model_options
from griffin_eval.errors import ArgumentError
from griffin_eval.messages import printable
from griffin_eval.process import tune_process

if TYPE_CHECKING:
    from griffin_eval.evaluator import Evaluator


@takes_model_options("peft", *RUNNING)
def generate(
    checkpoint: CheckpointPath,
    prompt: Annotated[
        str, typer.Argument(help="Text to continue; - for stdin without its last line end.")
    ] = "-",
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the tokenizer's chat template.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Largest number of new tokens.", min=0)] = 64,
    temperature: Annotated[
        float, typer.Option(help="Divisor of the logits; 0 takes the likeliest token.", min=0)
    ] = 0.0,
    top_k: Annotated[
        int, typer.Option(help="Number of likeliest tokens to choose from; 0 for all.", min=0)
    ] = 0,
    top_p: Annotated[
        float, typer.Option(help="Total probability of the tokens to choose from.", max=1)
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the random number generator.", min=0)] = 0,
    as_json: JsonOnly = False,
    *,
    options: dict[str, Any],
) -> None:
    """Continue a prompt, until EOS or --max-new-tokens.

    A terminal shows the text while it is generated; a pipe gets it as a whole.
    """
    if prompt == "-":
        if sys.stdin.isatty():
            raise ArgumentError("PROMPT is missing: give a text, or pipe one into the command")
        try:
            prompt = sys.stdin.read().removesuffix("\n")
        except UnicodeDecodeError:
            raise ArgumentError(
                "the prompt on stdin is not UTF-8: convert it, for example with iconv"
            ) from None
    tune_process()
    from griffin_eval.evaluator import Evaluator
    from griffin_eval.model_arguments import parse_arguments
    from griffin_eval.opened import open_model

    model = Evaluator(open_model(parse_arguments(options | {"pretrained": checkpoint})))
    text = prompt
    if chat:
        if model.tokenizer.chat_template is None:
            raise ArgumentError(
                f"--chat: the tokenizer of {checkpoint} has no chat template; leave --chat out, or "
                "name another tokenizer with --tokenizer"
            )
        messages = [{"role": "user", "content": prompt}]
        text = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    streamed = sys.stdout.isatty() and not as_json
    show = _shower(model) if streamed else None
    answer = model.generate(
        text,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        on_token=None if show is None else lambda index, ids: show(ids, False),
    )
    tokens = answer.tokens.tolist()
    if as_json:
        typer.echo(json.dumps({"prompt": prompt, "text": answer.text, "tokens": tokens}))
    elif show is not None:
        show(tokens, True)
        typer.echo()
    else:
        typer.echo(answer.text)


def _shower(model: "Evaluator") -> Callable[[list[int], bool], None]:
    """Return a function that prints the text that new tokens add to the printed text."""
    shown = 0

    def show(tokens: list[int], ended: bool) -> None:
        nonlocal shown
        text = model.tokenizer.decode(tokens, skip_special_tokens=True)
        if not ended and text.endswith("\ufffd"):  # an incomplete UTF-8 character
            return
        # After a failed step, tokens that were printed come again.
        typer.echo(printable(text[shown:]), nl=False)
        sys.stdout.flush()
        shown = max(shown, len(text))

    return show
