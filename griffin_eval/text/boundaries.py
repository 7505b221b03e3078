"""Characters before which a text may be cut without changing its token ids."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from griffin_eval.text.shared_prefixes import SPACE

if TYPE_CHECKING:
    import tokenizers


# Word patterns of byte-level BPE: Llama 3's and Qwen 2's; GPT-2's is built into ByteLevel. In none
# of them a match continues from another character to a space, or depends on the text before it.
_LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = (_LLAMA, _LLAMA.replace("{1,3}", ""))


def boundaries_of_json(tokenizer: "tokenizers.Tokenizer") -> str:
    """Return the boundaries of a ``tokenizer.json``, as `Encoder` defines them; empty unless every
    step of the tokenizer is known here."""
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip or token.single_word for token in added):
        return ""
    model = tokenizer.model
    if getattr(model, "dropout", None):
        return ""
    contents = [token.content for token in added]
    contents += [content.replace(SPACE, " ") for content in contents]
    normalizers = _steps(tokenizer.normalizer, "normalizers")
    words = _steps(tokenizer.pre_tokenizer, "pretokenizers")
    boundaries = ""
    if normalizers in ([], [{"type": "NFC"}]):
        boundaries = _between_words(words)
    elif normalizers == [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]:
        # Gemma's pre-tokenizer cuts at spaces, but the normalizer has replaced all of them.
        whole = all(w["type"] == "Split" and w["pattern"] == {"String": " "} for w in words)
        if whole and type(model).__name__ == "BPE" and not _special_merges(model):
            boundaries = _between_pieces(tokenizer.get_vocab(with_added_tokens=False))
    return "".join(c for c in boundaries if not _continued(contents, c))


def boundaries_of_model(proto: bytes, vocabulary: Iterable[str]) -> str:
    """Return the boundaries of a ``tokenizer.model``, as `Encoder` defines them.

    Unigram models have none: they add up scores in float32 from the start of the text, so the
    rounding of ties between two ways to split a word depends on the text before it.
    """
    model = dict(_protobuf_fields(proto))
    try:
        trainer, normalizer = (dict(_protobuf_fields(model.get(number, b""))) for number in (2, 3))
    except TypeError:  # numbers in place of messages, which sentencepiece ignores
        return ""
    identity = not normalizer.get(2)  # no table of replacements
    verbatim = normalizer.get(3, 1) == normalizer.get(4, 1) == 0  # spaces stay as they are
    escaped, suffixes = normalizer.get(5, 1), trainer.get(24, 0)
    is_bpe = trainer.get(3, 1) == 2
    if is_bpe and identity and verbatim and escaped and not suffixes:
        return _between_pieces(set(vocabulary))
    return ""


def _between_words(steps: list[dict[str, Any]]) -> str:
    """Return the characters before which pre-tokenizers always cut."""
    match steps:
        case [{"type": "ByteLevel", "use_regex": True, "add_prefix_space": prefixed}]:
            return " " if prefixed else " \n"
        case [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"} as split,
            {"type": "ByteLevel", "use_regex": False},
        ] if pattern in _PATTERNS and not split["invert"]:
            return " "
        case [{"type": "Metaspace", "replacement": "▁", "split": True}]:
            return " "  # no space is added, since the word has one already
    return ""


def _between_pieces(vocabulary: Iterable[str]) -> str:
    """Return the characters that no BPE merge joins to the text before them.

    The result of a merge is a piece. If no piece has the character after another one, the text
    before it and the text from it on are merged independently.
    """
    pieces = set(vocabulary)
    written = {" ": SPACE, "\n": "\n"}
    return "".join(c for c, p in written.items() if p in pieces and not _continued(pieces, p))


def _continued(pieces: Iterable[str], character: str) -> bool:
    """Return whether any piece has the character after one that is not white space."""
    inside = re.compile(rf"[^\s{SPACE}]{character}")
    return any(inside.search(piece) for piece in pieces)


def _special_merges(model: Any) -> bool:
    return bool(model.ignore_merges or model.continuing_subword_prefix or model.end_of_word_suffix)


def _steps(component: Any, name: str) -> list[dict[str, Any]]:
    """Return the settings of a normalizer or pre-tokenizer, one entry for each step."""
    if component is None:
        return []
    settings = json.loads(component.__getstate__())
    return settings[name] if settings["type"] == "Sequence" else [settings]


def _protobuf_fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield number and value (integer or bytes) of each field of a protobuf message.

    sentencepiece's own ``sentencepiece_model_pb2`` needs the exact protobuf runtime that generated
    it, which no other dependency requires.
    """
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(message):
        key = varint()
        number, kind = key >> 3, key & 7
        if kind == 0:
            yield number, varint()
        elif kind == 2:
            size = varint()
            yield number, message[at : at + size]
            at += size
        else:  # a value of fixed size, or a group's begin or end mark
            at += {1: 8, 5: 4}.get(kind, 0)
