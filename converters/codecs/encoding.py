"""The interface of ways to store matrices in fewer bits that other libraries read."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from griffin_eval.converters.codecs.quantised import TOGETHER
from griffin_eval.converters.containers.container import Specs
from griffin_eval.layout import ParamSpec

if TYPE_CHECKING:
    import numpy as np

DTYPES = ("bfloat16", "float16", "float32")  # that the libraries quantise
WORK = 32 * TOGETHER  # bytes of the arrays between given and quantised elements, at most


class Encoded(NamedTuple):
    """Rows of a matrix, quantised.

    Attributes:
        parts: what they add to each tensor of `Encoding.stored` that depends on them, in order.
        values: what is read back of them, of their shape.
    """

    parts: "tuple[np.ndarray, ...]"
    values: "np.ndarray"


class Encoding(ABC):
    """A way to quantise a checkpoint.

    Attributes:
        name: as typed after ``--quantize``.
        left: the parameters that stay as they are, in words.
        reader: the library that loads it, one of those whose limits
            `griffin_eval.converters.formats` knows.
        runs_mixed: whether it runs a model whose Λ has another dtype than matrices of 16 bits.
    """

    name: str
    left: str
    reader: str = "transformers"
    runs_mixed: bool = True

    @abstractmethod
    def takes(self, spec: ParamSpec) -> bool:
        """Whether a parameter is quantised."""

    @abstractmethod
    def stored(self, spec: ParamSpec, dtype: str) -> Specs:
        """Shape and dtype of each tensor that a matrix is stored in: first those that are made of
        `Encoded.parts`, then those of `constants`."""

    @abstractmethod
    def encode(self, rows: "np.ndarray") -> Encoded:
        """Some rows of a matrix, finite, of one of `DTYPES`; all that `together` asks for, unless
        they are the last ones."""

    def together(self, spec: ParamSpec) -> int:
        """The rows whose number divides that of rows which are quantised at a time."""
        return 1

    def constants(self, spec: ParamSpec, dtype: str) -> "dict[str, np.ndarray]":
        """The tensors of a matrix that do not depend on its elements."""
        return {}

    def read_dtype(self, dtype: str) -> str:
        """The dtype that a matrix which had another one is dequantised in."""
        return dtype

    def shape(self, spec: ParamSpec) -> tuple[int, ...]:
        """The shape of a parameter that is not quantised, of the same elements in their order."""
        return spec.shape

    @abstractmethod
    def config(self, dtype: str) -> dict[str, Any]:
        """What config.json says of it, for weights that had this dtype."""


def is_matrix(spec: ParamSpec) -> bool:
    """Whether a parameter is the weight of a linear map, or of the embedding."""
    return spec.name.endswith(".weight") and len(spec.shape) == 2


def bands(pieces: "Iterable[np.ndarray]", together: int) -> "Iterator[np.ndarray]":
    """The rows of a matrix, so many that they stay in a cache, ``together`` or a multiple of it but
    for the last ones.

    Args:
        pieces: consecutive rows, [R, C] each.
        together: rows.
    """
    import numpy as np

    left: list[np.ndarray] = []  # fewer rows than asked for
    for piece in pieces:
        count = together * max(1, TOGETHER // max(1, piece.shape[1]) // together)
        start = 0
        if left:
            start = min(len(piece), count - sum(map(len, left)))
            left.append(piece[:start])
            if sum(map(len, left)) < count:
                continue
            yield np.concatenate(left)
            left = []
        for first in range(start, len(piece), count):
            band = piece[first : first + count]
            if len(band) < count:
                left = [band]
                break
            yield band
    if left:
        yield np.concatenate(left)
