"""The ways to quantise a checkpoint, by name."""

from griffin_eval.converters.codecs.bitsandbytes_encode import EightBits, NormalFloat
from griffin_eval.converters.codecs.encoding import Encoding
from griffin_eval.converters.codecs.mlx_encode import Affine
from griffin_eval.errors import ArgumentError
from griffin_eval.messages import did_you_mean

ENCODINGS: dict[str, Encoding] = {
    encoding.name: encoding for encoding in (NormalFloat(), EightBits(), Affine(4), Affine(8))
}


def encoding_named(name: str) -> Encoding:
    """The way of this name.

    Raises:
        ArgumentError: there is none.
    """
    if name not in ENCODINGS:
        raise ArgumentError(
            f"--quantize {name!r}: expected one of {', '.join(ENCODINGS)}"
            f"{did_you_mean(name, ENCODINGS)}"
        )
    return ENCODINGS[name]
