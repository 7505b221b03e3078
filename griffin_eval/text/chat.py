"""Chat templates, rendered alike for both kinds of tokenizers."""

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from griffin_eval.errors import ArgumentError, CheckpointError, MissingExtraError
from griffin_eval.messages import first_line
from griffin_eval.text.tokenizer import CONFIG_FILE, TEMPLATE_FILE, Tokenizer

# Errors of computations in a template, which jinja2's sandbox raises as they are.
_FAILURES = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
PLAIN = "plain"  # joins the contents of the messages with blank lines instead of a template
_MARK = "\U000f5a5a\U000f1d1d"  # private-use characters
GEMMA_TURNS = ("<start_of_turn>", "<end_of_turn>")  # ordinary pieces for sentencepiece

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
    """Return the template that transformers would use, or None: ``chat_template.jinja``, or the
    default one in ``tokenizer_config.json``."""
    if (folder / TEMPLATE_FILE).is_file():
        return (folder / TEMPLATE_FILE).read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        return {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


class TemplateRefused(Exception):
    """The reason why a chat template refuses a conversation."""


def template_option(template: str | None) -> str | None:
    """Return the template that ``--chat-template`` names: the content of a file, or `PLAIN`."""
    if template in (None, PLAIN):
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ArgumentError(f"--chat-template {template} cannot be read: {reason}") from None


def template_name(template: str) -> str:
    """Return the name of a template in saved states: `PLAIN`, or the SHA-256 of its text."""
    return template if template == PLAIN else hashlib.sha256(template.encode()).hexdigest()


def rendered(
    template: str,
    messages: Sequence[dict[str, Any]],
    tokenizer: Tokenizer,
    *,
    add_generation_prompt: bool = True,
) -> str:
    """Return the prompt of a conversation by a Jinja template or `PLAIN`, or raise TemplateRefused.

    The template runs in jinja2's sandbox, since it is an untrusted program from the checkpoint. It
    may name the tokenizer's special tokens.
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
    """Return the beginning of the prompt of a conversation whose first user message begins with a
    text, up to the blank line after the text. Saved states of conversations end there. Raises
    TemplateRefused if the template refuses or changes the text."""
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
    """Return the prompt after `opening` of a conversation whose first message has that text left
    out. Raises TemplateRefused if it is not the user's, or the template refuses the messages."""
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
    """Return a prompt before and after `_MARK`."""
    head, mark, rest = rendered(template, messages, tokenizer, **how).partition(_MARK)
    if not mark:
        raise TemplateRefused("it leaves out what the user says")
    return head, rest
