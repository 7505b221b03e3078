"""The public implementations behind one interface: full forward passes in numpy arrays.

Every oracle takes our config and canonical weights, and returns `logits`, and `gradients` by
canonical name. Only full forward passes are used: the libraries' caches lose the convolution's
state, leak over document starts, or refuse a chunk.
"""

import contextlib
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import torch
from parity_twins import to_numpy
from peers import recurrent_gemma
from recurrentgemma import common
from recurrentgemma import jax as deepmind_jax
from recurrentgemma import torch as deepmind_torch
from xla_options import QUICK_COMPILE

from griffin_eval.config import GriffinConfig


def hf_config(config: GriffinConfig) -> Any:
    """Return the config of transformers' RecurrentGemma."""
    return recurrent_gemma().config_class(
        vocab_size=config.vocab_size,
        hidden_size=config.width,
        lru_width=config.lru_width,
        intermediate_size=2 * config.mlp_width,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        num_hidden_layers=config.num_layers,
        attention_window_size=config.visible_keys,
        conv1d_width=config.conv_width,
        logits_soft_cap=config.logits_soft_cap,
        rms_norm_eps=config.norm_eps,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": config.rope_base,
            "partial_rotary_factor": config.rope_fraction,
        },
        block_types=[t.removeprefix("local_") for t in config.block_pattern],
        head_dim=config.head_size,
        hidden_activation=config.hidden_activation,
        attention_bias=config.attention_bias,
        tie_word_embeddings=config.tie_embeddings,
        pad_token_id=None,  # with an id, its embedding gets no gradient
        attn_implementation="eager",
    )


GENERATED = 24
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


class Transformers:
    """RecurrentGemmaForCausalLM, which has the same parameter names and window as our models."""

    name = "transformers"

    def __init__(self, config: GriffinConfig, weights: dict[str, np.ndarray]):
        self.model = recurrent_gemma()(hf_config(config)).eval()
        state = {name: torch.from_numpy(value) for name, value in weights.items()}
        state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
        self.model.load_state_dict(state)

    @torch.no_grad()
    def logits(self, tokens):
        return to_numpy(self._logits(tokens))

    def gradients(self, tokens, targets, resets):
        assert not resets.any(), "its convolution leaks over document starts"
        named = dict(self.model.named_parameters())
        loss = torch.nn.functional.cross_entropy(
            self._logits(tokens).flatten(0, 1), torch.from_numpy(targets).long().flatten()
        )
        gradients = torch.autograd.grad(loss, list(named.values()))
        return {name: to_numpy(g) for name, g in zip(named, gradients, strict=True)}

    def generation(self, tokens):
        """Return the likeliest token after each of the rows, one row at a time, GENERATED times."""
        rows = [
            self.model.generate(
                row[None],
                attention_mask=torch.ones_like(row[None]),  # without it, id 0 counts as padding
                max_new_tokens=GENERATED,
                **GREEDY,
            )[0, len(row) :]
            for row in torch.from_numpy(tokens).long()
        ]
        return to_numpy(torch.stack(rows))

    def _logits(self, tokens):
        return self.model(input_ids=torch.from_numpy(tokens).long(), use_cache=False).logits


