"""A number hidden in a long text, asked for at its end.

The prompt of passkey retrieval as published (Mohtashami and Jaggi, "Landmark Attention", 2023):

    There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. …
    <text>
    The pass key is 71432. Remember it. 71432 is the pass key.
    <text>
    What is the pass key? The pass key is

With several needles each has a key word, in the words of RULER (Hsieh et al., 2024) as lm_eval has
it, and one is asked for:

    A special magic number is hidden within the following text. Make sure to memorize it. …
    <text>
    One of the special magic numbers for harbor is: 71432.
    <text>
    What is the special magic number for harbor mentioned in the provided text? The special magic
    number for harbor mentioned in the provided text is

What differs here: the text is a real one, not a few sentences over and over; the needle stands at
given depths, from 0 to 100% of the tokens of the text; numbers have five digits and are not in the
text; everything follows from a seed. An answer is right if the first digits on its first line are
exactly the number.

All prompts of a sample use one stretch of text; a longer prompt continues where a shorter one ends.
Griffin reads once what two of them share, which is everything before the first needle of either.
"""

import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

from griffin_eval.arguments import check_integers, ordered
from griffin_eval.errors import ArgumentError
from griffin_eval.tasks.curves import CurveTask, Observation, as_split
from griffin_eval.tasks.long_text.documents import SLACK, Document, documents
from griffin_eval.tasks.metadata import tokenizer_of
from griffin_eval.text.tokenizer import Tokenizer

TASK = "griffin_passkey"
LENGTHS = (1024, 2048, 4096, 8192, 16384)
DEPTHS = (0, 25, 50, 75, 100)  # %
SAMPLES = 20
NUMBERS = range(10_000, 100_000)

PASSKEY = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them."
    " I will quiz you about the important information there.",
    "The pass key is {number}. Remember it. {number} is the pass key.",
    "What is the pass key? The pass key is",
)
NEEDLES = (
    "A special magic number is hidden within the following text. Make sure to memorize it. I will"
    " quiz you about the number afterwards.",
    "One of the special magic numbers for {key} is: {number}.",
    "What is the special magic number for {key} mentioned in the provided text? The special magic"
    " number for {key} mentioned in the provided text is",
)
KEYS = """
anchor apple arrow basket beach bell bottle bridge bucket button cabin camera candle canyon carpet
castle chair cherry circle cloud coffee copper cotton crown desert diamond dolphin dragon eagle
engine feather fiddle forest fountain garden glacier guitar hammer harbor helmet honey island jacket
jungle kettle ladder lantern lemon magnet maple meadow mirror mountain needle ocean orange painter
palace parrot pencil pepper piano pillow planet pocket pumpkin rabbit ribbon river rocket saddle
salmon shadow silver spider spoon statue sugar sunset table temple thunder ticket tiger tunnel
turtle valley velvet violin walnut whistle window winter wolf
""".split()


class Passkey(CurveTask):
    """The task of lm_eval: ``accuracy@length``, and ``accuracy_depth_50@length`` for each depth."""

    def __init__(self, config: dict[str, Any]):
        super().__init__(config)
        rows = self.dataset["test"]
        lengths, depths = sorted(set(rows["length"])), sorted(set(rows["depth"]))
        for quantity in ("accuracy", *(f"accuracy_depth_{depth}" for depth in depths)):
            for length in lengths:
                self.declare(f"{quantity}@{length}", "proportion", higher_is_better=True)

    def process_results(self, doc: dict[str, Any], results: list[str]) -> dict[str, Any]:
        if "bypass" in self._metric_fn_list:  # --predict_only
            return super().process_results(doc, results)
        right = float(is_correct(results[0], doc["answer"]))
        observation = Observation(right, 1, cluster=f"sample {doc['sample']}")
        return self.scores(
            {
                f"accuracy@{doc['length']}": observation,
                f"accuracy_depth_{doc['depth']}@{doc['length']}": observation,
            }
        )


def is_correct(generated: str, answer: str) -> bool:
    """Whether the first digits on the first line of the generated text are the answer."""
    digits = re.search("[0-9]+", generated.split("\n", 1)[0])
    return digits is not None and digits[0] == answer


