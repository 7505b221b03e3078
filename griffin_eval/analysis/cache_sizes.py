"""Sizes of what a model keeps of a sequence, beside the KV cache of a Transformer."""

from typing import NamedTuple

from griffin_eval.config import GriffinConfig
from griffin_eval.layout import param_specs


class CacheSizes(NamedTuple):
    """Bytes that have to be kept to continue one sequence (appendix F.4 with B = 1).

    Attributes:
        recurrent: states of the RG-LRUs, in float32 at least, and last inputs of the convolutions.
        attention: keys and values of the attention blocks.
        mqa: keys and values of a Transformer of the same depth, width and head dimension, with
            global attention and one key head.
        mha: the same with as many key heads as query heads.
    """

    recurrent: int
    attention: int
    mqa: int
    mha: int

    @property
    def total(self) -> int:
        """Bytes that this model keeps."""
        return self.recurrent + self.attention


def cache_sizes(config: GriffinConfig, length: int, itemsize: int) -> CacheSizes:
    """Sizes after ``length`` tokens of one sequence.

    A query of local attention sees its own key and the ``visible_keys`` - 1 kept ones, T_WS in the
    appendix.

    Args:
        length: tokens read so far.
        itemsize: bytes of one number in the dtype the model runs in.
    """
    kinds = config.block_types
    state = (max(itemsize, 4) + itemsize * (config.conv_width - 1)) * config.lru_width
    kept = kinds.count("local_attention") * min(length, config.visible_keys - 1)
    kept += kinds.count("global_attention") * length
    key_and_value = 2 * config.head_size * itemsize  # of one head
    mqa = len(kinds) * length * key_and_value
    return CacheSizes(
        recurrent=kinds.count("recurrent") * state,
        attention=kept * key_and_value * config.num_kv_heads,
        mqa=mqa,
        mha=mqa * config.num_heads,
    )


def parameter_bytes(config: GriffinConfig, itemsize: int) -> int:
    """Bytes of the weights, of which Λ and θ are in float32 at least.

    Args:
        itemsize: bytes of one number in the dtype the model runs in.
    """
    specs = param_specs(config).values()
    return sum(s.size * (max(itemsize, 4) if s.keep_float32 else itemsize) for s in specs)