# DeepMind's Flax names, with "." for "/", and a function from DeepMind's array to a view in
# canonical layout. Assigning to the view writes the array, so one table serves both directions.
_BLOCK = {
    "temporal_pre_norm.weight": ("temporal_pre_norm.scale", lambda w: w),
    "channel_pre_norm.weight": ("channel_pre_norm.scale", lambda w: w),
    "mlp_block.gate_proj.weight": ("mlp_block.ffw_up.w", lambda w: w[0].T),
    "mlp_block.gate_proj.bias": ("mlp_block.ffw_up.b", lambda b: b[0, 0, 0]),
    "mlp_block.up_proj.weight": ("mlp_block.ffw_up.w", lambda w: w[1].T),
    "mlp_block.up_proj.bias": ("mlp_block.ffw_up.b", lambda b: b[1, 0, 0]),
    "mlp_block.down_proj.weight": ("mlp_block.ffw_down.kernel", lambda w: w.T),
    "mlp_block.down_proj.bias": ("mlp_block.ffw_down.bias", lambda b: b),
    **{
        f"temporal_block.linear_{i}.{ours}": (f"recurrent_block.linear_{i}.{theirs}", view)
        for i in ("x", "y", "out")
        for ours, theirs, view in (
            ("weight", "kernel", lambda w: w.T),
            ("bias", "bias", lambda b: b),
        )
    },
    "temporal_block.conv_1d.weight": ("recurrent_block.conv_1d.w", lambda w: w.T[:, None]),
    "temporal_block.conv_1d.bias": ("recurrent_block.conv_1d.b", lambda b: b),
    "temporal_block.rg_lru.recurrent_param": ("recurrent_block.rg_lru.a_param", lambda a: a),
    **{
        f"temporal_block.rg_lru.{ours}_gate_{part}": (
            f"recurrent_block.rg_lru.{theirs}_gate.{part[0]}",
            lambda w: w,
        )
        for ours, theirs in (("input", "input"), ("recurrent", "a"))
        for part in ("weight", "bias")
    },
    **{
        f"temporal_block.{i}_proj.weight": (f"attention_block.proj_{i}.kernel", lambda w: w.T)
        for i in ("q", "k", "v")
    },
    "temporal_block.o_proj.weight": ("attention_block.proj_final.kernel", lambda w: w.T),
    "temporal_block.o_proj.bias": ("attention_block.proj_final.bias", lambda b: b),
}


def _deepmind(name: str):
    """Return DeepMind's name of a canonical parameter, and the function to the canonical view."""
    if name == "model.embed_tokens.weight":
        return "embedder.input_embedding", lambda w: w
    if name == "model.final_norm.weight":
        return "final_norm.scale", lambda w: w
    _, _, layer, rest = name.split(".", 3)
    theirs, view = _BLOCK[rest]
    return f"blocks.{layer}.{theirs}", view


def to_deepmind(weights, shapes):
    out = {name: np.full(shape, np.nan, np.float32) for name, shape in shapes.items()}
    for ours, value in weights.items():
        theirs, view = _deepmind(ours)
        view(out[theirs])[...] = value
    assert not any(np.isnan(value).any() for value in out.values())
    return out


def from_deepmind(weights, names):
    return {ours: view(weights[theirs]) for ours in names for theirs, view in [_deepmind(ours)]}


def deepmind_config(config: GriffinConfig) -> common.GriffinConfig:
    """Return the config for DeepMind's code, in which attention sees one key beyond the window."""
    kinds = {
        "recurrent": common.TemporalBlockType.RECURRENT,
        "local_attention": common.TemporalBlockType.ATTENTION,
    }
    return common.GriffinConfig(
        vocab_size=config.vocab_size,
        width=config.width,
        mlp_expanded_width=config.mlp_width,
        num_heads=config.num_heads,
        block_types=tuple(kinds[t] for t in config.block_types),
        embeddings_scale_by_sqrt_dim=config.embedding_scale,
        attention_window_size=config.visible_keys - 1,
        logits_soft_cap=config.logits_soft_cap,
        lru_width=config.lru_width,
    )


def deepmind_shapes(config: common.GriffinConfig) -> dict[str, tuple[int, ...]]:
    """Return the parameter shapes of DeepMind's Flax model by dotted name, without computing."""
    model = deepmind_jax.Griffin(config)
    with relaxed_jax():
        tokens = jnp.zeros((1, 2), jnp.int32)
        tree = jax.eval_shape(model.init, jax.random.key(0), tokens, tokens)["params"]
    flat = flax.traverse_util.flatten_dict(tree, sep=".")
    return {name: leaf.shape for name, leaf in flat.items()}


