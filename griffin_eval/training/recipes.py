"""Recipes: section 6.2 of the paper on a small scale, and a language model of bytes.

The random numbers of a row depend on the recipe, the seed, the step and the row alone, so that a
resumed run reads the rows that it would have read. The held-out rows are the same for all seeds,
and no run trains on them.

All models have RecurrentGemma's conventions (embedding scale, soft cap, as many gate blocks as
heads, lru_width = width), so that Griffin models fit into Hugging Face's and DeepMind's formats.
"""

import dataclasses
import functools
import itertools
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from griffin_eval.config import GRIFFIN, HAWK, LOCAL_MQA, MQA, GriffinConfig
from griffin_eval.errors import ArgumentError
from griffin_eval.messages import did_you_mean
from griffin_eval.tasks.phonebook.names import PEOPLE
from griffin_eval.tasks.symbols import sequences
from griffin_eval.training import byte_texts

MODELS = {"griffin": GRIFFIN, "hawk": HAWK, "mqa": MQA, "local_mqa": LOCAL_MQA}
HELD_OUT_BATCHES = 8  # that a run is tested on
SHORTEST = 8  # tokens of a training sequence
MOST_QUESTIONS = 8  # in a training sequence of induction heads


class Batch(NamedTuple):
    """Sequences of one length, or without the axis B a single one.

    Attributes:
        tokens: int32 [B, T], input of the model.
        targets: int32 [B, T], the right next token after each token.
        weights: float32 [B, T], weight of each target in the loss.
        asked: bool [B, T], whether a target counts for the accuracy.
        distance: int32 [B, T], tokens from the one that the target repeats to the one it follows, 0
            where it repeats none; None where nobody wants to know.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    asked: np.ndarray
    distance: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training task, the shape of its models, and the default settings of a run.

    Attributes:
        name: name of the recipe.
        draw: function that draws one row from a generator and a length in tokens: a `Batch` of
            arrays [T]. T may exceed the length, and is the same for all rows of a length.
        draw_held_out: function that draws held-out rows; None if ``draw`` does.
        draw_of_stage: function that draws a row to train on from a generator, a length and the
            number of stages that are still to come; None if ``draw`` does.
        write_tokenizer: function that writes the files of the tokenizer into a folder.
        text: function that returns the text from which rows are taken; None if all are generated.
        vocab_size, visible_keys, rope_fraction: as in `GriffinConfig`. Without a fraction, RoPE
            rotates whole heads of the Transformer and, as in RecurrentGemma, half of each head of
            Griffin.
        width, heads, layers: ``width``, ``num_heads`` and ``num_layers`` of `GriffinConfig`.
        lru_width: of `GriffinConfig`; None for the model's width.
        conv_variance: initial variance of a convolution's output where its inputs have variance 1.
        length: tokens of a training sequence.
        curriculum: pairs of a number of steps and a share of the length: the run begins with these
            stages of shorter sequences and then trains on the whole length.
        advance: accuracy on held-out sequences of a stage's length from which on the next stage
            begins, in the place of its number of steps; None for the steps.
        scale_window: whether in a stage attention sees only the stage's share of ``visible_keys``.
        tokens: tokens of one step, from which the number of rows follows.
        steps: steps of a run.
        learning_rate: peak learning rate.
        recurrent_rate: factor of the learning rate of the recurrent blocks' parameters.
        schedule: one of `griffin_eval.training.optimizer.SCHEDULES`.
        decayed: parameters with weight decay, one of `griffin_eval.training.optimizer.DECAYED`.
    """

    name: str
    draw: Callable[[np.random.Generator, int], Batch]
    draw_held_out: Callable[[np.random.Generator, int], Batch] | None = None
    draw_of_stage: Callable[[np.random.Generator, int, int], Batch] | None = None
    write_tokenizer: Callable[[Path], None]
    text: Callable[[], bytes] | None = None
    vocab_size: int
    width: int = 64
    heads: int = 2
    layers: int = 5
    lru_width: int | None = None
    conv_variance: float = 0.01
    visible_keys: int
    rope_fraction: float | None = None
    length: int
    curriculum: tuple[tuple[int, float], ...] = ()
    advance: float | None = None
    scale_window: bool = False
    tokens: int
    steps: int
    learning_rate: float = 3e-3
    recurrent_rate: float = 1.0
    schedule: str = "cosine"
    decayed: str = "matrices"

    def config(self, model: str, stage: int | None = None) -> GriffinConfig:
        """The architecture of one of `MODELS`, as a stage trains it; None for the last one."""
        rope = self.rope_fraction or (0.5 if "recurrent" in MODELS[model] else 1.0)
        share = self._share(stage) if self.scale_window else 1.0
        return GriffinConfig(
            vocab_size=self.vocab_size,
            width=self.width,
            mlp_width=3 * self.width,
            num_heads=self.heads,
            num_layers=self.layers,
            lru_width=self.lru_width or self.width,
            gate_blocks=self.heads,
            block_pattern=MODELS[model],
            visible_keys=max(1, round(share * self.visible_keys)),
            rope_fraction=rope,
        )

    def stage_at(self, step: int) -> int:
        """The stage of a step, from 0, where stages have numbers of steps."""
        ends = itertools.accumulate(steps for steps, _ in self.curriculum)
        return sum(step >= end for end in ends)

    def length_of(self, stage: int | None) -> int:
        """Tokens of the sequences of a stage; None for the last one."""
        share = self._share(stage)
        return self.length if share == 1.0 else max(SHORTEST, round(share * self.length))

    def _share(self, stage: int | None) -> float:
        if stage is None or stage >= len(self.curriculum):
            return 1.0
        return self.curriculum[stage][1]

    def batch(self, seed: int, step: int, stage: int | None = None) -> Batch:
        """The rows that a step trains on, in a stage; None for the last one."""
        later = 0 if stage is None else len(self.curriculum) - stage

        def draw(rng: np.random.Generator, length: int) -> Batch:
            if self.draw_of_stage is None:
                return self.draw(rng, length)
            return self.draw_of_stage(rng, length, later)

        return self._rows("train", draw, seed, step, self.length_of(stage))

    def held_out(self, stage: int | None = None) -> list[Batch]:
        """The batches that runs are tested on, of a stage's length; None for the last one."""
        length, draw = self.length_of(stage), self.draw_held_out or self.draw
        return [self._rows("test", draw, 0, index, length) for index in range(HELD_OUT_BATCHES)]

    def _rows(self, purpose: str, draw: Callable, seed: int, step: int, length: int) -> Batch:
        rows = max(1, self.tokens // length)
        name = zlib.crc32(f"{self.name} {purpose}".encode())
        drawn = [
            draw(np.random.Generator(np.random.PCG64([name, seed, step, row])), length)
            for row in range(rows)
        ]
        return Batch(*(np.stack(arrays) for arrays in zip(*drawn, strict=True)))


def recipe_named(name: str) -> Recipe:
    """The recipe of this name.

    Raises:
        ArgumentError: no recipe has this name.
    """
    if name not in RECIPES:
        raise ArgumentError(
            f"unknown recipe {name!r}: expected one of {', '.join(RECIPES)}"
            f"{did_you_mean(name, RECIPES)}"
        )
    return RECIPES[name]


def selective_copying(rng: np.random.Generator, length: int) -> Batch:
    """A row of `griffin_eval.tasks.symbols.sequences.selective_copying`.

    At most a quarter of its tokens carry data, so that sequences of fewer than 64 tokens have fewer
    than 16 data symbols.
    """
    example = sequences.selective_copying(rng, length, min(16, length // 4))
    noise = (example.tokens == sequences.NOISE) | (example.tokens == sequences.MARKER)
    return _asked_at_the_end(example.tokens, example.answers, np.flatnonzero(~noise))


def induction_heads(rng: np.random.Generator, length: int) -> Batch:
    """A row of `griffin_eval.tasks.symbols.sequences.induction_heads` with more questions.

    Between the first trigger and the one at the end, the trigger stands at up to seven further
    positions, each followed by the same answer, which is asked for there too. A quarter of the
    sequences has none of these. Distances are those from the first answer.
    """
    example = sequences.induction_heads(rng, length)
    first = int(np.argmax(example.tokens == sequences.TRIGGER))
    batch = _asked_at_the_end(example.tokens, example.answers, np.array([first + 1]))
    assert batch.distance is not None
    free = np.arange(first + 2, length - 2, 2)  # never two triggers side by side
    count = min(int(rng.integers(MOST_QUESTIONS)) if rng.random() < 0.75 else 0, len(free))
    positions = rng.choice(free, count, replace=False)
    batch.tokens[positions] = sequences.TRIGGER
    batch.tokens[positions + 1] = batch.targets[positions] = example.answers[0]
    batch.weights[positions], batch.asked[positions] = 1, True
    batch.distance[positions] = positions - (first + 1)
    return batch


def _asked_at_the_end(tokens: np.ndarray, answers: np.ndarray, sources: np.ndarray) -> Batch:
    """A row whose last targets are the answers; the loss counts no other target (figure 11).

    ``sources`` are the positions of the tokens that the answers repeat.
    """
    count, length = len(answers), len(tokens)
    targets, asked = np.zeros(length, np.int32), np.zeros(length, bool)
    distance = np.zeros(length, np.int32)
    targets[-count:], asked[-count:] = answers, True
    distance[-count:] = np.arange(length - count, length) - sources
    return Batch(tokens.astype(np.int32), targets, asked.astype(np.float32), asked, distance)


def byte_text(rng: np.random.Generator, length: int) -> Batch:
    """A phonebook in seven of ten rows, else a part of a text; see `byte_texts`."""
    draw = byte_texts.phonebook if rng.random() < 0.7 else byte_texts.text
    return Batch(*draw(rng, length))


def phonebook(rng: np.random.Generator, length: int) -> Batch:
    """A phonebook of one entry or more; see `byte_texts`."""
    return Batch(*byte_texts.phonebook(rng, length, fewest=1))


# Of each stage of `phonebook_lookup`: how many names there are in all books, and the shares of
# books whose numbers have one digit, two, and all ten.
LOOKUP_STAGES = (
    (4, (0.5, 0.2, 0.3)),
    (64, (0.4, 0.2, 0.4)),
    (2048, (0.3, 0.2, 0.5)),
    (PEOPLE, (0.2, 0.1, 0.7)),
)


def short_phonebook(rng: np.random.Generator, length: int, **options: int) -> Batch:
    """A phonebook of one entry or more that takes at most two fifths of the bytes, so that its
    entries are asked for again and again."""
    return Batch(*byte_texts.phonebook(rng, length, fewest=1, most=0.4, **options))


def lookup_phonebook(rng: np.random.Generator, length: int, later: int) -> Batch:
    """A short phonebook of a stage which so many others follow.

    Where numbers are long, a model can learn to go on with one of which it has seen some digits,
    and never which number belongs to a name. Few names and short numbers teach that first.
    """
    people, shares = LOOKUP_STAGES[max(0, len(LOOKUP_STAGES) - 1 - later)]
    digits = int(rng.choice([1, 2, byte_texts.DIGITS], p=shares))
    return short_phonebook(rng, length, people=people, digits=digits)


def text(rng: np.random.Generator, length: int, source: bytes | None = None) -> Batch:
    """A part of a text, whose every byte counts for the accuracy."""
    row = Batch(*byte_texts.text(rng, length, source))
    return row._replace(asked=np.ones_like(row.asked))


def held_out_text(rng: np.random.Generator, length: int) -> Batch:
    """A part of a module that no run trains on."""
    return text(rng, length, byte_texts.held_out())


_symbol_recipe = functools.partial(
    Recipe,
    write_tokenizer=sequences.write_symbol_tokenizer,
    vocab_size=sequences.VOCABULARY,
    visible_keys=128,
    length=256,
    curriculum=((225, 1 / 8), (225, 1 / 4), (225, 1 / 2)),
    tokens=4096,
    steps=1500,
)
_byte_recipe = functools.partial(
    Recipe,
    write_tokenizer=byte_texts.write_byte_tokenizer,
    vocab_size=byte_texts.VOCABULARY,
    layers=6,
    visible_keys=256,
    length=512,
    tokens=4096,
    steps=3000,
)
RECIPES = {
    recipe.name: recipe
    for recipe in (
        _symbol_recipe(name="selective_copy", draw=selective_copying),
        _symbol_recipe(name="induction_heads", draw=induction_heads),
        _byte_recipe(
            name="bytes",
            draw=byte_text,
            text=byte_texts.corpus,
            curriculum=((600, 1 / 4), (600, 1 / 2)),
        ),
        _byte_recipe(
            name="phonebook",
            draw=phonebook,
            curriculum=tuple((0, share) for share in (1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4)),
            advance=0.95,
        ),
        _byte_recipe(
            name="phonebook_lookup",
            draw=short_phonebook,
            draw_of_stage=lookup_phonebook,
            length=192,
            curriculum=((1600, 2 / 3), (1000, 5 / 6), (1000, 1.0)),
            steps=8000,
        ),
        _byte_recipe(name="text", draw=text, draw_held_out=held_out_text, text=byte_texts.corpus),
    )
}
