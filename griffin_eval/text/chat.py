"""Chat templates, which both kinds of tokenizers render alike."""

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from griffin_eval.errors import ArgumentError, CheckpointError, MissingExtraError
from griffin_eval.messages import first_line
from griffin_eval.text.tokenizer import CONFIG_FILE, TEMPLATE_FILE, Tokenizer

# Of a template that computes, in jinja2's sandbox; jinja2 lets them through as they are.
_FAILURES = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
PLAIN = "plain"  # instead of a template: the contents of the messages, a blank line between them
_MARK = "\U000f5a5a\U000f1d1d"  # no characters, of private use
GEMMA_TURNS = ("<start_of_turn>", "<end_of_turn>")  # ordinary pieces to sentencepiece

logger = logging.getLogger(__name__)


class WithChatTemplate(Tokenizer):
    """A tokenizer with a chat template."""

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool
    ) -> str:
        if self.chat_template is None:
            raise CheckpointError(
                f"the tokenizer {self.name} has no chat template, neither {TEMPLATE_FILE} nor in "
                f"{CONFIG_FILE}; run without --apply_chat_template, or add the file"
            )
        template, how = self.chat_template, {"add_generation_prompt": add_generation_prompt}
        try:
            return rendered(template, messages, self, **how)
        except TemplateRefused as error:
            refused = error
        rest = [message for message in messages if message["role"] != "system"]
        if rest and len(rest) < len(messages):
            logger.warning("the chat template failed (%s): system messages are left out", refused)
            try:
                return rendered(template, rest, self, **how)
            except TemplateRefused as error:
                refused = error
        raise CheckpointError(f"{self.name}: the chat template refuses the messages: {refused}")


def read_chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """The template that transformers would use, or None.

    Args:
        folder: of the tokenizer; its ``chat_template.jinja`` comes first.
        settings: its ``tokenizer_config.json``; of several templates, the one called default.
    """
    if (folder / TEMPLATE_FILE).is_file():
        return (folder / TEMPLATE_FILE).read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, each with a name
        return {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


class TemplateRefused(Exception):
    """Why a chat template does not take a conversation."""


def template_option(given: str | None) -> str | None:
    """The template that ``--chat-template`` means: the content of a file, or `PLAIN`.

    Raises:
        ArgumentError: the file cannot be read.
    """
    if given in (None, PLAIN):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ArgumentError(f"--chat-template {given} cannot be read: {reason}") from None


def template_name(template: str) -> str:
    """What a file records of a template: `PLAIN`, or the SHA-256 of its text."""
    return template if template == PLAIN else hashlib.sha256(template.encode()).hexdigest()


def rendered(
    template: str,
    messages: Sequence[dict[str, Any]],
    tokenizer: Tokenizer,
    *,
    add_generation_prompt: bool = True,
) -> str:
    """Return the prompt of a conversation.

    The template runs in jinja2's sandbox: it is a program, and comes with the checkpoint.

    Args:
        template: Template in Jinja's language, or `PLAIN`.
        messages: Messages, each with ``role`` and ``content``.
        tokenizer: Tokenizer whose special tokens the template may name.
        add_generation_prompt: as of `Tokenizer.apply_chat_template`.

    Raises:
        TemplateRefused: the template does not take these messages, or is none.
    """
    if template == PLAIN:
        return "\n\n".join(message["content"] for message in messages)
    try:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError:
        raise MissingExtraError("transformers", "torch") from None
    special_tokens: dict[str, Any] = {**tokenizer.special_tokens}
    try:
        prompts, _ = render_jinja_template(
            conversations=[[*messages]],
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **special_tokens,
        )
    except (TemplateError, *_FAILURES) as error:
        raise TemplateRefused(first_line(error) or type(error).__name__) from None
    return prompts[0]


def opening(template: str, text: str, tokenizer: Tokenizer) -> str:
    """The prompt of a conversation in which the user says a text first, up to its end and a blank
    line: what a saved state has read, for conversations that go on from it.

    Raises:
        TemplateRefused: the template does not take it, or changes it.
    """
    head, _ = _parted(
        template, [{"role": "user", "content": f"{text.rstrip()}\n\n{_MARK}"}], tokenizer
    )
    if text.strip() not in head:
        raise TemplateRefused("it changes what the user says")
    return head


def after_opening(
    template: str,
    messages: Sequence[dict[str, Any]],
    tokenizer: Tokenizer,
    *,
    add_generation_prompt: bool = True,
) -> str:
    """What follows `opening` in a conversation, to whose first message the text belongs.

    Raises:
        TemplateRefused: the first message is not the user's, or the template does not take these.
    """
    first, *others = messages
    if first["role"] != "user":
        raise TemplateRefused(f"the user has begun, and a message of {first['role']!r} comes first")
    marked = [first | {"content": _MARK + first["content"]}, *others]
    head, rest = _parted(template, marked, tokenizer, add_generation_prompt=add_generation_prompt)
    if head != _parted(template, [{"role": "user", "content": _MARK}], tokenizer)[0]:
        raise TemplateRefused("it begins this conversation in another way than the saved one")
    return rest


def _parted(
    template: str, messages: Sequence[dict[str, Any]], tokenizer: Tokenizer, **how: bool
) -> tuple[str, str]:
    """A prompt before and after `_MARK`."""
    head, mark, rest = rendered(template, messages, tokenizer, **how).partition(_MARK)
    if not mark:
        raise TemplateRefused("it leaves out what the user says")
    return head, rest
