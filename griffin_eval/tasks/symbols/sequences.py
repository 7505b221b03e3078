"""Sequences of section 6.2 and appendix H of the paper: selective copying and induction heads.

The paper has a vocabulary of 16 symbols and does not describe them. Here they are:

    id      character   selective copying                    induction heads
    0       .           noise                                ordinary
    1–14    A to N      data                                 ordinary
    15      #           marker: "say the data symbols now"   trigger, the paper's special token

Selective copying uses them like S4's copying tasks (Gu et al., 2021), its source: noise and marker
are two of the 16, so that 14 symbols carry data.

Training and evaluation both draw from this module, which imports only numpy.
"""

import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

ALPHABET = ".ABCDEFGHIJKLMN#"  # printable, since lm_eval moves white space at the end of a context
VOCABULARY = len(ALPHABET)
NOISE = 0
DATA = range(1, 15)
MARKER = TRIGGER = 15
ORDINARY = range(15)
VARIANTS = ("markers", "autoregressive")


class Example(NamedTuple):
    """A sequence and the answers at its end.

    Attributes:
        tokens: int64 [T], ids.
        answers: int64 [M], the right next token after each of the last M tokens. Training counts
            only their loss (figure 11).
    """

    tokens: np.ndarray
    answers: np.ndarray


def generator(task: str, seed: int, length: int, index: int) -> np.random.Generator:
    """Return the random generator of one sequence, independent of all other sequences.

    Callers use only ``random()``, which gives the same numbers in every version of numpy.
    """
    return np.random.Generator(np.random.PCG64([zlib.crc32(task.encode()), seed, length, index]))


def selective_copying(
    rng: np.random.Generator, length: int, symbols: int = 16, variant: str = "markers"
) -> Example:
    """Draw a sequence of data symbols at random positions among noise, to be repeated in order.

    Args:
        length: Number of tokens before the first marker, including data (paper: 1024; Gu and Dao,
            2023: 4096; S4's code counts noise and data apart).
        symbols: Number of tokens that carry data, drawn with repetition (16 in both).
        variant: ``markers``, as in S4 and Mamba: one marker follows for each symbol, and the answer
            at the i-th marker is the i-th symbol. ``autoregressive``: one marker follows, then the
            symbols, each the answer at the token before it.
    """
    tokens = np.full(length + symbols, MARKER)
    tokens[:length] = NOISE
    positions = np.sort(np.argsort(rng.random(length), kind="stable")[:symbols])
    answers = _draw(rng, DATA, symbols)
    tokens[positions] = answers
    if variant == "autoregressive":
        tokens[length + 1 :] = answers[:-1]
    return Example(tokens, answers)


def induction_heads(rng: np.random.Generator, length: int) -> Example:
    """Draw random tokens with the trigger at one random position and again at the end.

    The answer is the token after the first trigger.

    Args:
        length: Number of tokens, including the last trigger; at least 3 (paper: trained with 256).
    """
    tokens = _draw(rng, ORDINARY, length)
    position = int(rng.random() * (length - 2))  # a token and the last trigger follow it
    tokens[[position, -1]] = TRIGGER
    return Example(tokens, tokens[[position + 1]])


def text(ids: np.ndarray) -> str:
    """Return ids as text, one character for each token."""
    return "".join(ALPHABET[i] for i in ids)


def write_symbol_tokenizer(folder: str | Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` with one token for each symbol.

    Nothing is normalised, and other characters give no token. There is no BOS, since the tasks have
    none. EOS and padding, which lm_eval's models require, are the marker, which is never an answer.
    """
    import json

    from tokenizers import AddedToken, Tokenizer, decoders, models

    marker = ALPHABET[MARKER]
    vocabulary = {character: i for i, character in enumerate(ALPHABET)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(marker, normalized=False)])
    folder = Path(folder)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), "utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": marker,
        "pad_token": marker,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def _draw(rng: np.random.Generator, ids: range, count: int) -> np.ndarray:
    return ids.start + (rng.random(count) * len(ids)).astype(np.int64)
