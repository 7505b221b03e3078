"""Request-by-request comparison of models that should give the same numbers."""

import math
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

from griffin_eval.report.paired import common_items
from griffin_eval.report.results import Run
from griffin_eval.report.samples import ReportError, read_samples

REFERENCE = "hf"  # lm_eval's name of the model that others are compared with by default
# Known differences between --model griffin and --model hf.
ROLLING = (
    "Rolling log-likelihoods are shown and not judged: hf also scores BOS after BOS, and cuts long "
    "documents into windows."
)
BATCHES = (
    "hf ran with batch_size={}: padding changes the state of a recurrent model. Run it again with "
    "batch_size=1."
)
WINDOWS = "hf cuts prompts from the left that are longer than its max_length; griffin does not."


class Agreement(NamedTuple):
    """The differences between all requests of a model and of a reference.

    Attributes:
        run, reference: Labels of the two.
        logprobs: Number of compared log-likelihoods.
        largest, middle: Largest and median absolute difference in nats.
        relative: Largest difference relative to the reference's value, or to 1 nat if that is less.
        greedy: Number of differing greedy flags.
        texts, other_texts: Number of generated texts, and of those that differ.
        rolling, rolling_relative: Number and largest relative difference of the rolling
            log-likelihoods that are not judged.
        lacking: Phrases on items and responses that only one of the two has.
        notes: Sentences on known differences.
    """

    run: str
    reference: str
    logprobs: int
    largest: float
    middle: float
    relative: float
    greedy: int
    texts: int
    other_texts: int
    rolling: int
    rolling_relative: float
    lacking: Sequence[str]
    notes: Sequence[str]

    def within(self, tolerance: float) -> bool:
        """Return whether no log-likelihood differs by more, no flag and no text differs, and both
        have all items and responses."""
        differ = self.greedy or self.other_texts or self.lacking
        return self.relative <= tolerance and not differ

    @property
    def sentence(self) -> str:
        """The comparison in one sentence."""
        parts = []
        if self.logprobs:
            parts.append(
                f"{self.logprobs:,} log-likelihoods differ by at most {self.largest:.2g} nats "
                f"({self.relative:.2g} relative, median {self.middle:.2g} nats)"
            )
            parts.append(f"{self.greedy:,} greedy flags differ")
        if self.texts:
            parts.append(f"{self.other_texts:,} of {self.texts:,} generated texts differ")
        if self.rolling:
            parts.append(
                f"{self.rolling:,} rolling log-likelihoods, not judged, differ by at most "
                f"{self.rolling_relative:.2g} relative"
            )
        return f"{self.run} and {self.reference}: {'; '.join([*parts, *self.lacking])}."


def agreements(runs: Sequence[Run], name: str | None = None) -> list[Agreement]:
    """Compare models with a reference, request by request.

    Args:
        name: Label or lm_eval's name of the reference for all other models. By default ``hf``, if
            present, is the reference for runs of the same checkpoint.

    Raises:
        ReportError: There is no reference of this name, no other model, or no common request.
    """
    wanted = name or REFERENCE
    references = [r for r in runs if r.label == wanted] or [r for r in runs if r.model == wanted]
    found = []
    for reference in references:
        others = [run for run in runs if run not in references]
        if name is None:
            others = [run for run in others if run.pretrained == reference.pretrained]
        compared = [_compare(run, reference) for run in others]
        found += [one for one in compared if one is not None]
        if name is not None and (not others or None in compared):
            raise ReportError(
                f"nothing to compare with {name}: expected two models with samples of the same "
                "tasks and limits (lm_eval --log_samples)"
            )
    if name is not None and not references:
        known = ", ".join(dict.fromkeys(x for run in runs for x in (run.label, run.model)))
        raise ReportError(f"no model is called {name}: expected one of {known}")
    return found


def _compare(run: Run, reference: Run) -> Agreement | None:
    absolute, relative, rolling, lacking = [], [], [], []
    greedy = texts = other_texts = 0
    for lacks, has in ((run, reference), (reference, run)):
        for task in sorted(has.samples.keys() - lacks.samples.keys()):
            lacking.append(f"{lacks.label} lacks {task}, which {has.label} has")
    for task in run.samples.keys() & reference.samples.keys():
        own, other = (read_samples(each.samples[task]) for each in (run, reference))
        common = common_items(own, other)
        items = next(iter(common.values()), [])  # filters share their requests
        ours, theirs = (set[str]().union(*each.values()) for each in (own, other))
        for lacks, has, count in (
            (run, reference, len(theirs - ours)),
            (reference, run, len(ours - theirs)),
        ):
            if count:
                lacking.append(f"{lacks.label} lacks {count:,} items of {task} in {has.label}")
        if count := sum(_counts(a) != _counts(b) for _, a, b in items):
            lacking.append(f"{count:,} items of {task} have another number of responses")
        for _, ours, theirs in items:
            for kind, a, b in _responses(ours, theirs):
                if kind == "text":
                    texts, other_texts = texts + 1, other_texts + (a != b)
                    continue
                mine, other = (_number(each[0] if kind == "logprob" else each) for each in (a, b))
                difference = 0.0 if mine == other else abs(mine - other)
                difference = difference if math.isfinite(difference) else math.inf
                scaled = difference / max(1.0, abs(other))
                if kind == "rolling" and run.model != reference.model:
                    rolling.append(scaled)
                    continue
                absolute.append(difference)
                relative.append(difference if math.isinf(difference) else scaled)
                greedy += kind == "logprob" and str(a[1]) != str(b[1])
    if not (absolute or texts or rolling):
        return None
    notes = [ROLLING] * bool(rolling)
    size = str(reference.config.get("batch_size", "1"))
    if reference.model == REFERENCE and (other_texts or greedy or max(relative, default=0) > 1e-3):
        notes += [BATCHES.format(size)] * (size != "1") + [WINDOWS]
    return Agreement(
        run.label,
        reference.label,
        len(absolute),
        max(absolute, default=0.0),
        median(absolute) if absolute else 0.0,
        max(relative, default=0.0),
        greedy,
        texts,
        other_texts,
        len(rolling),
        max(rolling, default=0.0),
        lacking,
        notes,
    )


def _counts(sample: dict[str, Any]) -> list[int]:
    """Return the number of responses to each request of an item, including repeats."""
    return [len(responses) for responses in sample.get("resps") or []]


def _responses(ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the kind and both answers of each request of an item, including repeats."""
    arguments = list((ours.get("arguments") or {}).values())
    pairs = list(zip(ours.get("resps") or [], theirs.get("resps") or [], strict=False))
    for index, (own, other) in enumerate(pairs):
        argument = arguments[index] if index < len(arguments) else {}
        for a, b in zip(own, other, strict=False):
            if isinstance(a, list) and isinstance(b, list):
                yield "logprob", a, b
            else:
                yield "text" if "arg_1" in argument else "rolling", a, b


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
