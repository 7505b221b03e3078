"""Words of error messages: near misses, long lists, values from files."""

import difflib
import re
import reprlib
from collections.abc import Callable, Iterable
from typing import TypeVar


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``" (did you mean 'x'?)"`` where one of the known names is close, else nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


DAMAGED = "the file is damaged or incomplete: download or save it again"
_LISTED = 10  # offenders that one error names

Item = TypeVar("Item")

# A value from a file, for a message: cut in length and depth, but no name of a tensor is cut.
_repr = reprlib.Repr()
_repr.maxstring, _repr.maxlist, _repr.maxdict = 200, 20, 10
brief = _repr.repr


def listed(items: Iterable[Item], show: Callable[[Item], str] = str) -> str:
    """The first items as ``show`` writes them, and how many more there are."""
    items = list(items)
    more = f"; and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    return "; ".join(map(show, items[:_LISTED])) + more


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can say it: JSON and pickles can hold halves of characters."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def is_sha256(text: str) -> bool:
    """Whether it is a SHA-256 in hexadecimal digits, as `hashlib` writes it."""
    return bool(re.fullmatch("[0-9a-f]{64}", text))


def printable(text: str) -> str:
    """A text from a file for a terminal: what would steer the terminal is written as ``\\x1b``."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def first_line(error: BaseException) -> str:
    """The first line of an error message that is not blank; empty if there is none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