@contextlib.contextmanager
def relaxed_jax():
    """Allow DeepMind's code to mix dtypes and ranks, which this suite's settings forbid."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def positions(tokens, resets=None):
    """Return the position of every token in its document (DeepMind's ``segment_pos``)."""
    out = np.tile(np.arange(tokens.shape[1]), (len(tokens), 1))
    if resets is not None:
        out -= np.maximum.accumulate(np.where(resets, out, 0), 1)
    return out


class DeepMindJax:
    name = "deepmind-jax"

    def __init__(self, config: GriffinConfig, weights: dict[str, np.ndarray]):
        self.names = list(weights)
        theirs = deepmind_config(config)
        self.params = to_deepmind(weights, deepmind_shapes(theirs))
        self.paths = {name: _path(name) for name in self.params}
        model = deepmind_jax.Griffin(theirs, gradient_checkpointing=False)

        def logits(flat, tokens, segment_pos):
            tree = flax.traverse_util.unflatten_dict({self.paths[n]: v for n, v in flat.items()})
            return model.apply({"params": tree}, tokens, segment_pos, return_cache=False)[0]

        def loss(flat, tokens, segment_pos, targets):
            log_p = jax.nn.log_softmax(logits(flat, tokens, segment_pos))
            return -jnp.take_along_axis(log_p, targets[:, :, None], -1).mean()

        self._logits = jax.jit(logits, compiler_options=QUICK_COMPILE)
        self._gradients = jax.jit(jax.grad(loss), compiler_options=QUICK_COMPILE)

    def logits(self, tokens, resets=None):
        with relaxed_jax():
            return np.asarray(self._logits(self.params, tokens, positions(tokens, resets)))

    def gradients(self, tokens, targets, resets=None):
        with relaxed_jax():
            segment_pos = positions(tokens, resets)
            gradients = self._gradients(self.params, tokens, segment_pos, targets)
        return from_deepmind({n: np.asarray(g) for n, g in gradients.items()}, self.names)


def _path(name):
    """Return the Flax path of a dotted name; ``blocks.N`` is one key."""
    first, *rest = name.split(".")
    return (f"{first}.{rest[0]}", *rest[1:]) if first == "blocks" else (first, *rest)


class DeepMindTorch:
    """DeepMind's PyTorch model, whose linear kernels are called ``weight`` and are transposed."""

    name = "deepmind-torch"

    def __init__(self, config: GriffinConfig, weights: dict[str, np.ndarray]):
        self.names = list(weights)
        theirs = deepmind_config(config)
        self.model = deepmind_torch.Griffin(theirs, dtype=torch.float32)
        arrays = to_deepmind(weights, deepmind_shapes(theirs))
        self.model.load_state_dict(
            {
                name.replace(".kernel", ".weight"): torch.tensor(v.T if "kernel" in name else v)
                for name, v in arrays.items()
            }
        )

    @torch.no_grad()
    def logits(self, tokens, resets=None):
        return to_numpy(self._logits(tokens, resets))

    def gradients(self, tokens, targets, resets=None):
        named = dict(self.model.named_parameters())
        loss = torch.nn.functional.cross_entropy(
            self._logits(tokens, resets).flatten(0, 1), torch.from_numpy(targets).long().flatten()
        )
        gradients = torch.autograd.grad(loss, list(named.values()))
        flax_like = {}
        for name, gradient in zip(named, gradients, strict=True):
            linear = name.endswith(".weight")
            name = name.replace(".weight", ".kernel")
            flax_like[name] = to_numpy(gradient.T if linear else gradient)
        return from_deepmind(flax_like, self.names)

    def _logits(self, tokens, resets):
        tokens, at = torch.from_numpy(tokens).long(), torch.from_numpy(positions(tokens, resets))
        return self.model(tokens, at, return_cache=False)[0]


ORACLES = {oracle.name: oracle for oracle in (Transformers, DeepMindJax, DeepMindTorch)}
