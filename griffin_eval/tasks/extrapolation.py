"""What contexts longer than those of training are worth, and which memory carries it.

All numbers are differences in nats per token on the same tokens, with the documents as clusters.
L is the length of the training sequences, n runs over the multiples of it that are asked for:

- ``nats_difference@n``: the loss after n L tokens, less the loss after L tokens. Below zero a model
  gains from context that is longer than any it was trained on; above zero it does not extrapolate.

Controls say which memory it is. Each is the loss with a memory taken away, less the loss after n L
tokens; as far as it is above zero, that memory carried something:

- ``reset_window@n``: the model starts anew as many tokens before the target as a block of local
  attention sees, so that all from further back is lost;
- ``reset_train@n``: the model starts anew L tokens before the target. This is the negative of
  ``nats_difference@n``, to stand beside the other controls;
- ``no_recurrent@n``: the states of RG-LRU and convolutions are zeroed, the keys of attention stay;
- ``no_attention@n``: the keys of attention are taken away, the recurrent states stay.

The last two happen before the last token of the context is read, the first with something to
predict, so that all of the target is predicted without. Only Griffin answers such requests
(`loglikelihood_forgetting` of `griffin_eval.lm.GriffinLM`) and reads a context once for the loss
after it and for both controls. All the others are plain log-likelihoods.
"""

import logging
from collections.abc import Sequence
from typing import Any

from griffin_eval.config import GriffinConfig
from griffin_eval.errors import ArgumentError
from griffin_eval.tasks.curves import Item, as_split
from griffin_eval.tasks.longctx import SPAN, TARGETS, LossTask, places, row
from griffin_eval.tasks.metadata import config_of, integers, is_ours, ordered

TASK = "griffin_extrapolation"
MULTIPLES = (1, 2, 4, 8, 16, 32, 64)
WINDOW = "window"
MEMORIES = ("recurrent", "attention")

logger = logging.getLogger(__name__)


class Extrapolation(LossTask):
    """The task of lm_eval. A label is a multiple of the training length, that and what is
    forgotten ("2 recurrent"), or "window"."""

    def __init__(self, config: dict[str, Any]):
        super().__init__(config)
        for metric in differences(dict.fromkeys(self.labels(), 0.0), self.dataset["test"][0]):
            self.declare(metric, "ratio", higher_is_better=False)

    def request_type(self, doc: dict[str, Any], index: int) -> Any:
        return "loglikelihood_forgetting" if doc["forget"][index] else "loglikelihood"

    def more(self, doc: dict[str, Any], index: int) -> tuple[str, ...]:
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
                metric: Item(value, doc["tokens"][0], doc["name"])
                for metric, value in differences(nats, doc).items()
            }
        )


def differences(nats: dict[str, float], doc: dict[str, Any]) -> dict[str, float]:
    """The metrics of a target by name, from its loss in nats by the labels of the requests."""
    found = {}
    lengths = [int(label) for label in nats if label.isdigit()]
    for n in sorted(lengths):
        known = nats[str(n)]
        if n > 1:
            found[f"nats_difference@{n}"] = known - nats["1"]
            found[f"reset_train@{n}"] = nats["1"] - known
        if WINDOW in nats and doc["window"] < n * doc["train_length"]:
            found[f"reset_window@{n}"] = nats[WINDOW] - known
        for memory in MEMORIES:
            if f"{n} {memory}" in nats:
                found[f"no_{memory}@{n}"] = nats[f"{n} {memory}"] - known
    return found


def dataset(
    train_length: int | None = None,
    multiples: Sequence[int] = MULTIPLES,
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
    """The split of the task, a row for each target.

    Args:
        train_length: L, in tokens. It has to be given, since no config says it.
        multiples: of L, contexts to compare with L itself; documents in which the longest does not
            fit are left out.
        window: keys that local attention sees, the query's own included; by default what the
            checkpoint says. There is no ``reset_window`` where nothing says it.
        memories: whether to ask for ``no_recurrent`` and ``no_attention``; by default where Griffin
            answers, to whose blocks they apply.
        document, samples, max_tokens, targets, span, seed, model: see
            `griffin_eval.tasks.longctx.contexts`.
    """
    if train_length is None:
        raise ArgumentError(
            f"{TASK}: how many tokens had a training sequence? Name it with --metadata "
            """'{"train_length": …}', since no config says it (the paper's models: 2048; """
            "RecurrentGemma: 8192)"
        )
    given = {} if window is None else {"window": window}
    integers(
        TASK, train_length=train_length, multiples=multiples, targets=targets, span=span, **given
    )
    integers(TASK, 0, seed=seed)
    numbers = ordered([1, *ordered(multiples)])
    config = config_of(window=window, **model)
    lost = _memories(memories, config)
    if window is None and config is not None and "local_attention" in config.block_types:
        window = config.visible_keys
    asked = [(str(n), n * train_length, "nothing" if lost else "") for n in numbers]
    asked += [(f"{n} {memory}", n * train_length, memory) for n in numbers for memory in lost]
    if window is None:
        logger.warning("%s: no window is known, so there is no reset_window; see window=", TASK)
    elif window < numbers[-1] * train_length:
        asked.append((WINDOW, window, ""))
    longest = max(length for _, length, _ in asked)
    rows = []
    for found, begin, end in places(
        TASK, longest, targets, span, seed, document, samples, max_tokens, model
    ):
        labels, lengths, forget = zip(*asked, strict=True)
        spans = [(found.back(begin - length), begin, end) for length in lengths]
        more = {"forget": list(forget), "window": window or 0, "train_length": train_length}
        rows.append(row(found, labels, spans) | more)
    return as_split(rows)


def _memories(asked: bool | None, config: GriffinConfig | None) -> list[str]:
    if asked not in (None, True, False):
        raise ArgumentError(f"{TASK}: memories must be true or false, found {asked!r}")
    if asked and not is_ours():
        raise ArgumentError(f"{TASK}: memories=true needs --model griffin, which can lose a memory")
    if asked is False or not is_ours() or config is None:
        return []
    return [memory for memory in MEMORIES if any(memory in kind for kind in config.block_types)]
