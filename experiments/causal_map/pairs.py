"""Pairs of documents that differ in one fact."""

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from griffin_eval.errors import ArgumentError
from griffin_eval.tasks.long_text import passkey
from griffin_eval.tasks.phonebook.books import draw_book
from griffin_eval.tasks.symbols import sequences
from griffin_eval.text.tokenizer import Tokenizer, encode_with_bos

SYMBOLS = 16  # data symbols of a document of selective copying
TRIES = 20  # drawn documents for each pair
SEED = 0
Texts = tuple[str, str, str, str]  # original and changed prompt, and their answers


class Pair(NamedTuple):
    """Two documents that differ in one fact, and a question about it.

    Attributes:
        original, changed: int32 [N], the documents with their question, of equal length.
        fact_end: Number of tokens up to the last differing one; less than N.
        original_answer, changed_answer: int32 [M], the answers, of equal length.
        end: Number of tokens before the last cut; None for all but the last token.
    """

    original: np.ndarray
    changed: np.ndarray
    fact_end: int
    original_answer: np.ndarray
    changed_answer: np.ndarray
    end: int | None = None

    def cut(self, distance: int | None) -> int | None:
        """Return the number of tokens before the cut at a distance from the fact, None for the last
        cut; or None if the question ends before it."""
        last = len(self.original) - 1 if self.end is None else self.end
        cut = last if distance is None else self.fact_end + distance
        return cut if cut <= last else None


class Questions(NamedTuple):
    """The pairs of a task or text; in selective copying each asks for the symbol of an index."""

    name: str
    pairs: list[Pair]
    symbols: list[int] | None = None


