"""Lines hidden in long texts at given depths, in prompts of given lengths.

All prompts of a sample use one stretch of text; a longer prompt continues where a shorter one ends.
Griffin reads once what two of them share, which is everything before the first needle of either.
"""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from griffin_eval.arguments import check_integers, ordered
from griffin_eval.errors import ArgumentError
from griffin_eval.tasks.curves import CurveTask, LengthObservation, Observation
from griffin_eval.tasks.long_text.documents import SLACK, Document, documents
from griffin_eval.text.tokenizer import Tokenizer

LENGTHS = (1024, 2048, 4096, 8192, 16384)
DEPTHS = (0, 25, 50, 75, 100)  # %
SAMPLES = 20


class NeedleTask(CurveTask):
    """A task of lm_eval about needles.

    Its metrics are ``accuracy@length``, ``accuracy_depth_50@length`` for each depth, and
    ``effective_length``, the last length up to which the accuracy is at least 85% of that at the
    shortest (`griffin_eval.intervals.effective_length`). Clusters are stretches of text.
    """

    def __init__(self, config: dict[str, Any]):
        super().__init__(config)
        rows = self.dataset["test"]
        lengths, depths = sorted(set(rows["length"])), sorted(set(rows["depth"]))
        for quantity in ("accuracy", *(f"accuracy_depth_{depth}" for depth in depths)):
            for length in lengths:
                self.declare(f"{quantity}@{length}", "proportion", higher_is_better=True)
        self.declare("effective_length", "effective_length", higher_is_better=True)

    def is_correct(self, generated: str, answer: str) -> bool:
        """Return whether a generated text gives the answer."""
        raise NotImplementedError

    def process_results(self, doc: dict[str, Any], results: list[str]) -> dict[str, Any]:
        if "bypass" in self._metric_fn_list:  # --predict_only
            return super().process_results(doc, results)
        right = float(self.is_correct(results[0], doc["answer"]))
        length, cluster = doc["length"], f"sample {doc['sample']}"
        observation = Observation(right, 1, cluster)
        return self.scores(
            {
                f"accuracy@{length}": observation,
                f"accuracy_depth_{doc['depth']}@{length}": observation,
                "effective_length": LengthObservation(right, length, cluster),
            }
        )


class Placement(NamedTuple):
    """A stretch of text for one prompt, and where in it the needle goes.

    Attributes:
        length: Tokens of the prompt.
        depth: Position of the needle, in percent of the tokens of the text.
        sample: Number of the stretch of text.
        rng: Draws everything else about this prompt.
        source: Document that the text is of.
        begin, end: First token of the text, and the token after its last.
    """

    length: int
    depth: int
    sample: int
    rng: random.Random
    source: Document
    begin: int
    end: int

    def row(self) -> dict[str, Any]:
        """Return the columns that say where the needle is."""
        where = {"length": self.length, "depth": self.depth, "sample": self.sample}
        return where | {"name": self.source.name}

    def text(self) -> str:
        """Return the text without needles."""
        return self.source.part(self.begin, self.end)

    def prompt(self, description: str, needles: Sequence[tuple[float, str]], question: str) -> str:
        """Return the text with needles in it, between a description and a question.

        Args:
            description: First line; left out if empty.
            needles: Share of the text before each needle, and the needle.
            question: Last line.
        """
        placed = []
        for index, (share, needle) in enumerate(needles):
            at = self.begin + round(share * (self.end - self.begin))
            at = self.source.word_end(at) if at > self.begin else self.begin
            placed.append((at, index, needle))
        lines, last = [description], self.begin
        for at, _, needle in sorted(placed):
            lines += [self.source.part(last, at), needle]
            last = at
        lines += [self.source.part(last, self.end), question]
        return "\n".join(line.strip() for line in lines if line.strip())


def placements(
    task: str,
    around: Sequence[str],
    lengths: Sequence[int],
    depths: Sequence[int],
    samples: int,
    document: Any,
    max_tokens: int | None,
    seed: int,
    tokenizer: Tokenizer,
) -> list[Placement]:
    """Return a placement for each length and depth of each sample.

    Lengths and depths take turns, so that the first few have all.

    Args:
        task: Name of the task, for messages and draws.
        around: Lines of the longest prompt besides the text.
        lengths: Tokens of a prompt; up to a dozen more, since words are not cut.
        depths: Positions of the needle, in percent of the tokens of the text.
        samples: Stretches of text, each with a prompt of every length and depth.
        document, max_tokens: See `griffin_eval.tasks.long_text.longctx.positions`. Documents that
            are shorter than the longest prompt are left out.
        seed: Seed of the stretches and of what each placement draws.
        tokenizer: Tokenizer that lengths are counted with.

    Raises:
        ArgumentError: A value that cannot be used, or no document that is long enough.
    """
    check_integers(task, lengths=lengths, depths=depths, samples=samples, seed=seed)
    if max_tokens is not None:
        check_integers(task, max_tokens=max_tokens)
    sizes, percents = ordered(lengths), ordered(depths)
    if percents[-1] > 100:
        raise ArgumentError(f"{task}: depths are percents, from 0 to 100, found {depths!r}")
    used = len(tokenizer.encode("\n".join(around)))
    if sizes[0] <= used + 2 * SLACK:
        raise ArgumentError(
            f"{task}: lengths must be more than {used + 2 * SLACK}, of which {used} tokens are "
            f"the needles and the question, found {lengths!r}"
        )
    texts, longest = [], 0
    for text in documents(tokenizer, document, seed, max_tokens):
        longest = max(longest, text.tokens)
        if text.tokens >= sizes[-1]:
            texts.append(text)
    if not texts:
        raise ArgumentError(
            f"{task}: no document has {sizes[-1]} tokens, the longest has {longest}; name longer "
            "documents (document=) or ask for shorter lengths"
        )
    found = []
    for sample in range(samples):
        source = texts[sample % len(texts)]
        rng = random.Random(f"{task} {seed} {sample}")
        begin = source.word_end(int(rng.random() * (source.tokens - sizes[-1])))
        # Diagonals of the table, so that neighbours differ in both.
        for turn in range(len(percents)):
            for column, length in enumerate(sizes):
                depth = percents[(turn + column) % len(percents)]
                draw = random.Random(f"{task} {seed} {sample} {length} {depth}")
                end = source.word_end(begin + length - used)
                found.append(Placement(length, depth, sample, draw, source, begin, end))
    return found
