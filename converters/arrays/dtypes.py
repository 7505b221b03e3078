"""Names and sizes of the dtypes that tensors are stored in.

A dtype goes by the name that numpy, or ml_dtypes for it, and torch both give it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


# Bytes of an element.
ITEM_BYTES = {
    **dict.fromkeys(("bool", "int8", "uint8", "float8_e4m3fn", "float8_e4m3fnuz"), 1),
    **dict.fromkeys(("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
FLOATS = ("bfloat16", "float16", "float32", "float64")  # what a parameter may be stored as


def numpy_dtype(name: str) -> "np.dtype":
    """numpy's dtype of a name, such as ``"bfloat16"``, which ml_dtypes adds to it."""
    import ml_dtypes
    import numpy as np

    return np.dtype(getattr(ml_dtypes, name, name))
