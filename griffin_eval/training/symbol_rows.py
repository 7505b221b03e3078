"""Training rows of the paper's synthetic tasks."""

import numpy as np

from griffin_eval.tasks.symbols import sequences
from griffin_eval.training.recipes import Batch

MAX_QUESTIONS = 8  # largest number of questions in a row of induction heads


def selective_copying(rng: np.random.Generator, length: int) -> Batch:
    """Draw a row of `griffin_eval.tasks.symbols.sequences.selective_copying`.

    At most a quarter of its tokens carry data, so that sequences shorter than 64 tokens have fewer
    than 16 data symbols.
    """
    example = sequences.selective_copying(rng, length, min(16, length // 4))
    noise = (example.tokens == sequences.NOISE) | (example.tokens == sequences.MARKER)
    return _answers_at_the_end(example.tokens, example.answers, np.flatnonzero(~noise))


def induction_heads(rng: np.random.Generator, length: int) -> Batch:
    """Draw a row of `griffin_eval.tasks.symbols.sequences.induction_heads` with more questions.

    Between the first and the last trigger, the trigger stands at up to seven further positions,
    each followed by the same answer, which also counts. A quarter of the sequences has no further
    trigger. Distances count from the first answer.
    """
    example = sequences.induction_heads(rng, length)
    first = int(np.argmax(example.tokens == sequences.TRIGGER))
    batch = _answers_at_the_end(example.tokens, example.answers, np.array([first + 1]))
    assert batch.distance is not None
    free = np.arange(first + 2, length - 2, 2)  # keeps triggers apart
    count = min(int(rng.integers(MAX_QUESTIONS)) if rng.random() < 0.75 else 0, len(free))
    positions = rng.choice(free, count, replace=False)
    batch.tokens[positions] = sequences.TRIGGER
    batch.tokens[positions + 1] = batch.targets[positions] = example.answers[0]
    batch.weights[positions], batch.scored[positions] = 1, True
    batch.distance[positions] = positions - (first + 1)
    return batch


def _answers_at_the_end(tokens: np.ndarray, answers: np.ndarray, sources: np.ndarray) -> Batch:
    """Return a row whose last targets are the answers, the only targets in the loss (figure 11).

    ``sources`` are the positions of the tokens that the answers repeat.
    """
    count, length = len(answers), len(tokens)
    targets, scored = np.zeros(length, np.int32), np.zeros(length, bool)
    distance = np.zeros(length, np.int32)
    targets[-count:], scored[-count:] = answers, True
    distance[-count:] = np.arange(length - count, length) - sources
    return Batch(tokens.astype(np.int32), targets, scored.astype(np.float32), scored, distance)
