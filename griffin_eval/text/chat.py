"""Chat templates, which both kinds of tokenizers render alike."""

import logging
from pathlib import Path
from typing import Any

from griffin_eval.errors import CheckpointError
from griffin_eval.text.tokenizer import CONFIG_FILE, TEMPLATE_FILE

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
GEMMA_TURNS = ("<start_of_turn>", "<end_of_turn>")  # ordinary pieces to sentencepiece

logger = logging.getLogger(__name__)


class WithChatTemplate:
    """A tokenizer with a chat template; see `griffin_eval.text.tokenizer.Tokenizer`.

    Subclasses define ``_render``, which raises jinja2's TemplateError where a template refuses. It
    runs the template in jinja2's sandbox: a template is a program, and comes with the checkpoint.
    """

    name: str
    chat_template: str | None

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool
    ) -> str:
        from jinja2 import TemplateError

        if self.chat_template is None:
            raise CheckpointError(
                f"the tokenizer {self.name} has no chat template, neither {TEMPLATE_FILE} nor in "
                f"{CONFIG_FILE}; run without --apply_chat_template, or add the file"
            )
        failures = TemplateError, *_FAILURES
        try:
            return self._render(messages, add_generation_prompt)
        except failures as error:
            refused = error
        rest = [message for message in messages if message["role"] != "system"]
        if rest and len(rest) < len(messages):
            logger.warning("the chat template failed (%s): system messages are left out", refused)
            try:
                return self._render(rest, add_generation_prompt)
            except failures as error:
                refused = error
        raise CheckpointError(f"{self.name}: the chat template refuses the messages: {refused}")

    def _render(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        raise NotImplementedError


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
