"""Batches of a run, drawn by other processes while a GPU or TPU computes.

The random numbers of a row depend only on the recipe, the seed, the step and the row, so that a
resumed run reads the rows that it would have read. Held-out rows are drawn apart and are the
same for all seeds; those of ``bytes`` overlap with the text that it trains on.
"""

import contextlib
import functools
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np

from griffin_eval.tasks.phonebook.names import PEOPLE
from griffin_eval.tasks.symbols.sequences import write_symbol_tokenizer
from griffin_eval.training import byte_texts, symbol_rows
from griffin_eval.training.recipes import Batch, Recipe

HELD_OUT_BATCHES = 8
MAX_PROCESSES = 8
_AHEAD = 2  # batches per process that are drawn in advance

# Function that draws a row, arrays [T], for a length in tokens. All rows may exceed it equally.
Draw = Callable[[np.random.Generator, int], Batch]
Take = Callable[[int, int], Batch]


class Data(NamedTuple):
    """The data of a recipe: the last stages use the last functions of ``draws``, one each, and
    earlier stages the first."""

    draws: tuple[Draw, ...]
    write_tokenizer: Callable[[Path], None] = byte_texts.write_byte_tokenizer
    held_out: Draw | None = None  # None for the last of ``draws``
    text: Callable[[], bytes] | None = None  # source of rows that are parts of a text
    held_out_text: Callable[[], bytes] | None = None  # source of test rows, if it is another text


def _mixed(rng: np.random.Generator, length: int) -> Batch:
    """Draw a phonebook in seven of ten rows, otherwise a part of a text."""
    draw = byte_texts.phonebook if rng.random() < 0.7 else byte_texts.text
    return draw(rng, length)


def _lookup(people: int, *shares: float) -> Draw:
    """Return a function that draws short phonebooks, for one stage of ``phonebook_lookup``.

    With long numbers, a model can learn to continue a number from its first digits without learning
    which number belongs to a name. Few people and short numbers teach this first: ``shares`` are
    the shares of books with numbers of one digit, two, and all ten.
    """

    def draw(rng: np.random.Generator, length: int) -> Batch:
        digits = int(rng.choice([1, 2, byte_texts.DIGITS], p=shares))
        return _short_phonebook(rng, length, people=people, digits=digits)

    return draw


# A book takes at most two fifths of the bytes, so that its entries are repeated often.
_short_phonebook = functools.partial(byte_texts.phonebook, min_entries=1, max_share=0.4)

DATA = {
    "selective_copy": Data((symbol_rows.selective_copying,), write_symbol_tokenizer),
    "induction_heads": Data((symbol_rows.induction_heads,), write_symbol_tokenizer),
    "bytes": Data((_mixed,), text=byte_texts.corpus),
    "phonebook": Data((functools.partial(byte_texts.phonebook, min_entries=1),)),
    "phonebook_lookup": Data(
        (
            _lookup(4, 0.5, 0.2, 0.3),
            _lookup(64, 0.4, 0.2, 0.4),
            _lookup(2048, 0.3, 0.2, 0.5),
            _lookup(PEOPLE, 0.2, 0.1, 0.7),
        ),
        held_out=_short_phonebook,
    ),
    "text": Data(
        (functools.partial(byte_texts.text, scored=True),),
        held_out=functools.partial(byte_texts.text, scored=True, source=byte_texts.held_out),
        text=byte_texts.corpus,
        held_out_text=byte_texts.held_out,
    ),
}


def draw_batch(recipe: Recipe, seed: int, step: int, stage: int | None = None) -> Batch:
    """Draw the rows of a training step in a stage; None for the last one."""
    draws = DATA[recipe.name].draws
    later = 0 if stage is None else len(recipe.curriculum) - stage
    draw = draws[max(0, len(draws) - 1 - later)]
    return _rows(recipe, "train", draw, seed, step, recipe.length_of(stage))


def held_out_batches(recipe: Recipe, stage: int | None = None) -> list[Batch]:
    """Draw the test batches with a stage's length; None for the last one."""
    data, length = DATA[recipe.name], recipe.length_of(stage)
    draw = data.held_out or data.draws[-1]
    return [_rows(recipe, "test", draw, 0, index, length) for index in range(HELD_OUT_BATCHES)]


def _rows(recipe: Recipe, purpose: str, draw: Draw, seed: int, step: int, length: int) -> Batch:
    name = zlib.crc32(f"{recipe.name} {purpose}".encode())
    rows = [
        draw(np.random.Generator(np.random.PCG64([name, seed, step, row])), length)
        for row in range(max(1, recipe.tokens // length))
    ]
    return Batch(*(np.stack(arrays) for arrays in zip(*rows, strict=True)))


@contextlib.contextmanager
def batches(recipe: Recipe, seed: int, processes: int) -> Iterator[Take]:
    """Yield a function that returns the batch of a step and stage, called in the order of steps.

    With zero ``processes`` it draws a batch on demand.
    """
    if not processes:
        yield functools.partial(draw_batch, recipe, seed)
        return
    drawn: dict[tuple[int, int], Future[Batch]] = {}

    def take(step: int, stage: int) -> Batch:
        for later in range(step, min(step + _AHEAD * processes, recipe.steps)):
            its_stage = recipe.stage_at(later) if recipe.advance is None else stage
            if (later, its_stage) not in drawn:
                drawn[later, its_stage] = pool.submit(draw_batch, recipe, seed, later, its_stage)
        batch = drawn[step, stage].result()
        for key in [key for key in drawn if key[0] <= step or recipe.advance and key[1] != stage]:
            drawn.pop(key).cancel()
        return batch

    # JAX has threads, so the pool must not fork.
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        try:
            yield take
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def processes_for(platform: str) -> int:
    """Return the number of processes that draw batches: none on a CPU, which computes the steps."""
    return 0 if platform == "cpu" else min(MAX_PROCESSES, max(1, (os.cpu_count() or 1) - 1))
