"""The gain from contexts longer than those of training, and the memory that carries it.

All numbers are differences in nats per token on the same tokens, with the documents as clusters.
L is the length of the training sequences, and n one of the requested multiples of L:

- ``nats_difference@n``: the loss after n L tokens, minus the loss after L tokens. Below zero the
  model gains from context longer than its training sequences; above zero it does not extrapolate.

Controls show which memory carries the gain. Each is the loss with one memory removed, minus the
loss after n L tokens. Above zero, the removed memory carried information:

- ``reset_window@n``: the model starts one local attention window before the target, so that all
  earlier tokens are lost;
- ``reset_train@n``: the model starts L tokens before the target. This is the negative of
  ``nats_difference@n``, listed beside the other controls;
- ``no_recurrent@n``: the states of RG-LRU and convolutions are zeroed, the attention keys stay;
- ``no_attention@n``: the attention keys are removed, the recurrent states stay.

The last two remove a memory before the last token of the context is read. The target's first token
is predicted from that token, so the whole target is predicted without the memory. Only Griffin
answers such requests (`loglikelihood_ablated` of `griffin_eval.lm.model.GriffinLM`), and it reads a
context once for the loss after it and for both controls. All other requests are plain
log-likelihoods.
"""

import logging
from collections.abc import Sequence
from typing import Any

from griffin_eval.arguments import check_integers, ordered, visible_keys_argument
from griffin_eval.config import GriffinConfig
from griffin_eval.errors import ArgumentError
from griffin_eval.tasks.curves import Observation, as_split
from griffin_eval.tasks.long_text.longctx import SPAN, TARGETS, LossTask, draw_targets, row
from griffin_eval.tasks.metadata import config_of, is_griffin_run

TASK = "griffin_extrapolation"
MULTIPLES = (1, 2, 4, 8, 16, 32, 64)
WINDOW = "window"  # label of the request with a context as long as a local attention window
MEMORIES = ("recurrent", "attention")

logger = logging.getLogger(__name__)


class Extrapolation(LossTask):
    """The lm_eval task.

    The label of a request is a multiple of the training length ("2"), the multiple and the removed
    memory ("2 recurrent"), or "window".
    """

    def __init__(self, config: dict[str, Any]):
        super().__init__(config)
        for metric in differences(dict.fromkeys(self.labels(), 0.0), self.dataset["test"][0]):
            # The loss without a memory is neither good nor bad.
            better = False if metric.startswith("nats_difference") else None
            self.declare(metric, "ratio", higher_is_better=better)

    def request_type(self, doc: dict[str, Any], index: int) -> Any:
        return "loglikelihood_ablated" if doc["forget"][index] else "loglikelihood"

    def more_arguments(self, doc: dict[str, Any], index: int) -> tuple[str, ...]:
        return (doc["forget"][index],) if doc["forget"][index] else ()

    def process_results(self, doc: dict[str, Any], results: list[Any]) -> dict[str, Any]:
        if "bypass" in self._metric_fn_list:  # --predict_only
            return super().process_results(doc, results)
        nats = {
            label: -float(loglikelihood)
            for label, (loglikelihood, _) in zip(doc["label"], results, strict=True)
        }
        return self.scores(
            {
                metric: Observation(value, doc["tokens"][0], cluster=doc["name"])
                for metric, value in differences(nats, doc).items()
            }
        )


def differences(nats: dict[str, float], doc: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of one target by name, before the division by its number of tokens.

    Args:
        nats: Loss of the target by label of the request.
    """
    metrics = {}
    lengths = [int(label) for label in nats if label.isdigit()]
    for n in sorted(lengths):
        known = nats[str(n)]
        if n > 1:
            metrics[f"nats_difference@{n}"] = known - nats["1"]
            metrics[f"reset_train@{n}"] = nats["1"] - known
        if WINDOW in nats and doc["window"] < n * doc["train_length"]:
            metrics[f"reset_window@{n}"] = nats[WINDOW] - known
        for memory in MEMORIES:
            if f"{n} {memory}" in nats:
                metrics[f"no_{memory}@{n}"] = nats[f"{n} {memory}"] - known
    return metrics


def dataset(
    train_length: int | None = None,
    multiples: Sequence[int] = MULTIPLES,
    visible_keys: int | None = None,
    window: int | None = None,
    memories: bool | None = None,
    document: Any = None,
    samples: int | None = None,
    max_tokens: int | None = None,
    targets: int = TARGETS,
    span: int = SPAN,
    seed: int = 0,
    **model: Any,
) -> dict[str, Any]:
    """Return the split of the task, with a row for each target.

    Args:
        train_length: L in tokens. Required, since no config holds it.
        multiples: Multiples of L to compare with L. Documents shorter than the longest multiple are
            left out.
        visible_keys: Number of keys that a local attention query sees, including its own; by
            default the checkpoint's. Without it there is no ``reset_window``.
        window: Another name of ``visible_keys``.
        memories: Whether to measure ``no_recurrent`` and ``no_attention``; by default if
            ``--model griffin`` answers.
        document, samples, max_tokens, targets, span, seed, model: See
            `griffin_eval.tasks.long_text.longctx.contexts`.
    """
    if train_length is None:
        raise ArgumentError(
            f"{TASK}: the length of training sequences is unknown: name it with --metadata "
            """'{"train_length": …}', since no config says it (the paper's models: 2048; """
            "RecurrentGemma: 8192)"
        )
    given = visible_keys_argument(visible_keys=visible_keys, window=window)
    check_integers(TASK, train_length=train_length, multiples=multiples, **given)
    check_integers(TASK, targets=targets, span=span, seed=seed)
    numbers = ordered([1, *ordered(multiples)])
    config = config_of(**given, **model)
    removed = _memories(memories, config)
    visible_keys = next(iter(given.values()), None)
    if visible_keys is None and config is not None and "local_attention" in config.block_types:
        visible_keys = config.visible_keys
    # Each request: label, tokens of the context, and the memory to remove.
    requests = [(str(n), n * train_length, "nothing" if removed else "") for n in numbers]
    requests += [(f"{n} {memory}", n * train_length, memory) for n in numbers for memory in removed]
    if visible_keys is None:
        logger.warning(
            "%s: the attention window is unknown, so there is no reset_window; see visible_keys=",
            TASK,
        )
    elif visible_keys < numbers[-1] * train_length:
        requests.append((WINDOW, visible_keys, ""))
    labels, lengths, forget = zip(*requests, strict=True)
    constant = {"forget": list(forget), "window": visible_keys or 0, "train_length": train_length}
    rows = []
    for text, begin, end in draw_targets(
        TASK, max(lengths), targets, span, seed, document, samples, max_tokens, model
    ):
        spans = [(text.clean_start(begin - length), begin, end) for length in lengths]
        rows.append(row(text, labels, spans) | constant)
    return as_split(rows)


def _memories(memories: bool | None, config: GriffinConfig | None) -> list[str]:
    """Return the memories to remove: those of `MEMORIES` for which the model has a block."""
    if memories not in (None, True, False):
        raise ArgumentError(f"{TASK}: memories must be true or false, found {memories!r}")
    if memories and not is_griffin_run():
        raise ArgumentError(f"{TASK}: memories=true needs --model griffin, which can lose a memory")
    if memories is False or not is_griffin_run() or config is None:
        return []
    return [memory for memory in MEMORIES if any(memory in kind for kind in config.block_types)]
