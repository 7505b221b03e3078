"""The implementations that are compared: this package's and its peers'."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.export import export, put_nested
from griffin_eval.converters.naming.deepmind import DEEPMIND_FLAX, DEEPMIND_TORCH
from griffin_eval.runners.batching import step_tokens

KEPT = 32  # positions of a document whose logits are compared
CHECKED = 3  # tokens after the prompts whose logits are compared
STEP = step_tokens("cpu")  # tokens that ours read at a time, as when they evaluate


class Implementation(Protocol):
    """A model as a benchmark uses it; what it returns has been computed, not only asked for."""

    def read(self, tokens: np.ndarray, every: bool) -> Any:
        """Reads int32 [1, T] from the start and keeps what decoding would need.

        Returns:
            Logits [T, V] of every position, or [1, V] of the last one. DeepMind's code gives all
            or none; asked for the last, it gives None.
        """
        ...

    def begin(self, tokens: np.ndarray) -> Any:
        """A state that has read int32 [B, T]."""
        ...

    def decode(self, state: Any, tokens: np.ndarray) -> tuple[Any, Any]:
        """Reads int32 [B]; logits [B, V] and the state after it. The state before may be lost."""
        ...


def make_torch(checkpoint: Checkpoint, dtype: str, packed: bool = False) -> Implementation:
    """`griffin_eval.model_torch`, whose matrices may stay quantised."""
    import torch

    from griffin_eval.model_torch.decoding import DecodingState
    from griffin_eval.model_torch.loading import load, load_packed
    from griffin_eval.process import tune_process

    tune_process()
    model = (load_packed if packed else load)(checkpoint, getattr(torch, dtype)).eval()

    class Torch:
        def read(self, tokens, every):
            hidden, _ = self._read(tokens)
            return model.logits(torch.cat(hidden, 1)[0] if every else hidden[-1][0, -1:])

        def begin(self, tokens):
            rows = torch.arange(len(tokens))
            return DecodingState.start(model, len(rows)).insert(rows, self._read(tokens)[1], rows)

        def decode(self, state, tokens):
            active = torch.ones(len(tokens), dtype=torch.int64)
            hidden, state = state.step(model, torch.from_numpy(tokens), active)
            return model.logits(hidden), state

        def _read(self, tokens):
            state, hidden = model.init_state(len(tokens)), []
            for chunk in torch.from_numpy(tokens).split(STEP, 1):
                lengths = torch.full((len(tokens),), chunk.shape[1])
                h, state = model.step(chunk, lengths, state)
                hidden.append(h)
            return hidden, state

    return Torch()  # type: ignore[return-value]


def make_torch_quantised(checkpoint: Checkpoint, dtype: str) -> Implementation:
    """`griffin_eval.model_torch`, whose matrices stay quantised."""
    return make_torch(checkpoint, dtype, packed=True)


def make_jax(checkpoint: Checkpoint, dtype: str, packed: bool = False) -> Implementation:
    """`griffin_eval.model_jax`, whose matrices may stay quantised: its methods compiled, the state
    donated, as the runner does."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from griffin_eval.model_jax.decoding import DecodingState
    from griffin_eval.model_jax.loading import load, load_packed

    model = (load_packed if packed else load)(checkpoint, jnp.dtype(dtype))
    graph, params = nnx.split(model)

    def step(state, params, tokens):
        lengths = jnp.full(len(tokens), tokens.shape[1], jnp.int32)
        return nnx.merge(graph, params).step(tokens, lengths, state)

    def logits(params, hidden):
        return nnx.merge(graph, params).logits(hidden)

    def decode(state, params, tokens):
        active = jnp.ones(len(tokens), jnp.int32)
        hidden, state = state.step(nnx.merge(graph, params), tokens, active)
        return logits(params, hidden), state

    read_chunk, decode_step, insert = (
        jax.jit(function, donate_argnums=0) for function in (step, decode, DecodingState.insert)
    )
    compiled_logits = jax.jit(logits)

    class Jax:
        def read(self, tokens, every):
            hidden, state = self._read(tokens)
            wanted = jnp.concatenate(hidden, 1)[0] if every else hidden[-1][0, -1:]
            return jax.block_until_ready((compiled_logits(params, wanted), state))[0]

        def begin(self, tokens):
            rows = jnp.arange(len(tokens))
            return insert(DecodingState.start(model, len(rows)), rows, self._read(tokens)[1], rows)

        def decode(self, state, tokens):
            return jax.block_until_ready(decode_step(state, params, tokens))

        def _read(self, tokens):
            state, hidden = model.init_state(len(tokens)), []
            for start in range(0, tokens.shape[1], STEP):
                h, state = read_chunk(state, params, tokens[:, start : start + STEP])
                hidden.append(h)
            return hidden, state

    return Jax()  # type: ignore[return-value]


def make_jax_quantised(checkpoint: Checkpoint, dtype: str) -> Implementation:
    """`griffin_eval.model_jax`, whose matrices stay quantised."""
    return make_jax(checkpoint, dtype, packed=True)


def make_transformers(checkpoint: Checkpoint, dtype: str) -> Implementation:
    """transformers' RecurrentGemmaForCausalLM. Its cache holds keys and values; what its recurrent
    blocks remember they keep to themselves, so that it is taken out and put back."""
    import torch
    from transformers import DynamicCache, RecurrentGemmaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = RecurrentGemmaForCausalLM.from_pretrained(
        checkpoint.folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    ).eval()
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
                past_key_values=cache,
                logits_to_keep=int(last),
            ).logits

    return Transformers()  # type: ignore[return-value]


def make_deepmind_torch(checkpoint: Checkpoint, dtype: str) -> Implementation:
    """DeepMind's recurrentgemma in PyTorch."""
    import torch
    from recurrentgemma.torch.griffin import Griffin

    from griffin_eval.converters.arrays.torch import torch_tensor
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
    """DeepMind's recurrentgemma in JAX, compiled, the cache given up while decoding."""
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
    "torch": make_torch,
    "torch-quantised": make_torch_quantised,
    "jax": make_jax,
    "jax-quantised": make_jax_quantised,
    "transformers": make_transformers,
    "deepmind-torch": make_deepmind_torch,
    "deepmind-jax": make_deepmind_jax,
}
