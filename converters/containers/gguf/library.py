"""The gguf library, imported when it is needed."""

from typing import Any

from griffin_eval.errors import MissingExtraError


def gguf() -> Any:
    """The module.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import gguf
    except ImportError:
        raise MissingExtraError("gguf", "gguf") from None
    return gguf
