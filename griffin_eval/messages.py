"""Parts of error messages: near misses, long lists, values from files."""

import re
import reprlib
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import TypeVar

# Other tools' names for dtypes and formats.
USUAL_NAMES = {
    **{"half": "float16", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"},
    **{"float": "float32", "double": "float64", "fp64": "float64"},
    **{"huggingface": "hf", "transformers": "hf", "safetensors": "hf", "orbax": "griffin-orbax"},
    **{"flax": "deepmind-flax", "jax": "deepmind-flax"},
    **{"torch": "deepmind-torch", "pytorch": "deepmind-torch", "pt": "deepmind-torch"},
}


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` if a known name is close, otherwise an empty text."""
    names = list(names)
    usual = USUAL_NAMES.get(name.lower())
    if usual in names:
        return f" (did you mean {usual!r}?)"
    close = [near for text in (name, name.lower()) for near in get_close_matches(text, names, n=1)]
    return f" (did you mean {close[0]!r}?)" if close else ""


DAMAGED = "the file is damaged or incomplete: download or save it again"
_LISTED = 10  # maximum number of items in one error message

Item = TypeVar("Item")

# Short representation of a value from a file; long enough for names of tensors.
_repr = reprlib.Repr()
_repr.maxstring, _repr.maxlist, _repr.maxdict = 200, 20, 10
brief = _repr.repr


def listed(items: Iterable[Item], show: Callable[[Item], str] = str) -> str:
    """Return the first items as ``show`` formats them, and the number of further items."""
    items = list(items)
    more = f"; and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    return "; ".join(map(show, items[:_LISTED])) + more


def is_unicode(text: str) -> bool:
    """Return whether UTF-8 can encode a text: JSON and pickles can hold half surrogate pairs."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def is_sha256(text: str) -> bool:
    """Return whether a text is a SHA-256 in hexadecimal digits, as `hashlib` returns it."""
    return bool(re.fullmatch("[0-9a-f]{64}", text))


def printable(text: str) -> str:
    """Escape the control characters of a text from a file for a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def first_line(error: BaseException) -> str:
    """Return the first non-blank line of an error message, or an empty text."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
