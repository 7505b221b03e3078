"""Pairs of documents that differ in one fact, for `experiments.causal_map.causal_map`."""

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from experiments.causal_map.causal_map import Pair
from griffin_eval.errors import ArgumentError
from griffin_eval.tasks.long_text import passkey
from griffin_eval.tasks.phonebook.books import draw_book
from griffin_eval.tasks.symbols import sequences
from griffin_eval.text.tokenizer import Tokenizer, encode_with_bos

SYMBOLS = 16  # of selective copying
TRIES = 20  # drawn documents for each pair that is wanted
Texts = tuple[str, str, str, str]  # prompts of the original and the changed, and their answers


def phonebook_pairs(
    tokenizer: Tokenizer, add_bos: bool, *, count: int, length: int, seed: int
) -> list[Pair]:
    """Books of so many entries and a question about one in their first quarter."""

    def texts(index: int) -> Texts:
        book = draw_book(f"{seed} {length} map", index, length, 1)
        early = book.others()[: max(1, length // 4)]
        position = early[index % len(early)]
        (name, number), new = book.entries[position], book.replacements[0]
        return book.ask(name), book.with_number(position, new).ask(name), f" {number}", f" {new}"

    return _drawn("phonebook", texts, tokenizer, add_bos, count)


def passkey_pairs(
    tokenizer: Tokenizer,
    add_bos: bool,
    *,
    count: int,
    length: int,
    seed: int,
    folder: Path,
) -> list[Pair]:
    """Prompts of so many tokens with a number near their beginning.

    Args:
        tokenizer: of the model.
        add_bos: whether documents begin with BOS.
        count: number of pairs.
        length: tokens of a prompt.
        seed: of everything that is drawn.
        folder: of the tokenizer.
    """
    rows = passkey.dataset([length], [10], count, seed=seed, tokenizer=str(folder))["test"]
    prompts, answers = list(rows["prompt"]), list(rows["answer"])

    def texts(index: int) -> Texts:
        turn, sample = divmod(index, count)
        prompt, number = prompts[sample], answers[sample]
        rng = random.Random(f"map {seed} {sample} {turn}")
        others = (str(passkey.NUMBERS[int(rng.random() * 90_000)]) for _ in itertools.count())
        new = next(other for other in others if other not in prompt)
        return prompt, prompt.replace(number, new), f" {number}", f" {new}"

    return _drawn("passkey", texts, tokenizer, add_bos, count)


def induction_pairs(*, count: int, length: int, seed: int) -> list[Pair]:
    """Sequences of so many symbols whose trigger stands in their first quarter, as token ids."""
    pairs = []
    for index in range(count):
        rng = sequences.generator("griffin_map", seed, length, index)
        tokens = sequences.induction_heads(rng, length).tokens
        place = int(rng.random() * max(1, length // 4))
        old = int(np.flatnonzero(tokens[:-1] == sequences.TRIGGER)[0])
        tokens[[old, place]] = tokens[[place, old]]
        fact = int(tokens[place + 1])
        ordinary = sequences.ORDINARY
        new = ordinary[(fact + 1 + int(rng.random() * (len(ordinary) - 1))) % len(ordinary)]
        changed = tokens.copy()
        changed[place + 1] = new
        original, changed = tokens.astype(np.int32), changed.astype(np.int32)
        answers = np.array([fact], np.int32), np.array([new], np.int32)
        pairs.append(Pair(original, changed, place + 2, *answers))
    return pairs


def copying_pairs(*, count: int, length: int, seed: int) -> tuple[list[Pair], list[int]]:
    """Sequences of selective copying that differ in one data symbol, with as many markers as it
    takes to ask for it, and which of the `SYMBOLS` it is, from 0. The last cut is before the first
    marker.

    Args:
        count: number of pairs, which take the symbols in turn.
        length: tokens before the first marker.
        seed: of everything that is drawn.
    """
    pairs = []
    for index in range(count):
        rng = sequences.generator("griffin_map copying", seed, length, index)
        tokens = sequences.selective_copying(rng, length, SYMBOLS).tokens.astype(np.int32)
        symbol = index % SYMBOLS
        place = int(np.flatnonzero(tokens[:length] != sequences.NOISE)[symbol])
        fact, data = int(tokens[place]), sequences.DATA
        new = data[(fact - data.start + 1 + int(rng.random() * (len(data) - 1))) % len(data)]
        original = tokens[: length + symbol + 1]
        changed = original.copy()
        changed[place] = new
        answers = np.array([fact], np.int32), np.array([new], np.int32)
        pairs.append(Pair(original, changed, place + 1, *answers, end=length))
    return pairs, [index % SYMBOLS for index in range(count)]


def own_pair(
    tokenizer: Tokenizer, add_bos: bool, text: str, fact: str, instead: str, question: str
) -> Pair:
    """The user's own text, with another fact in the place of one of its facts.

    Args:
        tokenizer: of the model.
        add_bos: whether documents begin with BOS.
        text: the document.
        fact: what it says once, which is the answer.
        instead: what the changed document says, which is the answer there.
        question: what follows the text.

    Raises:
        ArgumentError: the text says the fact never or several times, or the two have different
            numbers of tokens.
    """
    if (times := text.count(fact)) != 1 or not fact:
        raise ArgumentError(
            f"--fact must stand in the text once, and {fact!r} stands {times} times"
        )
    if fact == instead:
        raise ArgumentError(f"--instead must differ from --fact, found {instead!r} twice")
    end, space = ("" if text.endswith("\n") else "\n"), ("" if question[-1:].isspace() else " ")
    rest, other = f"{end}{question}", text.replace(fact, instead)
    texts = (text + rest, other + rest, f"{space}{fact}", f"{space}{instead}")
    pair = _pair(texts, tokenizer, add_bos)
    if isinstance(pair, str):
        raise ArgumentError(f"--fact {fact!r} and --instead {instead!r} cannot be compared: {pair}")
    return pair


def _drawn(
    task: str,
    texts: Callable[[int], Texts],
    tokenizer: Tokenizer,
    add_bos: bool,
    count: int,
) -> list[Pair]:
    tried = (_pair(texts(index), tokenizer, add_bos) for index in range(TRIES * count))
    found = list(itertools.islice((pair for pair in tried if isinstance(pair, Pair)), count))
    if len(found) < count:
        raise ArgumentError(
            f"the tokenizer writes too few pairs of --task {task} in equally many tokens, "
            f"{len(found)} of {count}: a model of the paper's symbols takes --task induction_heads"
        )
    return found


def _pair(texts: Texts, tokenizer: Tokenizer, add_bos: bool) -> Pair | str:
    """The pair in tokens, or why there is none."""
    original, changed = (encode_with_bos(tokenizer, text, add_bos) for text in texts[:2])
    answers = list(_answers(texts, tokenizer, add_bos, original, changed))
    if len(original) != len(changed):
        return f"the documents have {len(original)} and {len(changed)} tokens, not equally many"
    if None in answers:
        return "the question and its answer share a token: end the question with a whole word"
    one, other = (answer for answer in answers if answer is not None)
    if len(one) != len(other) or not one:
        return f"the answers have {len(one)} and {len(other)} tokens, not equally many"
    both = np.array([original, changed], np.int32)
    differing = np.flatnonzero(both[0] != both[1])
    if not len(differing) or one == other:
        return "they are the same tokens"
    end = int(differing[-1]) + 1
    return Pair(both[0], both[1], end, np.array(one, np.int32), np.array(other, np.int32))


def _answers(
    texts: Texts, tokenizer: Tokenizer, add_bos: bool, *prompts: list[int]
) -> Iterator[list[int] | None]:
    """The tokens of each answer; None where the prompt reads otherwise with it."""
    for prompt, text, answer in zip(prompts, texts[:2], texts[2:], strict=True):
        whole = encode_with_bos(tokenizer, text + answer, add_bos)
        yield whole[len(prompt) :] if whole[: len(prompt)] == prompt else None
