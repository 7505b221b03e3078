"""The model of a server, with one more name for each saved state."""

import secrets
from collections.abc import Callable

import numpy as np

from griffin_eval.engine.live.requests import Request
from griffin_eval.engine.live.scheduler import Scheduler
from griffin_eval.errors import ArgumentError
from griffin_eval.opened import OpenModel
from griffin_eval.server.answers import Answer, Completion
from griffin_eval.server.fields import AnswerBody, Message
from griffin_eval.server.logprobs import TokenNames
from griffin_eval.server.options import ServerOptions
from griffin_eval.server.refused import Refused
from griffin_eval.states.saved_state import SavedState
from griffin_eval.text.bounded import refusal_of
from griffin_eval.text.chat import TemplateRefused, after_opening, rendered, template_name
from griffin_eval.text.tokenizer import encode_with_bos


class ServedModel:
    """A model, its tokenizer and its scheduler."""

    def __init__(self, model: OpenModel, options: ServerOptions):
        self.options = options
        config = model.checkpoint.config
        self.vocab_size = config.vocab_size
        if "global_attention" in config.block_types and options.max_tokens is None:
            raise ArgumentError(
                "the state of this model grows with the text, as it has global attention: say with "
                "--max-length how many tokens a prompt and its answer may have"
            )
        self.saved: dict[str, SavedState] = {}
        for path in options.states:
            saved = model.read_state(path)
            name = f"{options.name}:{path.stem}"
            if name in self.saved:
                raise ArgumentError(
                    f"two saved states have the name {name} ({path} is the second): rename a file"
                )
            self.saved[name] = saved
        model.confirm_weights()
        self.tokenizer, self.runner = model.tokenizer, model.runner
        self._add_bos, self._prefix = model.add_bos, model.prefix_token_id
        self.names = TokenNames(model.tokenizer)
        read = max((saved.read for saved in self.saved.values()), default=0)
        self.scheduler = Scheduler(
            self.runner,
            eos_ids=model.eos_ids,
            capacity=(options.max_tokens or 1 << 20) + read,
            state_bytes=model.arguments.state_budget,
            rows=options.rows,
            softmax_dtype=model.softmax_dtype,
            saved=self.saved,
            cache=model.open_state_cache(),
        )

    @property
    def models(self) -> list[str]:
        """Names of the model and its saved states."""
        return [self.options.name, *self.saved]

    def start_of(self, name: str | None) -> str | None:
        """Return the name of a model's saved state; None for the plain model. Refuse others."""
        if name in (None, self.options.name):
            return None
        if name not in self.saved:
            raise Refused(
                f"there is no model {name!r:.100}: expected {', '.join(self.models)}", 404, "model"
            )
        return name

    def encode(
        self, prompt: str | list[int], start: str | None, *, special: bool = True
    ) -> np.ndarray:
        """Return the int32 ids of a prompt; refuse tokens that the model's embedding lacks.

        A text gets BOS if the model was trained with it, but not after a saved state or without
        ``special`` tokens. Ids are returned as they are.
        """
        if isinstance(prompt, list):
            self.check_ids(prompt, "prompt")
            return np.array(prompt, np.int32)
        try:
            if start is not None or not special:
                return np.array(self.tokenizer.encode(prompt), np.int32)
            ids = encode_with_bos(self.tokenizer, prompt, self._add_bos)
        except ArgumentError as error:
            raise Refused(str(error), param="prompt") from None
        return np.array(ids or [self._prefix], np.int32)

    def check_ids(self, ids: list[int], name: str) -> None:
        """Refuse token ids of a field that the model lacks."""
        wrong = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            expected = f"token ids must be from 0 to {self.vocab_size - 1}, found {wrong}"
            raise Refused(refusal_of(ids, self.tokenizer) or expected, param=name)

    def without_bos(self, ids: np.ndarray) -> bool:
        """Return whether ids lack the BOS that the model was trained with."""
        return self._add_bos and ids[0] != self.tokenizer.bos_token_id

    def ask(
        self,
        prompt: str | list[int],
        index: int,
        body: AnswerBody,
        start: str | None,
        changed: Callable[[], object],
        seed: int,
    ) -> list[tuple[Request, Completion]]:
        """Return requests for the answers to a prompt, with the completions they will fill. Refuse
        those that are longer than the server allows.

        Args:
            index: Index in the body of the first of these answers.
            start: Name of the saved state to continue.
            changed: Function called when an answer has ended or, for a stream, grown.
            seed: Seed of the body.
        """
        ids = self.encode(prompt, start)
        most, new = self.options.max_tokens, body.max_tokens
        if not new and not body.echo:
            raise Refused(
                "max_tokens=0 asks for nothing: ask for 1 or more, or complete with echo=true",
                param="max_tokens",
            )
        if most is not None and "max_tokens" not in body.model_fields_set:
            new = max(min(new, most - len(ids)), 1)
        if most is not None and len(ids) + new > most:
            raise Refused(
                f"the prompt has {len(ids)} tokens and {new} new ones are asked for "
                f"(max_tokens), together more than this server's {most}",
                param="max_tokens",
            )
        text, unseen = self._text_of(prompt, ids) if body.echo or body.top is not None else ("", 0)
        read = (
            ids if start is None else np.append(np.int32(self.saved[start].origin.last_token), ids)
        )
        pairs: list[tuple[Request, Completion]] = []
        for number in range(index, index + body.n):
            answer = Answer(
                self.tokenizer,
                [stop for stop in body.stop if stop],
                changed,
                in_parts=body.stream,
            )
            request = Request(
                read,
                answer,
                score_from=1 if body.echo and body.top is not None else None,
                top=body.top,
                max_new_tokens=new,
                sampling=body.sampling,
                seed=(seed, number),
                start=start,
            )
            known = Completion(
                self.names,
                ids,
                text,
                answer,
                body.echo,
                body.top,
                unseen=unseen,
                follows=start is not None,
            )
            pairs.append((request, known))
        return pairs

    def _text_of(self, prompt: str | list[int], ids: np.ndarray) -> tuple[str, int]:
        """Return a prompt as it is echoed, and the number of its first ids that are not in that
        text, such as BOS."""
        first = int(ids[0]) if len(ids) else None
        unseen = int(first in (self.tokenizer.bos_token_id, self._prefix) and first is not None)
        if isinstance(prompt, list):
            return self.tokenizer.decode(prompt[unseen:], skip_special_tokens=False), unseen
        if first is not None and prompt.startswith(self.names.text(first)):
            unseen = 0
        return prompt, unseen

    def render(self, said: list[Message], start: str | None) -> str:
        """Return the prompt of a conversation; for a saved state, the part after its text. Refuse
        messages that the template refuses, and a template that is not the saved state's."""
        messages = [message.for_template() for message in said]
        template = self.options.chat_template or self.tokenizer.chat_template
        if start is not None:
            self._check_template(start, template)
        if template is None:
            raise Refused(
                "this model has no chat template: start the server with --chat-template FILE or "
                "plain, or use /v1/completions",
                param="messages",
            )
        render = rendered if start is None else after_opening
        try:
            return render(template, messages, self.tokenizer)
        except TemplateRefused as error:
            refused = str(error)
        system = [m["content"] for m in messages if m["role"] == "system"]
        rest = [dict(m) for m in messages if m["role"] != "system"]
        if system and rest:
            if self.options.system_role != "merge":
                raise Refused(
                    f"the chat template refuses these messages ({refused}): leave the system "
                    "message out, or start the server with --system-role merge",
                    param="messages",
                )
            rest[0]["content"] = "\n\n".join([*system, rest[0]["content"]])
            try:
                return render(template, rest, self.tokenizer)
            except TemplateRefused as error:
                refused = str(error)
        raise Refused(f"the chat template refuses these messages: {refused}", param="messages")

    def _check_template(self, start: str, template: str | None) -> None:
        saved = self.saved[start].origin.template
        if saved is None:
            raise Refused(
                f"{start} goes on from a text that was read without a chat template: use "
                "/v1/completions, or read it again with griffin-eval read --chat",
                param="model",
            )
        if template is None or template_name(template) != saved:
            raise Refused(
                f"{start} goes on from a text that was read with another chat template: start the "
                "server with that one (--chat-template)",
                param="model",
            )


def any_seed() -> int:
    """Return a random seed."""
    return secrets.randbits(63)
