"""Peers of this package's models, and the protocol of all implementations."""

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.export import export, put_nested
from griffin_eval.converters.naming.deepmind import DEEPMIND_FLAX, DEEPMIND_TORCH

# Modules that each peer imports. DeepMind's torch code imports JAX.
PEER_NEEDS = {
    "transformers": ("torch", "transformers.models.recurrent_gemma.modeling_recurrent_gemma"),
    "deepmind-torch": ("torch", "jax", "flax", "recurrentgemma.torch.griffin"),
    "deepmind-jax": ("jax", "flax", "recurrentgemma.jax.griffin"),
}


class Implementation(Protocol):
    """A model as a benchmark uses it; its methods return after the results are computed."""

    def read(self, tokens: np.ndarray, every: bool) -> Any:
        """Read int32 [1, T] from the start, with the state that decoding would need.

        Return logits [T, V] of every position, or [1, V] of the last one. DeepMind's code gives all
        or none: asked for the last, it gives None.
        """
        ...

    def begin(self, tokens: np.ndarray) -> Any:
        """Return a state that has read int32 [B, T]."""
        ...

    def decode(self, state: Any, tokens: np.ndarray) -> tuple[Any, Any]:
        """Read int32 [B]; return logits [B, V] and the next state. It may consume the old state."""
        ...


def make_transformers(checkpoint: Checkpoint, dtype: str) -> Implementation:
    """Return transformers' RecurrentGemmaForCausalLM.

    Its cache holds keys and values. Its recurrent blocks hold their own states, which are extracted
    and restored.
    """
    import torch
    from transformers import DynamicCache, RecurrentGemmaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = RecurrentGemmaForCausalLM.from_pretrained(
        checkpoint.folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    ).eval()
    # transformers 5.24 renamed the argument.
    names = inspect.signature(model.forward).parameters
    cache_name = "cache" if "cache" in names else "past_key_values"
    blocks: list[Any] = [
        layer.temporal_block
        for layer, kind in zip(model.model.layers, checkpoint.config.block_types, strict=True)
        if kind == "recurrent"
    ]

    class Transformers:
        def read(self, tokens, every):
            return self._call(tokens, DynamicCache(config=model.config), not every)[0]

        def begin(self, tokens):
            for block in blocks:
                block.conv1d_state = None
            cache = DynamicCache(config=model.config)
            self._call(tokens, cache, True)
            return cache, self._taken()

        def decode(self, state, tokens):
            cache, memory = state
            for block, (conv, h) in zip(blocks, memory, strict=True):
                block.conv1d_state, block.rg_lru.recurrent_states = conv, h
            logits = self._call(tokens[:, None], cache, True)[:, 0]
            return logits, (cache, self._taken())

        def _taken(self):
            return [(b.conv1d_state, b.rg_lru.recurrent_states) for b in blocks]

        def _call(self, tokens, cache, last):
            return model(
                input_ids=torch.from_numpy(tokens).long(),
                use_cache=True,
                logits_to_keep=int(last),
                **{cache_name: cache},
            ).logits

    return Transformers()  # type: ignore[return-value]


def make_deepmind_torch(checkpoint: Checkpoint, dtype: str) -> Implementation:
    """Return DeepMind's recurrentgemma in PyTorch."""
    import torch
    from recurrentgemma.torch.griffin import Griffin

    from griffin_eval.converters.tensors import torch_tensor
    from griffin_eval.crosscheck.logits import deepmind_config

    model = Griffin(
        deepmind_config(checkpoint.config),
        gradient_checkpointing=False,
        dtype=getattr(torch, dtype),
    )
    weights = {
        name: torch_tensor(array).to(getattr(torch, dtype))
        for name, array in export(checkpoint, DEEPMIND_TORCH)
    }
    model.load_state_dict(weights, assign=True)

    def call(tokens, position, cache, **options):
        length = tokens.shape[1]
        positions = torch.arange(position, position + length).expand(len(tokens), length)
        return model(torch.from_numpy(tokens).long(), positions, cache, **options)

    class DeepMindTorch:
        def read(self, tokens, every):
            logits, _ = call(tokens, 0, None, return_logits=every)
            return logits if logits is None else logits[0]

        def begin(self, tokens):
            return tokens.shape[1], call(tokens, 0, None, return_logits=False)[1]

        def decode(self, state, tokens):
            position, cache = state
            logits, cache = call(tokens[:, None], position, cache)
            return logits[:, 0], (position + 1, cache)

    return DeepMindTorch()  # type: ignore[return-value]


def make_deepmind_jax(checkpoint: Checkpoint, dtype: str) -> Implementation:
    """Return DeepMind's recurrentgemma in JAX, compiled, the cache donated while decoding."""
    import jax
    import jax.numpy as jnp
    from recurrentgemma.jax.griffin import Griffin

    from griffin_eval.crosscheck.logits import deepmind_config

    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")
    model = Griffin(deepmind_config(checkpoint.config), gradient_checkpointing=False)
    params: dict[str, Any] = {}
    for name, array in export(checkpoint, DEEPMIND_FLAX):
        put_nested(params, name, jnp.asarray(np.array(array, order="C"), dtype))

    def call(cache, params, tokens, position, logits):
        positions = position + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        positions = jnp.broadcast_to(positions, tokens.shape)
        return model.apply({"params": params}, tokens, positions, cache, return_logits=logits)

    call = jax.jit(call, donate_argnums=0, static_argnums=4)

    class DeepMindJax:
        def read(self, tokens, every):
            logits, _ = jax.block_until_ready(call(None, params, tokens, 0, every))
            return logits if logits is None else logits[0]

        def begin(self, tokens):
            return tokens.shape[1], call(None, params, tokens, 0, False)[1]

        def decode(self, state, tokens):
            position, cache = state
            logits, cache = jax.block_until_ready(
                call(cache, params, tokens[:, None], position, True)
            )
            return logits[:, 0], (position + 1, cache)

    return DeepMindJax()  # type: ignore[return-value]


MAKERS: dict[str, Callable[[Checkpoint, str], Implementation]] = {
    "transformers": make_transformers,
    "deepmind-torch": make_deepmind_torch,
    "deepmind-jax": make_deepmind_jax,
}
