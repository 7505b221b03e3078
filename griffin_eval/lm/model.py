"""`GriffinLM`: what ``lm_eval --model griffin`` runs."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook, TemplateLM
from tqdm import tqdm

from griffin_eval.converters.output.manifest import checksums
from griffin_eval.engine import parallel
from griffin_eval.engine.generation import Prompt
from griffin_eval.engine.limits import limits_for
from griffin_eval.engine.memory import return_freed_memory
from griffin_eval.engine.scoring import Scored
from griffin_eval.engine.stats import Stats
from griffin_eval.engine.tree import Ablation, Scorable
from griffin_eval.errors import ArgumentError
from griffin_eval.generators import unchanged_generators
from griffin_eval.lm import results
from griffin_eval.lm.arguments import parse_arguments
from griffin_eval.lm.encoding import (
    EncodedPair,
    Encoding,
    EncodingAfterState,
    RememberedEncoding,
    continuation_of,
    joined,
)
from griffin_eval.lm.generation_args import DEFAULT_GENERATED_TOKENS, read_generation_arguments
from griffin_eval.lm.kept_files import guard_files, use_table
from griffin_eval.lm.load import (
    StagedModel,
    device_for_lm_eval,
    load,
    open_state_cache,
    stage,
)
from griffin_eval.lm.processes import group_of
from griffin_eval.lm.token_scores import Record, TokenScoreFiles
from griffin_eval.lm.token_sums import TokenScores
from griffin_eval.lm.weights_hash import start_hashing
from griffin_eval.runners.load import launched
from griffin_eval.states.saved_state import SavedState, check_weights
from griffin_eval.text.chat import TemplateRefused, after_opening, template_name
from griffin_eval.text.stop_strings import StopStrings
from griffin_eval.text.tokenizer import Tokenizer, encode_with_bos

NO_LIMIT = 2**31 - 1  # positions are 32-bit integers
ABLATIONS = {name.lower(): kind for name, kind in Ablation.__members__.items()}

logger = logging.getLogger(__name__)


class GriffinLM(TemplateLM):
    """A Griffin-family checkpoint as an lm-eval model.

    Args:
        pretrained: checkpoint in any format: a folder, a ``.pt`` file, or a hub id.
        framework: ``torch`` or ``jax``; by default the first of these that is installed.
        arguments: the other fields of `griffin_eval.lm.arguments.ModelArguments`, by name, and
            ``window``, another name for ``visible_keys``.

    Raises:
        BadInput: an argument or a checkpoint that cannot be used; one sentence says why. (It is a
            ValueError.)
    """

    def __init__(self, pretrained: str = "", framework: str | None = None, **arguments: Any):
        super().__init__()
        guard_files()
        asked = parse_arguments(arguments | {"pretrained": pretrained, "framework": framework})
        sizes = asked.tensor_parallel_size, asked.data_parallel_size
        with unchanged_generators():  # lm_eval has seeded them
            device = device_for_lm_eval(asked.framework, asked.device)
            asked = dataclasses.replace(asked, device=device)
            launch = launched(asked.framework, asked.device, *sizes)
            self._model = model = load(asked, launch)
        self.tokenizer, self._runners = model.tokenizer, model.runners
        self.runner = self._runners[0]
        # lm_eval reads these three, and makes tensors of PyTorch on the device.
        torch_device = self.runner.device.rpartition(" ")[2]  # of "2 x cpu"
        self._device = torch_device if self.runner.framework == "torch" else "cpu"
        self._rank, self._world_size = launch.replica, launch.replicas
        encoding = Encoding if model.state is None else EncodingAfterState
        self._encoding: Encoding | RememberedEncoding = encoding(
            model.tokenizer, model.add_bos, model.prefix_token_id
        )
        asked = model.arguments
        self._limits = limits_for(self.runner, asked.state_budget, asked.max_batch_size)
        self.batch_sizes = {"rows": self._limits.rows}  # which lm_eval records
        self.stats = Stats()  # of this process
        self._others: list[Stats] = []  # of the other processes
        self._warned: set[str] = set()
        self._templated = False  # whether lm_eval has put a request into the chat template
        self._weights_sha256 = start_hashing(model.checkpoint, asked.check)
        self._has_checksums = asked.check and bool(checksums(model.checkpoint))
        if model.state is not None:
            check_weights(str(asked.state), model.state, self._weights_sha256.result())
        self._state_cache = (
            open_state_cache(model, self._weights_sha256.result())
            if asked.state_cache is not None
            else None
        )
        self._token_scores = None
        if asked.token_scores is not None:
            states = self._layer_states if asked.token_states else None
            self._token_scores = TokenScoreFiles(
                asked.token_scores, model.tokenizer, launch.replica, states
            )
        if asked.token_states and (self.runner.devices > 1 or model.state is not None):
            raise ArgumentError(
                "token_states= reads layers on one device, from the beginning of a text: leave out "
                "tensor_parallel_size= and state="
            )
        self._group = group_of(launch, self.runner.framework) if launch.replicas > 1 else None

    # Other checkpoints of the same model

    def remember_texts(self) -> None:
        """Keeps the token ids of all requests, for a model that will answer them again."""
        if isinstance(self._encoding, Encoding):
            self._encoding = RememberedEncoding(self._encoding)

    def stage(self, pretrained: str, revision: str | None) -> StagedModel:
        """Reads another checkpoint of the same training into memory, for `adopt`. Another thread
        may call it while this model answers.

        Args:
            pretrained: checkpoint, as the class takes it. All other arguments stay.
            revision: branch, tag or commit of a hub id.

        Raises:
            CheckpointError: it cannot be read, or it is of another model.
        """
        return stage(self._model, pretrained, revision)

    def adopt(self, staged: StagedModel) -> None:
        """Goes on with the weights of a staged checkpoint; counts start again."""
        for runner in self._runners:
            runner.adopt(staged.weights)
        self._model = staged.model
        self.stats, self._warned = Stats(), set()
        self._weights_sha256 = Future[str]()
        self._weights_sha256.set_result(staged.weights_sha256)

    @property
    def weights_sha256(self) -> str:
        """The hash of all weights, once the checkpoint has been read for it."""
        return self._weights_sha256.result()

    # What lm-eval asks of a model

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id if self.tokenizer.eos_token_id is not None else -1

    @property
    def prefix_token_id(self) -> int:
        return self._encoding.prefix_token_id

    @property
    def max_length(self) -> int:
        return self._model.arguments.max_length or NO_LIMIT

    @property
    def max_gen_toks(self) -> int:
        return DEFAULT_GENERATED_TOKENS

    @property
    def batch_size(self) -> int | str:
        return self._model.arguments.batch_size

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        self._templated = True
        if (state := self._model.state) is not None:
            return _after_state(state, chat_history, self.tokenizer, add_generation_prompt)
        return self.tokenizer.apply_chat_template(
            chat_history, add_generation_prompt=add_generation_prompt
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids of a text.

        Args:
            add_special_tokens: True puts exactly one BOS in front, also of a text that starts with
                it already; False adds none; None does what the model was trained with.
            kwargs: ignored.
        """
        add_bos = self._encoding.add_bos if add_special_tokens is None else add_special_tokens
        return encode_with_bos(self.tokenizer, string, add_bos)

    # What lm-eval's evaluator asks of several processes

    def all_gather(self, tensor: Any) -> Any:
        return tensor if self._group is None else self._group.all_gather(tensor)

    def gather_object(self, obj: Any, dst: int = 0) -> Any:
        return [obj] if self._group is None else self._group.gather_object(obj, dst)

    def barrier(self) -> None:
        """Waits for all processes, and gathers the counts of the others."""
        if self._group is not None:
            stats = self._group.all_gather_object(self.stats)
            self._others = stats[: self._rank] + stats[self._rank + 1 :]

    # Results

    def get_model_info(self) -> dict[str, Any]:
        """What results.json records of the model and of the work that it has done so far.

        The work is logged too, since lm_eval calls this at the end of a run.
        """
        measured = results.measured(self._runners, self.stats, self._others, self._world_size)
        logger.info(
            "griffin: %d tokens requested, %d computed (%.3g times fewer), %d states evicted, "
            "%.0f tokens/s, %d compilations, %.3g GB at most; %s; %s",
            measured["tokens_requested"],
            measured["tokens_computed"],
            measured["saved_ratio"],
            measured["states_evicted"],
            measured["tokens_per_second"],
            measured["compilations"],
            measured["peak_memory_bytes"] / 1e9,
            measured["kernel"],
            measured["attention_kernel"],
        )
        parity, adapters = self._model.parity, self._model.checkpoint.adapters
        return (
            results.identity(self._model)
            | {f"griffin_{name}": value for name, value in measured.items()}
            | {
                "griffin_weights_sha256": self._weights_sha256.result(),
                "griffin_weights_checked": self._model.arguments.check,
                "griffin_versions": results.versions(),
            }
            | ({} if parity is None else {"griffin_parity": parity})
            | ({"griffin_adapters": [a.record() for a in adapters]} if adapters else {})
        )

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Gives this model a table of its own in the ``--use_cache`` file.

        lm-eval's cache keys do not say which model answered, so that two models on one file would
        read each other's answers.
        """
        if cache_hook.dbdict is not None:
            if self._token_scores is not None:
                raise ArgumentError(
                    "token_scores= needs every request to be computed: leave --use_cache out"
                )
            fingerprint = results.fingerprint(self._model, self._weights_sha256.result())
            use_table(cache_hook.dbdict, fingerprint)
        super().set_cache_hook(cache_hook)

    # Requests

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Log-likelihood in nats of each continuation after its context, and whether greedy
        decoding would generate it.

        The ids are those of lm-eval's own method, but shared beginnings of texts are tokenised
        once, rather than twice for every request.
        """
        encoded = self._encoded_pairs(requests)
        with self._records("loglikelihood", requests) as record:
            return self._loglikelihood_tokens(encoded, disable_tqdm=disable_tqdm, record=record)

    def loglikelihood_ablated(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """`loglikelihood` of a model whose memory is partly cleared at the end of the context.

        The third argument of a request names the memory that is cleared before the context's last
        token is read, so that every scored token is predicted without it: ``nothing``;
        ``recurrent``, the states of RG-LRU and convolutions, which start again from zero; or
        ``attention``, the keys and values of all tokens before. The other memory and the positions
        go on. Requests with the same context share the reading of it.

        Raises:
            ArgumentError: a third argument that is none of these.
        """
        arguments: list[Any] = [request.args for request in requests]
        names = [name for _, _, name in arguments]
        unknown = sorted({str(name) for name in names} - set(ABLATIONS))
        if unknown:
            raise ArgumentError(
                f"unknown ablation {', '.join(unknown)}: expected {', '.join(ABLATIONS)}"
            )
        encoded = self._encoded_pairs(requests)
        with self._records("loglikelihood_ablated", requests) as record:
            return self._loglikelihood_tokens(
                encoded,
                disable_tqdm=disable_tqdm,
                ablations=[ABLATIONS[name] for name in names],
                record=record,
            )

    def _encoded_pairs(self, requests: Sequence[Instance]) -> list[EncodedPair]:
        """The context and the continuation of each request with the ids of both.

        A tokenizer can merge a continuation into the last token of its context, which leaves no
        token to score. Such a context and its continuation are encoded separately, so that every
        choice of a document is scored on the same context.

        Raises:
            ArgumentError: an empty continuation, or a merged one with ``on_merge=error``.
        """
        arguments: list[Any] = [request.args for request in requests]
        encoded = list(self._encoding.pairs([each[:2] for each in arguments]))
        merged: list[str] = []
        for index, (texts, context, ids) in enumerate(encoded):
            if len(ids):
                continue
            where = _described(requests[index])
            alone = self.tokenizer.encode(continuation_of(*texts))
            if not alone:
                raise ArgumentError(
                    f"{where} is empty, so there is no token to score: check doc_to_choice and "
                    "doc_to_target of the task"
                )
            if self._model.arguments.on_merge == "error":
                raise ArgumentError(
                    f"the tokenizer merges {where} into the last token of its context "
                    f"{_quoted(texts[0])}, so there is no token to score: put the space between "
                    "the two into the continuation, or leave out on_merge=error to encode it alone"
                )
            merged.append(where)
            encoded[index] = texts, context, alone
        if merged:
            self.stats.continuations_encoded_alone += len(merged)
            self._warn_once(
                f"the tokenizer merges continuations into the last token of their contexts; they "
                f"are encoded alone (on_merge=error refuses them): {merged[0]}"
                + (f" and {len(merged) - 1} more" if merged[1:] else "")
            )
        return encoded

    def _loglikelihood_tokens(
        self,
        requests: Sequence[EncodedPair],
        disable_tqdm: bool = False,
        ablations: Sequence[Ablation] | None = None,
        record: Record | None = None,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        scorables = [
            self._scorable(*request, ablation)
            for request, ablation in zip(
                requests, ablations or [Ablation.NOTHING] * len(requests), strict=True
            )
        ]
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(requests)

        def on_result(index: int, result: Scored) -> None:
            answers[index] = (float(result.logprobs.sum()), bool(result.greedy.all()))
            if ablations is None:  # lm_eval looks up no other kinds
                self.cache_hook.add_partial("loglikelihood", requests[index][0], answers[index])
            if record is not None:
                record(index, scorables[index], result)
            bar.update()

        with self._bar("Running loglikelihood requests", len(requests), disable_tqdm) as bar:
            self._score(
                scorables,
                on_result,
                describe=lambda i: _quoted(requests[i][0][0]),
                details=record is not None,
            )
        return answers

    def _scorable(
        self, texts: tuple[str, str], context: Any, continuation: Any, ablation: Ablation
    ) -> Scorable:
        """The ids of a context and its continuation as one sequence, cut to max_length."""
        if not len(continuation):
            raise ArgumentError(f"the continuation {texts[1]!r} has no token to score")
        if len(continuation) > self.max_length:
            raise ArgumentError(
                f"the continuation {texts[1][:60]!r}… has {len(continuation)} tokens, "
                f"more than max_length={self.max_length}"
            )
        if not len(context):  # of a context of nothing but white space, without BOS
            context = [self.prefix_token_id]
        ids = self._fit(joined(context, continuation), self.max_length + 1)
        return Scorable(ids, len(ids) - len(continuation), ablation)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihood of whole documents in nats.

        Each is read in one stream after exactly one prefix token (BOS), however long it is: there
        are no windows, and BOS itself is not scored.

        Returns:
            `TokenScores`, which also hold the log-likelihood of every token.
        """
        if self._model.arguments.max_length is not None:
            self._warn_once(
                "max_length does not apply to rolling log-likelihoods: documents are read whole"
            )
        texts = [request.args[0] for request in requests]
        scorables = [Scorable(ids, 1) for ids in self._encoding.documents(texts)]
        answers: list[float] = [0.0] * len(requests)

        def on_result(index: int, result: Scored) -> None:
            answers[index] = TokenScores(result.logprobs)
            if record is not None:
                record(index, scorables[index], result)
            self.cache_hook.add_partial("loglikelihood_rolling", (texts[index],), answers[index])

        total = sum(len(s.tokens) - 1 for s in scorables)
        with (
            self._records("loglikelihood_rolling", requests) as record,
            self._bar("Running loglikelihood_rolling tokens", total, disable_tqdm) as bar,
        ):
            self._score(
                scorables, on_result, bar.update, lambda i: _quoted(texts[i]), record is not None
            )
        return answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuations, each cut before its first stop string.

        Every request has its own generation arguments.
        """
        if self.tokenizer.chat_template is not None and not self._templated:
            self._warn_once(
                "the tokenizer has a chat template, so the model may have learned to answer in it, "
                "and these requests are without: --apply_chat_template puts them into it"
            )
        pairs: list[Any] = [request.args for request in requests]  # a context and its arguments
        given = [read_generation_arguments(arguments) for _, arguments in pairs]
        stops = [StopStrings(self.tokenizer, each.until) for each in given]
        contexts = self._encoding.contexts([context for context, _ in pairs])
        prompts = []
        for ids, (sampling, _, max_new_tokens) in zip(contexts, given, strict=True):
            if max_new_tokens >= self.max_length:
                raise ArgumentError(
                    f"max_gen_toks={max_new_tokens} leaves no room for a prompt in "
                    f"max_length={self.max_length}"
                )
            ids = self._fit(ids, self.max_length - max_new_tokens)
            prompts.append(Prompt(ids, max_new_tokens, sampling))
        answers = [""] * len(requests)
        generated: list[list[int]] = [[]] * len(requests)

        def on_result(index: int, ids: list[int]) -> None:
            generated[index] = ids
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            answers[index] = text = stops[index].cut(text)
            self.cache_hook.add_partial("generate_until", pairs[index], text)
            bar.update()

        tokens_read = 0

        def on_read(tokens: int) -> None:
            nonlocal tokens_read
            tokens_read += tokens
            bar.set_postfix_str(f"{tokens_read:,} tokens of prompts read")

        self._confirm_weights()
        with self._bar("Running generate_until requests", len(requests), disable_tqdm) as bar:
            self.stats += parallel.generate(
                self._runners,
                prompts,
                limits=self._limits,
                eos_ids=self._model.eos_ids,
                seed=int(np.random.randint(2**31)),  # lm_eval seeds numpy's global generator
                should_stop=lambda i, ids: stops[i].completed(ids),
                on_result=on_result,
                describe=lambda i: _quoted(pairs[i][0]),
                cache=self._state_cache,
                progress=on_read,
            )
        self._record_generated(requests, prompts, generated)
        return answers

    # Helpers

    def _confirm_weights(self) -> None:
        """Wait until the weights are compared with their checksums, if there are any.

        Raises:
            CheckpointError: they differ.
        """
        if self._has_checksums:
            self._weights_sha256.result()

    def _records(
        self, kind: str, requests: Sequence[Instance]
    ) -> contextlib.AbstractContextManager[Record | None]:
        """Where the scores of tokens go; None if they are not wanted."""
        if self._token_scores is None:
            return contextlib.nullcontext()
        return self._token_scores.records(kind, requests)

    def _layer_states(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        from griffin_eval.analysis.layer_states import layer_states

        runner: Any = self.runner
        return layer_states(
            self._model.checkpoint, tokens, framework=runner.framework, model=runner.model
        )

    def _record_generated(
        self, requests: list[Instance], prompts: list[Prompt], generated: list[list[int]]
    ) -> None:
        """Scores the tokens that were generated, if that is wanted: each text is read once more."""
        with self._records("generate_until", requests) as record:
            if record is None:
                return
            scorables = [
                Scorable(joined(prompt.tokens, ids), len(prompt.tokens))
                for prompt, ids in zip(prompts, generated, strict=True)
            ]
            self._score(
                scorables,
                lambda i, result: record(i, scorables[i], result),
                describe=lambda i: _quoted(str(requests[i].args[0])),
                details=True,
            )

    def _score(
        self,
        scorables: list[Scorable],
        on_result: Callable[[int, Scored], None],
        progress: Callable[[int], Any] = lambda tokens: None,
        describe: Callable[[int], str] = str,
        details: bool = False,
    ) -> None:
        self._confirm_weights()
        self.stats += parallel.score(
            self._runners,
            scorables,
            limits=self._limits,
            softmax_dtype=self._model.softmax_dtype,
            on_result=on_result,
            progress=progress,
            describe=describe,
            details=details,
            cache=self._state_cache,
        )

    def _fit(self, ids: np.ndarray, most: int) -> np.ndarray:
        if len(ids) > most:
            self._warn_once(
                f"max_length={self.max_length}: longer contexts are cut to their last tokens"
            )
        return ids[-most:]

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)

    @contextlib.contextmanager
    def _bar(self, description: str, total: int, disable: bool) -> Iterator[tqdm]:
        """A progress bar. After it, also after an error or Ctrl-C, all answers so far are in the
        ``--use_cache`` file, and the steps' memory is the system's again."""
        hidden = True if disable or self._rank else None
        try:
            with tqdm(total=total, desc=description, disable=hidden) as bar:
                yield bar
        finally:
            if self.cache_hook.dbdict is not None:
                self.cache_hook.dbdict.commit()  # answers are written by a thread
            return_freed_memory()


def _after_state(
    state: SavedState,
    messages: list[dict[str, str]],
    tokenizer: Tokenizer,
    add_generation_prompt: bool,
) -> str:
    """What follows the text of a saved state in a conversation that the user has begun with it."""
    template = tokenizer.chat_template
    if template is None or state.origin.template != template_name(template):
        raise ArgumentError(
            "state= was not saved with the tokenizer's chat template: read the text again with "
            "griffin-eval read --chat, or leave --apply_chat_template out"
        )
    try:
        return after_opening(
            template, messages, tokenizer, add_generation_prompt=add_generation_prompt
        )
    except TemplateRefused as error:
        raise ArgumentError(
            f"the chat template refuses messages behind the text of state=: {error}"
        ) from None


def _described(request: Instance) -> str:
    """Name the continuation of a request with its document and task, if lm_eval set them."""
    arguments: Any = request.args
    continuation = arguments[1]
    name = f"continuation {continuation!r} (choice {request.idx})"
    if request.doc_id is None:
        return f"the {name}"
    return f"document {request.doc_id} of {request.task_name}: the {name}"


def _quoted(text: str) -> str:
    """A request for an error message: the end of its text, where requests differ."""
    return repr(text if len(text) <= 60 else f"…{text[-60:]}")
