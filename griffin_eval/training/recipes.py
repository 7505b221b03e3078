"""What to train on: section 6.2 of the paper in small, and a language model of bytes.

Every row of every step has random numbers of its own, which depend on the recipe, the seed, the
step and the row alone, so that a run that goes on reads what it would have read. The rows that a
run is tested on are the same for all seeds, and none of those it is trained on.

All models are in RecurrentGemma's dialect (embedding scale, soft cap, as many gate blocks as heads,
lru_width = width), so that Griffin's go into Hugging Face's and DeepMind's formats as well.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from griffin_eval.config import GRIFFIN, HAWK, MQA, GriffinConfig
from griffin_eval.errors import ArgumentError
from griffin_eval.hints import nearest
from griffin_eval.tasks import symbols
from griffin_eval.training import byte_texts

MODELS = {"griffin": GRIFFIN, "hawk": HAWK, "mqa": MQA}
HELD_OUT = 8  # batches that a run is tested on
SHORTEST = 8  # tokens of a sequence
QUESTIONS = 8  # in a training sequence of induction heads, at most


class Batch(NamedTuple):
    """Rows of one length.

    Attributes:
        tokens: int32 [B, T].
        targets: int32 [B, T], what should follow each token.
        weights: float32 [B, T], of each target in the loss.
        asked: bool [B, T], the targets that accuracy counts.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    asked: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A task, the shape of the models for it, and how they are trained unless told otherwise.

    Attributes:
        name: of the recipe.
        draw: one row: random numbers and a length in tokens to tokens, targets, weights and asked,
            each [T]; T may be more than the length, the same for every row of a length.
        write_tokenizer: puts the tokenizer's files in a folder.
        text: what rows are taken from, if they are not generated.
        vocab_size, width, heads, layers: as in `GriffinConfig`.
        window: keys that local attention sees.
        length: of the training sequences.
        curriculum: shares of the run, from its start, with the part of the length that they train
            on. The rest trains on all of it.
        tokens: of one step; the number of rows follows from it.
        steps, learning_rate: of a whole run; the rate is the highest.
    """

    name: str
    draw: Callable[[np.random.Generator, int], Batch]
    write_tokenizer: Callable[[Path], None]
    text: Callable[[], bytes] | None = None
    vocab_size: int
    width: int = 64
    heads: int = 2
    layers: int = 5
    window: int
    length: int
    curriculum: tuple[tuple[float, float], ...] = ()
    tokens: int
    steps: int
    learning_rate: float = 3e-3

    def config(self, model: str) -> GriffinConfig:
        """The architecture of one of `MODELS`. RoPE rotates all of the Transformer's heads, half of
        each of Griffin's, as in RecurrentGemma."""
        return GriffinConfig(
            vocab_size=self.vocab_size,
            width=self.width,
            mlp_width=3 * self.width,
            num_heads=self.heads,
            num_layers=self.layers,
            lru_width=self.width,
            gate_blocks=self.heads,
            block_pattern=MODELS[model],
            visible_keys=self.window,
            rope_fraction=1.0 if model == "mqa" else 0.5,
        )

    def length_at(self, step: int) -> int:
        """The length that a step trains on."""
        end = 0.0
        for share, part in self.curriculum:
            end += share
            if step < end * self.steps:
                return max(SHORTEST, round(part * self.length))
        return self.length

    def batch(self, seed: int, step: int) -> Batch:
        """The rows of a step."""
        return self._rows("train", seed, step, self.length_at(step))

    def held_out(self) -> list[Batch]:
        """Rows of the whole length to test a run on."""
        return [self._rows("test", 0, index, self.length) for index in range(HELD_OUT)]

    def _rows(self, purpose: str, seed: int, step: int, length: int) -> Batch:
        rows = max(1, self.tokens // length)
        name = zlib.crc32(f"{self.name} {purpose}".encode())
        found = [
            self.draw(np.random.Generator(np.random.PCG64([name, seed, step, row])), length)
            for row in range(rows)
        ]
        return Batch(*(np.stack(parts) for parts in zip(*found, strict=True)))


def recipe_named(name: str) -> Recipe:
    """Raises ArgumentError: there is none of this name."""
    if name not in RECIPES:
        raise ArgumentError(
            f"unknown recipe {name!r}: expected one of {', '.join(RECIPES)}{nearest(name, RECIPES)}"
        )
    return RECIPES[name]


def selective_copying(rng: np.random.Generator, length: int) -> Batch:
    """As `griffin_eval.tasks.symbols.selective_copying`, with fewer than 16 data symbols where the
    length has no room for four times as many."""
    found = symbols.selective_copying(rng, length, min(16, length // 4))
    return _at_the_end(found.tokens, found.answers)


def induction_heads(rng: np.random.Generator, length: int) -> Batch:
    """As `griffin_eval.tasks.symbols.induction_heads`, but between the first trigger and the one at
    the end it stands at up to seven further places, each followed by the same answer, which is
    asked for there too. A quarter of the sequences has none of these."""
    found = symbols.induction_heads(rng, length)
    batch = _at_the_end(found.tokens, found.answers)
    first = int(np.argmax(found.tokens == symbols.TRIGGER))
    free = np.arange(first + 2, length - 2, 2)  # never two triggers side by side
    count = min(int(rng.integers(QUESTIONS)) if rng.random() < 0.75 else 0, len(free))
    places = rng.choice(free, count, replace=False)
    batch.tokens[places] = symbols.TRIGGER
    batch.tokens[places + 1] = batch.targets[places] = found.answers[0]
    batch.weights[places], batch.asked[places] = 1, True
    return batch


def _at_the_end(tokens: np.ndarray, answers: np.ndarray) -> Batch:
    """Answers follow the last tokens; all others are masked out (figure 11)."""
    targets, asked = np.zeros(len(tokens), np.int32), np.zeros(len(tokens), bool)
    targets[-len(answers) :], asked[-len(answers) :] = answers, True
    return Batch(tokens.astype(np.int32), targets, asked.astype(np.float32), asked)


def byte_text(rng: np.random.Generator, length: int) -> Batch:
    """Seven of ten rows are a phonebook, the others text; see `byte_texts`."""
    document = byte_texts.phonebook if rng.random() < 0.7 else byte_texts.text
    return Batch(*document(rng, length))


_of_symbols = functools.partial(
    Recipe,
    write_tokenizer=symbols.write_symbol_tokenizer,
    vocab_size=symbols.VOCABULARY,
    window=128,
    length=256,
    curriculum=((0.15, 1 / 8), (0.15, 1 / 4), (0.15, 1 / 2)),
    tokens=4096,
    steps=1500,
)
RECIPES = {
    recipe.name: recipe
    for recipe in (
        _of_symbols(name="selective_copy", draw=selective_copying),
        _of_symbols(name="induction_heads", draw=induction_heads),
        Recipe(
            name="bytes",
            draw=byte_text,
            write_tokenizer=byte_texts.write_byte_tokenizer,
            text=byte_texts.corpus,
            vocab_size=byte_texts.VOCABULARY,
            layers=6,
            window=256,
            length=512,
            curriculum=((0.2, 1 / 4), (0.2, 1 / 2)),
            tokens=4096,
            steps=3000,
        ),
    )
}