def phonebook(
    tokenizer: Tokenizer, add_bos: bool, count: int, length: int | None = None
) -> Questions:
    """Draw books of ``length`` entries with a question about one in their first quarter."""
    length = length or 20

    def texts(index: int) -> Texts:
        book = draw_book(f"{SEED} {length} map", index, length, 1)
        early = book.others()[: max(1, length // 4)]
        position = early[index % len(early)]
        (name, number), new = book.entries[position], book.replacements[0]
        return book.ask(name), book.with_number(position, new).ask(name), f" {number}", f" {new}"

    pairs = _drawn("phonebook", texts, tokenizer, add_bos, count)
    return Questions(f"phonebook of {length} entries", pairs)


def passkeys(
    tokenizer: Tokenizer, add_bos: bool, count: int, length: int | None, folder: Path
) -> Questions:
    """Draw prompts of ``length`` tokens of a folder's tokenizer, with a number near the start."""
    length = length or 1024
    rows = passkey.dataset([length], [10], count, seed=SEED, tokenizer=str(folder))["test"]
    prompts, answers = list(rows["prompt"]), list(rows["answer"])

    def texts(index: int) -> Texts:
        turn, sample = divmod(index, count)
        prompt, number = prompts[sample], answers[sample]
        rng = random.Random(f"map {SEED} {sample} {turn}")
        others = (str(passkey.NUMBERS[int(rng.random() * 90_000)]) for _ in itertools.count())
        new = next(other for other in others if other not in prompt)
        return prompt, prompt.replace(number, new), f" {number}", f" {new}"

    pairs = _drawn("passkey", texts, tokenizer, add_bos, count)
    return Questions(f"passkey of {length} tokens", pairs)


def induction_heads(count: int, length: int | None = None, seed: int = SEED) -> Questions:
    """Draw sequences of ``length`` symbols with the trigger in their first quarter."""
    length = length or 256
    pairs = []
    for index in range(count):
        rng = sequences.generator("griffin_map", seed, length, index)
        tokens = sequences.induction_heads(rng, length).tokens.astype(np.int32)
        place = int(rng.random() * max(1, length // 4))
        old = int(np.flatnonzero(tokens[:-1] == sequences.TRIGGER)[0])
        tokens[[old, place]] = tokens[[place, old]]
        pairs.append(_changed_symbol(tokens, place + 1, sequences.ORDINARY, rng))
    return Questions(f"induction_heads of {length} tokens", pairs)


def selective_copying(count: int, length: int | None = None, seed: int = SEED) -> Questions:
    """Draw sequences of selective copying that differ in one data symbol.

    Markers follow until the symbol is due; pairs take the `SYMBOLS` in turn. The last cut is before
    the first marker, after ``length`` tokens.
    """
    length = length or 1024
    if length < SYMBOLS:
        raise ArgumentError(
            f"--length {length}: selective_copying has {SYMBOLS} data symbols, so use "
            f"{SYMBOLS} tokens or more"
        )
    pairs = []
    for index in range(count):
        rng = sequences.generator("griffin_map copying", seed, length, index)
        tokens = sequences.selective_copying(rng, length, SYMBOLS).tokens.astype(np.int32)
        symbol = index % SYMBOLS
        place = int(np.flatnonzero(tokens[:length] != sequences.NOISE)[symbol])
        asked = tokens[: length + symbol + 1]
        pair = _changed_symbol(asked, place, sequences.DATA, rng)
        pairs.append(pair._replace(end=length))
    symbols = [index % SYMBOLS for index in range(count)]
    return Questions(f"selective_copying of {length} tokens", pairs, symbols)


SYMBOL_TASKS = {"induction_heads": induction_heads, "selective_copying": selective_copying}


def _changed_symbol(
    tokens: np.ndarray, place: int, choices: range, rng: np.random.Generator
) -> Pair:
    """Return a pair whose changed document has another of the choices at a place."""
    fact = int(tokens[place])
    step = 1 + int(rng.random() * (len(choices) - 1))
    new = choices[(fact - choices.start + step) % len(choices)]
    changed = tokens.copy()
    changed[place] = new
    return Pair(tokens, changed, place + 1, np.array([fact], np.int32), np.array([new], np.int32))


def own_pair(
    tokenizer: Tokenizer, add_bos: bool, text: str, fact: str, instead: str, question: str
) -> Pair:
    """Make a pair of a user's text that has a fact once, and of the text with another one instead.

    The question follows the text; the two facts are the answers.

    Raises:
        ArgumentError: The text does not have the fact exactly once, or the two differ in their
            number of tokens.
    """
    if (times := text.count(fact)) != 1:
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
    task: str, texts: Callable[[int], Texts], tokenizer: Tokenizer, add_bos: bool, count: int
) -> list[Pair]:
    tried = (_pair(texts(index), tokenizer, add_bos) for index in range(TRIES * count))
    pairs = list(itertools.islice((pair for pair in tried if isinstance(pair, Pair)), count))
    if len(pairs) < count:
        raise ArgumentError(
            f"the tokenizer writes too few pairs of --task {task} in equally many tokens, "
            f"{len(pairs)} of {count}: for a model of the paper's symbols use "
            "--task induction_heads"
        )
    return pairs


def _pair(texts: Texts, tokenizer: Tokenizer, add_bos: bool) -> Pair | str:
    """Return the pair in tokens, or the reason why there is none."""
    documents = [encode_with_bos(tokenizer, text, add_bos) for text in texts[:2]]
    answers = []
    for document, text, answer in zip(documents, texts[:2], texts[2:], strict=True):
        whole = encode_with_bos(tokenizer, text + answer, add_bos)
        if whole[: len(document)] != document:
            return "the question and its answer share a token: end the question with a whole word"
        answers.append(whole[len(document) :])
    for name, (one, other) in (("documents", documents), ("answers", answers)):
        if len(one) != len(other) or not one:
            return f"the {name} have {len(one)} and {len(other)} tokens, not equally many"
    original, changed = np.array(documents, np.int32)
    differing = np.flatnonzero(original != changed)
    if not len(differing) or answers[0] == answers[1]:
        return "they are the same tokens"
    return Pair(original, changed, int(differing[-1]) + 1, *np.array(answers, np.int32))
