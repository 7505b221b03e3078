"""tensorstore, imported when it is needed, and its messages."""

import re
from http import HTTPStatus
from typing import Any

from griffin_eval.errors import MissingExtraError
from griffin_eval.messages import DAMAGED


def tensorstore() -> Any:
    """Return the module, imported when it is needed; MissingExtraError if it is not installed."""
    try:
        import tensorstore as ts
    except ImportError:
        raise MissingExtraError("tensorstore", "jax") from None
    return ts


def reason(error: BaseException) -> str:
    """Return the message of tensorstore in one line, without the specification that it repeats.
    Where an object store answered with an error, its status takes the place of tensorstore's
    word for it, often "Unknown"."""
    text = re.sub(r"\s+", " ", str(error).split(" [", 1)[0])
    text = re.sub(r"^[A-Z_]+: ", "", text)[:500] or type(error).__name__
    status = _status(error)
    if status is None:
        return text
    before, colon, _ = text.rpartition(": ")
    return f"{before}{colon}the store answered {status}"


def advice(*errors: BaseException) -> str:
    """Return what to do about something that cannot be read; nothing if a store refuses all of
    it."""
    return "" if all(map(_status, errors)) else f"; {DAMAGED}"


def _status(error: BaseException) -> str | None:
    """The status of the HTTP answer that an error is about, with its phrase."""
    found = re.search(r"http_response_code='(\d{3})'", str(error))
    if found is None:
        return None
    code = int(found[1])
    return f"{code} {HTTPStatus(code).phrase}" if code in set(HTTPStatus) else str(code)
