"""tensorstore, imported when it is needed, and its messages."""

import re
from typing import Any

from griffin_eval.errors import MissingExtraError


def tensorstore() -> Any:
    """The module, imported when it is needed.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import tensorstore as ts
    except ImportError:
        raise MissingExtraError("tensorstore", "jax") from None
    return ts


def reason(error: BaseException) -> str:
    """The message of tensorstore in one line, without the specification that it repeats."""
    text = re.sub(r"\s+", " ", str(error).split(" [", 1)[0])
    return re.sub(r"^[A-Z_]+: ", "", text)[:500] or type(error).__name__
