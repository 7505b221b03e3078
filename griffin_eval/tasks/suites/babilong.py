"""BABILong (arXiv:2406.10149) with a separate length argument.

lm_eval's BABILong reads its length from ``max_seq_lengths``, one text such as ``4k``; its RULER
reads a list of numbers under the same name. If both run together BABILong uses ``babilong_length``.
"""

from typing import Any

from griffin_eval.errors import ArgumentError
from griffin_eval.messages import did_you_mean

LENGTHS = ("0k", "1k", "2k", "4k", "8k", "16k", "32k", "64k", "128k")  # available in the data set


def at_length(*, babilong_length: str = "4k", **others: Any) -> dict[Any, Any]:
    """Return the documents of one question type at one of `LENGTHS`."""
    if babilong_length not in LENGTHS:
        raise ArgumentError(
            f"babilong_length={babilong_length!r}: expected one of {', '.join(LENGTHS)}"
            f"{did_you_mean(str(babilong_length), LENGTHS)}"
        )
    from lm_eval.tasks.babilong.common_utils import load_dataset

    return load_dataset(**others | {"max_seq_lengths": babilong_length})