def dataset(
    lengths: Sequence[int] = LENGTHS,
    depths: Sequence[int] = DEPTHS,
    samples: int = SAMPLES,
    needles: int = 1,
    document: Any = None,
    max_tokens: int | None = None,
    seed: int = 0,
    **model: Any,
) -> dict[str, Any]:
    """The split of the task. Lengths and depths take turns, so that the first few rows have all.

    Args:
        lengths: tokens of a prompt; up to a dozen more, since words are not cut.
        depths: positions of the needle, in percent of the tokens of the text.
        samples: stretches of text, each with a prompt of every length and depth.
        needles: number of needles, of which one is asked for; the seed draws the positions of the
            others.
        document, max_tokens, model: see `griffin_eval.tasks.long_text.longctx.positions`.
            Documents that are shorter than the longest prompt are left out.
        seed: seed of the stretches, the positions, the numbers and the key words.

    Raises:
        ArgumentError: a value that cannot be used, or no document that is long enough.
    """
    check_integers(
        TASK, lengths=lengths, depths=depths, samples=samples, needles=needles, seed=seed
    )
    if max_tokens is not None:
        check_integers(TASK, max_tokens=max_tokens)
    sizes, percents = ordered(lengths), ordered(depths)
    if percents[-1] > 100:
        raise ArgumentError(f"{TASK}: depths are percents, from 0 to 100, found {depths!r}")
    if needles > len(KEYS):
        raise ArgumentError(f"{TASK}: there are {len(KEYS)} key words, found needles={needles}")
    tokenizer = tokenizer_of(**model)
    around = _tokens_around(tokenizer, needles)
    if sizes[0] <= around + 2 * SLACK:
        raise ArgumentError(
            f"{TASK}: lengths must be more than {around + 2 * SLACK}, of which {around} tokens are "
            f"the needles and the question, found {lengths!r}"
        )
    texts, longest = [], 0
    for text in documents(tokenizer, document, seed, max_tokens):
        longest = max(longest, text.tokens)
        if text.tokens >= sizes[-1]:
            texts.append(text)
    if not texts:
        raise ArgumentError(
            f"{TASK}: no document has {sizes[-1]} tokens, the longest has {longest}; name longer "
            "documents (document=) or ask for shorter lengths"
        )
    rows = []
    for sample in range(samples):
        source = texts[sample % len(texts)]
        rng = random.Random(f"griffin_passkey {seed} {sample}")
        begin = source.word_end(int(rng.random() * (source.tokens - sizes[-1])))
        # Diagonals of the table, so that neighbours differ in both.
        for turn in range(len(percents)):
            for column, length in enumerate(sizes):
                depth = percents[(turn + column) % len(percents)]
                draw = random.Random(f"griffin_passkey {seed} {sample} {length} {depth}")
                end = source.word_end(begin + length - around)
                prompt, answer = _prompt(draw, source, begin, end, depth, needles)
                where = {"length": length, "depth": depth, "sample": sample, "name": source.name}
                rows.append(where | {"prompt": prompt, "answer": answer})
    return as_split(rows)


def _prompt(
    rng: random.Random, source: Document, begin: int, end: int, depth: int, needles: int
) -> tuple[str, str]:
    """A prompt and its answer.

    Args:
        rng: draws the numbers, the key words and the positions of all needles but the first.
        begin, end: the first token of the text, and the token after its last.
        depth: position of the needle that is asked for, in percent.
    """
    description, needle, question = PASSKEY if needles == 1 else NEEDLES
    text = source.part(begin, end)
    numbers, keys = _numbers(rng, text), _words(rng)
    placed = []
    for index in range(needles):
        share = depth / 100 if index == 0 else rng.random()
        at = begin + round(share * (end - begin))
        number, key = next(numbers), next(keys)
        placed.append((source.word_end(at) if at > begin else begin, index, number, key))
    lines, last = [description], begin
    for at, _, number, key in sorted(placed):
        lines += [source.part(last, at), needle.format(number=number, key=key)]
        last = at
    lines += [source.part(last, end), question.format(key=placed[0][3])]
    return "\n".join(line.strip() for line in lines if line.strip()), placed[0][2]


def _numbers(rng: random.Random, text: str) -> Iterator[str]:
    """Different numbers, as text, that do not occur in a text."""
    drawn: set[str] = set()
    while True:
        number = str(NUMBERS[int(rng.random() * len(NUMBERS))])
        if number not in drawn and number not in text:
            drawn.add(number)
            yield number


def _words(rng: random.Random) -> Iterator[str]:
    """All key words in random order."""
    return iter(sorted(KEYS, key=lambda _: rng.random()))


def _tokens_around(tokenizer: Tokenizer, needles: int) -> int:
    """Number of tokens of a prompt without its text."""
    description, needle, question = PASSKEY if needles == 1 else NEEDLES
    filled = needle.format(number=NUMBERS[0], key=KEYS[0])
    lines = [description, *[filled] * needles, question.format(key=KEYS[0])]
    return len(tokenizer.encode("\n".join(lines)))
