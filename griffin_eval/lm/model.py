"""`GriffinLM`, the model of ``lm_eval --model griffin``."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook, TemplateLM
from lm_eval.utils import simple_parse_args_string

from griffin_eval.engine import parallel
from griffin_eval.engine.generation import Prompt
from griffin_eval.engine.scoring import Scored
from griffin_eval.engine.stats import Stats
from griffin_eval.engine.tree import Ablation, Scorable
from griffin_eval.errors import ArgumentError
from griffin_eval.generators import unchanged_generators
from griffin_eval.lm import results
from griffin_eval.lm.answering import answering
from griffin_eval.lm.chunks import ChunkedRequests, no_question
from griffin_eval.lm.encoding import EncodedPair, joined
from griffin_eval.lm.generation_args import DEFAULT_GENERATED_TOKENS, read_generation_arguments
from griffin_eval.lm.kept_files import guard_files, use_table
from griffin_eval.lm.processes import GatheringLM, device_for_lm_eval
from griffin_eval.lm.requests import Requests, ablations_of, quoted
from griffin_eval.lm.token_scores import Record, TokenScoreFiles, records_of
from griffin_eval.lm.token_sums import TokenScores
from griffin_eval.model_arguments import parse_arguments
from griffin_eval.opened import StagedModel, open_model
from griffin_eval.runners.load import choose_framework, launched
from griffin_eval.text.stop_strings import StopStrings
from griffin_eval.text.tokenizer import encode_with_bos


class GriffinLM(GatheringLM, TemplateLM):
    """A Griffin-family checkpoint as an lm-eval model.

    Args:
        pretrained: Checkpoint in any format: a folder, a ``.pt`` file, or a hub id.
        framework: ``torch`` or ``jax``; by default the first of these that is installed.
        arguments: Other fields of `griffin_eval.model_arguments.ModelArguments`, by name, and
            ``window``, another name for ``visible_keys``.

    Raises:
        BadInput: An argument or a checkpoint cannot be used; the message is one sentence. (It is a
            ValueError.)
    """

    def __init__(self, pretrained: str = "", framework: str | None = None, **arguments: Any):
        super().__init__()
        guard_files()
        asked = parse_arguments(arguments | {"pretrained": pretrained, "framework": framework})
        framework = choose_framework(asked.framework)
        with unchanged_generators():  # lm_eval has seeded them
            asked = asked.named(device=device_for_lm_eval(framework, asked.device))
            launch = launched(
                framework, asked.device, asked.tensor_parallel_size, asked.data_parallel_size
            )
            self.opened = open_model(asked, launch=launch)
            self.runner = self.opened.runner
        _ = self.opened.weights  # start the hash for results.json
        # lm_eval reads the device, and allocates tensors of PyTorch there.
        torch_device = self.runner.device.rpartition(" ")[2]  # the device in "2 x cpu"
        self._device = torch_device if framework == "torch" else "cpu"
        self.batch_sizes = {"rows": self.opened.limits.rows}
        self.tokenizer = self.opened.tokenizer
        self._templated = False  # whether lm_eval has put a request into the chat template
        self.requests = Requests(self.opened)
        self.stats = Stats()  # counts of this process
        self.join(launch, framework)
        self._chunks = ChunkedRequests.of(
            self.opened, self.requests, self._score, lambda: self._shares_requests
        )
        self._state_cache = self.opened.open_state_cache()
        self._token_scores = TokenScoreFiles.of(self.opened, launch.replica)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> "GriffinLM":
        """Open a model for lm_eval, whose options, such as ``--device``, are the defaults of model
        arguments with the same names."""
        return cls(**((additional_config or {}) | arg_dict))

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: dict[str, Any] | None = None
    ) -> "GriffinLM":
        """Open a model with arguments in the form of ``--model_args``."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def adopt(self, staged: StagedModel) -> None:
        """Continue with the weights of another checkpoint, and reset the counts."""
        self.opened, self.stats = staged.adopt(), Stats()
        self.requests.warned.clear()

    # Methods that lm-eval calls about the model

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id if self.tokenizer.eos_token_id is not None else -1

    @property
    def prefix_token_id(self) -> int:
        return self.opened.prefix_token_id

    @property
    def max_length(self) -> int:
        return self.requests.max_length

    @property
    def max_gen_toks(self) -> int:
        return DEFAULT_GENERATED_TOKENS

    @property
    def batch_size(self) -> int | str:
        return self.opened.arguments.batch_size

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        self._templated = True
        return self.requests.chat(chat_history, add_generation_prompt)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the token ids of a text, with exactly one BOS if ``add_special_tokens`` is True;
        None uses the setting of the checkpoint."""
        add_bos = self.opened.add_bos if add_special_tokens is None else add_special_tokens
        return encode_with_bos(self.tokenizer, string, add_bos)

    def get_model_info(self) -> dict[str, Any]:
        """Return what results.json records of the model and the work so far."""
        return results.model_info(self.opened, self.stats, self.others, self._world_size)

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Give this model its own table in the ``--use_cache`` file, since lm-eval's cache keys do
        not contain the model."""
        if cache_hook.dbdict is not None:
            if self._token_scores is not None:
                raise ArgumentError(
                    "token_scores= needs every request to be computed: leave --use_cache out"
                )
            use_table(cache_hook.dbdict, results.fingerprint(self.opened))
        super().set_cache_hook(cache_hook)

    # Requests

    @property
    def _shares_requests(self) -> bool:
        """Whether other processes or the ``--use_cache`` file answer some requests of a task."""
        return self._world_size > 1 or self.cache_hook.dbdict is not None

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood in nats of each continuation after its context, and whether it
        is the greedy one. The token ids are those of lm-eval's own method."""
        if self._chunks is None:
            pairs = self.requests.pairs(requests, self.stats)
        else:
            pairs = self._chunks.pairs(requests, self.stats)
        with records_of(self._token_scores, "loglikelihood", requests) as record:
            return self._loglikelihood_tokens(pairs, disable_tqdm, record=record)

    def loglikelihood_ablated(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return `loglikelihood` with part of the memory cleared at the end of the context.

        The third argument of a request names the memory, see
        `griffin_eval.lm.requests.ablations_of`. A shared context is read once.
        """
        if self._chunks is not None:
            raise no_question("loglikelihood_ablated")
        ablations = ablations_of(requests)
        pairs = self.requests.pairs(requests, self.stats)
        with records_of(self._token_scores, "loglikelihood_ablated", requests) as record:
            return self._loglikelihood_tokens(pairs, disable_tqdm, ablations, record)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[EncodedPair],
        disable_tqdm: bool = False,
        ablations: Sequence[Ablation] | None = None,
        record: Record | None = None,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        scorables = [
            self.requests.scorable(pair, ablation)
            for pair, ablation in zip(
                requests, ablations or [Ablation.NOTHING] * len(requests), strict=True
            )
        ]
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(requests)

        def on_result(index: int, result: Scored) -> None:
            answers[index] = (float(result.logprobs.sum()), bool(result.greedy.all()))
            if ablations is None:  # lm_eval caches this kind only
                self.cache_hook.add_partial("loglikelihood", requests[index][0], answers[index])
            if record is not None:
                record(index, scorables[index], result)
            bar.update()

        with answering(self, "Running loglikelihood requests", len(requests), disable_tqdm) as bar:
            contexts = [context for (context, _), _, _ in requests]
            self._score(scorables, on_result, contexts, details=record is not None)
        return answers

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of whole documents in nats, as `TokenScores`: each is read in
        one stream without windows, after one prefix token (BOS) that is not scored."""
        if self._chunks is not None:
            raise no_question("loglikelihood_rolling")
        texts = [request.args[0] for request in requests]
        scorables = self.requests.documents(texts)
        answers: list[float] = [0.0] * len(requests)

        def on_result(index: int, result: Scored) -> None:
            answers[index] = TokenScores(result.logprobs)
            if record is not None:
                record(index, scorables[index], result)
            self.cache_hook.add_partial("loglikelihood_rolling", (texts[index],), answers[index])

        total = sum(len(s.tokens) - 1 for s in scorables)
        with (
            records_of(self._token_scores, "loglikelihood_rolling", requests) as record,
            answering(self, "Running loglikelihood_rolling tokens", total, disable_tqdm) as bar,
        ):
            self._score(scorables, on_result, texts, record is not None, bar.update)
        return answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return continuations, each cut before its first stop string."""
        if not self._templated:
            self.requests.warn_of_template()
        pairs: list[Any] = [request.args for request in requests]
        arguments = [read_generation_arguments(given) for _, given in pairs]
        stops = [StopStrings(self.tokenizer, each.until) for each in arguments]
        contexts = [context for context, _ in pairs]
        if self._chunks is not None:
            contexts = self._chunks.contexts(contexts)
        prompts = self.requests.prompts(contexts, arguments)
        answers = [""] * len(requests)
        generated: list[list[int]] = [[]] * len(requests)
        tokens_read, total = 0, sum(len(prompt.tokens) for prompt in prompts)

        def on_result(index: int, ids: list[int]) -> None:
            generated[index] = ids
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            answers[index] = text = stops[index].cut(text)
            self.cache_hook.add_partial("generate_until", pairs[index], text)
            bar.update()

        def on_read(tokens: int) -> None:
            nonlocal tokens_read
            tokens_read += tokens
            bar.set_postfix_str(f"{tokens_read:,} of at most {total:,} tokens of prompts read")

        self.opened.confirm_weights()
        with answering(self, "Running generate_until requests", len(requests), disable_tqdm) as bar:
            self.stats += parallel.generate(
                self.opened.runners,
                prompts,
                limits=self.opened.limits,
                eos_ids=self.opened.eos_ids,
                # lm_eval seeds numpy's global generator, in all processes alike.
                seed=int(np.random.randint(2**31)) + self.rank,
                should_stop=lambda i, ids: stops[i].completed(ids),
                on_result=on_result,
                describe=lambda i: quoted(contexts[i]),
                cache=self._state_cache,
                progress=on_read,
            )
        self._record_generated(requests, prompts, generated)
        return answers

    def _record_generated(
        self, requests: list[Instance], prompts: list[Prompt], generated: list[list[int]]
    ) -> None:
        """Score generated tokens by reading each text again, if ``token_scores=`` is set."""
        with records_of(self._token_scores, "generate_until", requests) as record:
            if record is None:
                return
            scorables = [
                Scorable(joined(prompt.tokens, ids), len(prompt.tokens))
                for prompt, ids in zip(prompts, generated, strict=True)
            ]
            contexts = [str(request.args[0]) for request in requests]
            self._score(
                scorables, lambda i, result: record(i, scorables[i], result), contexts, details=True
            )

    def _score(
        self,
        scorables: list[Scorable],
        on_result: Callable[[int, Scored], None],
        texts: Sequence[str],
        details: bool = False,
        progress: Callable[[int], Any] = lambda tokens: None,
    ) -> None:
        self.opened.confirm_weights()
        self.stats += parallel.score(
            self.opened.runners,
            scorables,
            limits=self.opened.limits,
            softmax_dtype=self.opened.softmax_dtype,
            on_result=on_result,
            progress=progress,
            describe=lambda i: quoted(texts[i]),
            details=details,
            cache=self._state_cache,
        )
