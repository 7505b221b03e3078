"""Memory that a model needs for a sequence, beside the KV cache of a Transformer."""

from typing import NamedTuple

from griffin_eval.config import GriffinConfig
from griffin_eval.layout import param_specs


class CacheSizes(NamedTuple):
    """Bytes needed to continue one sequence (appendix F.4 with B = 1).

    Attributes:
        recurrent: States of the RG-LRUs, at least float32, and last inputs of the convolutions.
        attention: Keys and values of the attention blocks.
        mqa: Keys and values of a Transformer of the same depth, width and head dimension, with
            global attention and one key head.
        mha: Keys and values of the same Transformer with as many key heads as query heads.
    """

    recurrent: int
    attention: int
    mqa: int
    mha: int

    @property
    def total(self) -> int:
        """The bytes that this model keeps."""
        return self.recurrent + self.attention


def cache_sizes(config: GriffinConfig, length: int, itemsize: int) -> CacheSizes:
    """Return the sizes after ``length`` tokens of one sequence.

    A local attention query sees its own key and the ``visible_keys`` - 1 cached ones, T_WS in the
    appendix. ``itemsize`` is the number of bytes of the model's dtype.
    """
    kinds = config.block_types
    state = (max(itemsize, 4) + itemsize * (config.conv_width - 1)) * config.lru_width
    kept = kinds.count("local_attention") * min(length, config.visible_keys - 1)
    kept += kinds.count("global_attention") * length
    key_and_value = 2 * config.head_size * itemsize  # per head
    mqa = len(kinds) * length * key_and_value
    return CacheSizes(
        recurrent=kinds.count("recurrent") * state,
        attention=kept * key_and_value * config.num_kv_heads,
        mqa=mqa,
        mha=mqa * config.num_heads,
    )


def parameter_bytes(config: GriffinConfig, itemsize: int) -> int:
    """Return the bytes of the weights, with ``itemsize`` bytes each; Λ and θ take at least four."""
    specs = param_specs(config).values()
    return sum(s.size * (max(itemsize, 4) if s.keep_float32 else itemsize) for s in specs)
