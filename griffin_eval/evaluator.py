"""Scoring and generation with a checkpoint, on texts or token ids (`griffin_eval.Evaluator`)."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.errors import ArgumentError, BadInput, MissingExtraError
from griffin_eval.model_arguments import parse_arguments

if TYPE_CHECKING:
    import numpy as np

    from griffin_eval.opened import OpenModel
    from griffin_eval.states.saved_state import SavedState
    from griffin_eval.text.stop_strings import StopStrings
    from griffin_eval.text.tokenizer import Tokenizer

__all__ = ["Continuation", "Evaluator", "Score"]

_NO_TOKEN = "expected a text with at least one token, found an empty one"

Text = str | Sequence[int]  # a text, or its token ids


class Score(NamedTuple):
    """The log-probabilities of one text.

    Attributes:
        tokens: int32 [T], token ids; a text is preceded by the prefix token.
        logprobs: float64 [T - 1], log-probability in nats of every token after the first.
        greedy: bool [T - 1], whether that token was the most likely one.
        ranks: int64 [T - 1], 1 plus the number of more likely tokens; None without ``details``.
        entropies: float64 [T - 1], entropy of each prediction in nats; None without ``details``.
        texts: Text of every token after the first; None without ``details`` or a tokenizer.
    """

    tokens: "np.ndarray"
    logprobs: "np.ndarray"
    greedy: "np.ndarray"
    ranks: "np.ndarray | None" = None
    entropies: "np.ndarray | None" = None
    texts: list[str] | None = None

    @property
    def total(self) -> float:
        """Log-probability of the text in nats."""
        return float(self.logprobs.sum())


class Continuation(NamedTuple):
    """The continuation of a prompt.

    Attributes:
        tokens: int32 [N], new token ids, without the EOS that ended them.
        text: Text of the tokens; None if the prompt was given as token ids.
    """

    tokens: "np.ndarray"
    text: str | None


class Evaluator:
    """A checkpoint on a device, for scoring and generating.

    It works like ``lm_eval --model griffin``: common prefixes of requests are read once, texts can
    have any length, and there is no padding.

    Args:
        checkpoint: Path, or an open checkpoint or model; an open model has its own arguments.
        framework: ``torch`` or ``jax``; None for the first of these that is installed.
        dtype: float32, bfloat16, float16, float64 as a name or a dtype of NumPy, PyTorch or JAX, or
            ``auto`` for that of the checkpoint; the recurrence, norms and softmax are at least
            float32.
        device: Device such as ``cpu`` or ``cuda:0``; None for the best one.
        load: ``quantised`` keeps the matrices of a quantised checkpoint quantised in memory, as
            `griffin_eval.load` does.
        tensor_parallel_size: Number of devices that share the weights.
        max_batch_size: Maximum number of texts that a step reads or continues; None for the fastest
            number that fits into memory. Results do not depend on it.
        tokenizer: Folder or hub id of the tokenizer; None for the checkpoint's own.
        state: File of a saved state (`read`) that every text continues; texts are then tokenised
            alone, without BOS.
        check: Whether to compare the weights with their checksums before the first result: the
            manifest beside them, those in a ``.pt`` file, and the hub's for files in its cache.

    Attributes:
        config: Architecture, a `GriffinConfig`.
        framework: ``torch`` or ``jax``.
        dtype: Dtype of weights and activations.

    Raises:
        ValueError: The checkpoint cannot be read as a model, or an argument is invalid. The first
            call raises it if the weights differ from a checksum.
        ImportError: The framework is not installed.
    """

    def __init__(
        self,
        checkpoint: "str | Path | Checkpoint | OpenModel",
        *,
        framework: str | None = None,
        dtype: Any = "auto",
        device: Any = None,
        load: str | None = None,
        tensor_parallel_size: int = 1,
        max_batch_size: int | None = None,
        tokenizer: str | Path | None = None,
        state: str | Path | None = None,
        check: bool = True,
    ) -> None:
        from griffin_eval.opened import OpenModel, open_model

        if not isinstance(checkpoint, OpenModel):
            given = checkpoint if isinstance(checkpoint, Checkpoint) else None
            arguments = {
                "pretrained": checkpoint if given is None else given.path,
                "framework": framework,
                "dtype": dtype,
                "device": device,
                "load": load,
                "tensor_parallel_size": tensor_parallel_size,
                "max_batch_size": max_batch_size,
                "tokenizer": tokenizer,
                "state": state,
                "check": check,
            }
            checkpoint = open_model(parse_arguments(arguments), checkpoint=given, reads_texts=False)
        self._model, self.config = checkpoint, checkpoint.checkpoint.config
        self.framework, self.dtype = checkpoint.runner.framework, checkpoint.runner.dtype
        _ = checkpoint.limits  # fixed now, since they depend on the free memory

    def __repr__(self) -> str:
        return f"Evaluator({self._model.checkpoint!r}, {self.framework}, {self.dtype})"

    def score(
        self,
        texts: Sequence[Text],
        *,
        details: bool = False,
        progress: Callable[[int], object] = lambda tokens: None,
    ) -> list[Score]:
        """Return the log-probabilities of texts, in order.

        Args:
            texts: Texts, which are scored after one BOS (EOS if there is none), or token ids, of
                which all but the first are scored.
            details: Whether to compute the rank and the text of every token and the entropy of
                every prediction.
            progress: Function of the number of tokens that were read.

        Raises:
            ValueError: A text has no token, ids are not the model's, or results are not finite.
        """
        from griffin_eval.engine import parallel
        from griffin_eval.engine.tree import Scorable

        self._model.confirm_weights()
        sequences = [self._ids(text, scored=True) for text in _several(texts)]
        scores: dict[int, Score] = {}

        def keep(index: int, result: Any) -> None:
            found: Any = (None if values is None else values.copy() for values in result)
            scores[index] = Score(sequences[index], *found)

        parallel.score(
            self._model.runners,
            [Scorable(ids, 1) for ids in sequences],
            limits=self._model.limits,
            softmax_dtype=self._model.softmax_dtype,
            on_result=keep,
            progress=progress,
            describe="text {}".format,
            details=details,
        )
        found = [scores[index] for index in range(len(sequences))]
        if not details:
            return found
        named = zip(texts, found, strict=True)
        return [score._replace(texts=self._token_texts(text, score)) for text, score in named]

    def _token_texts(self, text: Text, score: Score) -> list[str] | None:
        """Return the text of every scored token: its part of a text, or its id decoded."""
        count = len(score.logprobs)
        if isinstance(text, str):
            spans = self.tokenizer.spans(text).tolist()
            return [text[start:end] for start, end in spans[len(spans) - count :]]
        with suppress(BadInput, MissingExtraError):  # token ids need no tokenizer
            ids = score.tokens[1:].tolist()
            return [self.tokenizer.decode([id_], skip_special_tokens=False) for id_ in ids]
        return None

    def layer_states(self, text: Text) -> dict[str, "np.ndarray"]:
        """Return the states of every layer after each token of a text, and its gates.

        Args:
            text: Text or token ids as in `score`.

        Returns:
            int32 [T] ``tokens``, with the prefix token of a text, and the float32 tensors that
            `griffin_eval.analysis.layer_states.layer_states` lists.

        Raises:
            ValueError: The text has no token, or the model is split over devices or continues a
                saved state.
        """
        from griffin_eval.analysis.layer_states import layer_states

        runner: Any = self._model.runner
        if runner.devices > 1 or self._model.state is not None:
            raise ArgumentError(
                "states of layers are read on one device, from the beginning of a text: leave out "
                "tensor_parallel_size and state"
            )
        self._model.confirm_weights()
        tokens, checkpoint = self._ids(text, scored=True), self._model.checkpoint
        given = {"framework": self.framework, "model": runner.model}
        return {"tokens": tokens} | layer_states(checkpoint, tokens, **given)

    @overload
    def generate(  # pyright: ignore[reportOverlappingOverload]
        self,
        prompts: str,
        *,
        max_new_tokens: int = ...,
        temperature: float = ...,
        top_k: int = ...,
        top_p: float = ...,
        seed: int = ...,
        stop: str | Sequence[str] = ...,
        on_token: Callable[[int, list[int]], object] | None = ...,
    ) -> Continuation: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Text],
        *,
        max_new_tokens: int = ...,
        temperature: float = ...,
        top_k: int = ...,
        top_p: float = ...,
        seed: int = ...,
        stop: str | Sequence[str] = ...,
        on_token: Callable[[int, list[int]], object] | None = ...,
    ) -> list[Continuation]: ...

    def generate(
        self,
        prompts: Sequence[Text],
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        on_token: Callable[[int, list[int]], object] | None = None,
    ) -> Continuation | list[Continuation]:
        """Continue prompts, each until EOS or its maximum number of tokens.

        Args:
            prompts: One text, or several prompts: texts, with BOS in front if the model was trained
                so, or token ids.
            max_new_tokens: Maximum number of new tokens.
            temperature: Divisor of the logits; 0 takes the most likely token.
            top_k: Number of most likely tokens to choose from; 0 for all.
            top_p: Total probability of the most likely tokens to choose from.
            seed: Seed of the random numbers; every prompt has its own stream.
            stop: String or strings that end a text; the text is cut before the first of them.
            on_token: Function of the index of a prompt and its new tokens so far, called after each
                token but the last.

        Returns:
            New tokens and text of every prompt, in order; a single one for a single text.

        Raises:
            ValueError: A prompt has no token, ids are not the model's, ``temperature``, ``top_p``,
                ``max_new_tokens`` or ``seed`` is out of range, or logits are not finite.
        """
        from griffin_eval.engine import parallel
        from griffin_eval.engine.generation import Prompt
        from griffin_eval.engine.sampling import Sampling, checked

        sampling = checked(Sampling(temperature, top_k, top_p))
        if not isinstance(max_new_tokens, Integral) or max_new_tokens < 0:
            raise ArgumentError(f"expected a number of new tokens, not {max_new_tokens!r:.100}")
        if not isinstance(seed, Integral) or seed < 0:
            raise ArgumentError(f"expected an integer of 0 or more as seed, not {seed!r:.100}")
        self._model.confirm_weights()
        several = [prompts] if isinstance(prompts, str) else _several(prompts)
        asked = [
            Prompt(self._ids(prompt, scored=False), max_new_tokens, sampling) for prompt in several
        ]
        answers: dict[int, list[int]] = {}
        stops = self._stops(stop)

        def should_stop(index: int, ids: list[int]) -> bool:
            if on_token is not None:
                on_token(index, ids)
            return stops is not None and stops.completed(ids)

        parallel.generate(
            self._model.runners,
            asked,
            limits=self._model.limits,
            eos_ids=self._model.eos_ids,
            seed=seed,
            should_stop=should_stop,
            on_result=answers.__setitem__,
            describe="prompt {}".format,
        )
        continuations = [
            self._continuation(text, answers[i], stops) for i, text in enumerate(several)
        ]
        return continuations[0] if isinstance(prompts, str) else continuations

    def read(
        self,
        text: Text,
        *,
        name: str = "",
        chat: bool = False,
        chat_template: str | None = None,
        progress: Callable[[int], object] = lambda tokens: None,
    ) -> "SavedState":
        """Read a text once, for any number of texts that continue it.

        Args:
            text: Text, with BOS in front if the model was trained so, or token ids.
            name: Name of the text, for information.
            chat: Whether the text is the beginning of a conversation's first user message, followed
                by a blank line, so that chats can continue it.
            chat_template: Template that replaces the tokenizer's; ``plain`` joins the contents of
                messages with blank lines.
            progress: Function of the number of tokens that were read.

        Returns:
            The state, whose ``save`` writes a file for ``Evaluator(..., state=FILE)`` and
            ``lm_eval --model griffin --model_args ...,state=FILE``.

        Raises:
            ValueError: The text has fewer than two tokens, the state is not finite, or the template
                is missing or refuses the text.
        """
        from griffin_eval.engine.reading import read
        from griffin_eval.states.saved_state import SavedState, origin_of

        if self._model.state is not None:
            raise ArgumentError(
                "saving a state reads the text from its beginning: leave state= out"
            )
        self._model.confirm_weights()
        template = None
        if chat:
            text, template = self._opening(text, chat_template)
        tokens, runner = self._ids(text, scored=False), self._model.runner
        if len(tokens) < 2:
            raise ArgumentError(f"expected a text of two tokens at least, found {len(tokens)}")
        is_text = isinstance(text, str)
        origin = origin_of(
            self.config,
            self._model.weights_sha256,
            self._model.tokenizer_sha256 if is_text else None,
            runner.dtype,
            tokens,
            bos=is_text and self._model.add_bos,
            text=name,
            framework=runner.framework,
            template=template,
        )
        return SavedState(
            origin, read(runner, tokens, limits=self._model.limits, progress=progress)
        )

    def _opening(self, text: Text, template: str | None) -> tuple[str, str]:
        """Return the beginning of a conversation with a text, and the name of its template."""
        from griffin_eval.text.chat import TemplateRefused, opening, template_name

        template = template or self.tokenizer.chat_template
        if not isinstance(text, str):
            raise ArgumentError("chat=True needs a text, not token ids")
        if template is None:
            raise ArgumentError(
                f"the tokenizer {self.tokenizer.name} has no chat template: give one with "
                "--chat-template (chat_template=), or plain"
            )
        try:
            return opening(template, text, self.tokenizer), template_name(template)
        except TemplateRefused as error:
            raise ArgumentError(f"the chat template refuses the text: {error}") from None

    def _stops(self, stop: str | Sequence[str]) -> "StopStrings | None":
        from griffin_eval.text.stop_strings import StopStrings

        strings = [stop] if isinstance(stop, str) else list(stop)
        if not all(isinstance(one, str) and one for one in strings):
            raise ArgumentError(f"stop: expected strings that are not empty, found {stop!r:.100}")
        return StopStrings(self.tokenizer, strings) if strings else None

    def _continuation(
        self, prompt: Text, ids: list[int], stops: "StopStrings | None"
    ) -> Continuation:
        import numpy as np

        text = None
        if isinstance(prompt, str):
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            text = text if stops is None else stops.cut(text)
        return Continuation(np.array(ids, np.int32), text)

    def _ids(self, text: Text, *, scored: bool) -> "np.ndarray":
        """Return int32 ids: a scored text gets the prefix token, a continued one maybe BOS."""
        import numpy as np

        from griffin_eval.text.tokenizer import encode_with_bos

        if (state := self._model.state) is not None:
            own = self.tokenizer.encode(text) if isinstance(text, str) else self._checked(text)
            if scored and not len(own):
                raise ArgumentError(_NO_TOKEN)
            return np.array([state.origin.last_token, *own], np.int32)
        if not isinstance(text, str):
            return self._checked(text)
        prefix = self._model.prefix_token_id
        if not scored:
            encoded = encode_with_bos(self.tokenizer, text, self._model.add_bos)
            return np.array(encoded or [prefix], np.int32)
        encoded = self.tokenizer.encode(text)
        if not encoded:
            raise ArgumentError(_NO_TOKEN)
        own = encoded[:1] == [prefix]
        return np.array(encoded if own else [prefix, *encoded], np.int32)

    def _checked(self, text: Sequence[int]) -> "np.ndarray":
        import numpy as np

        try:
            ids = np.asarray(text)
        except ValueError:  # lists of several lengths
            ids = np.array(None)
        if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
            raise ArgumentError(f"expected a text or token ids, found {text!r:.100}")
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            raise ArgumentError(
                self._names_a_token(ids)
                or f"token ids must be from 0 to {self.config.vocab_size - 1}, found "
                f"{ids.min()} to {ids.max()}"
            )
        return ids.astype(np.int32)

    def _names_a_token(self, ids: "np.ndarray") -> str | None:
        """Return the message about a token that the tokenizer has and the embedding lacks."""
        from griffin_eval.text.bounded import refusal_of

        with suppress(BadInput, MissingExtraError):  # token ids need no tokenizer
            return refusal_of(ids.tolist(), self.tokenizer)
        return None

    @property
    def tokenizer(self) -> "Tokenizer":
        """Tokenizer with ``encode(text)`` and ``decode(ids, skip_special_tokens=True)``."""
        return self._model.tokenizer


def _several(texts: Sequence[Text]) -> Sequence[Text]:
    if isinstance(texts, str) or (len(texts) and isinstance(texts[0], int)):
        raise ArgumentError("expected a list of texts or of lists of token ids, found one text")
    return texts
