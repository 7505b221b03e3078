"""Traces of the JAX implementations for `griffin_eval.crosscheck.logits`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.export import export, put_nested
from griffin_eval.converters.naming.deepmind import DEEPMIND_FLAX
from griffin_eval.crosscheck.logits import CHUNKS, Probe, Trace, deepmind_config
from griffin_eval.model_jax.hooks import record_blocks
from griffin_eval.model_jax.loading import load
from griffin_eval.model_jax.state import State
from griffin_eval.runners.jax_runner import choose_device


def twin(checkpoint: Checkpoint, probe: Probe) -> Trace:
    """Trace `griffin_eval.model_jax`, which reads the probe in chunks with a carried state."""
    device = choose_device("cpu")
    graph, params = nnx.split(load(checkpoint, jnp.float32, device))
    with jax.default_device(device), jax.default_matmul_precision("highest"):
        state = nnx.merge(graph, params).init_state(1, probe.tokens.shape[1])
        hidden, final = [], []
        for chunk in np.split(probe.tokens, CHUNKS, 1):
            seen, last, state = _step(graph, params, chunk, state)
            hidden.append([np.asarray(x) for x in seen])
            final.append(np.asarray(last))
        kept = [np.concatenate(parts, 1)[0, probe.keep] for parts in zip(*hidden, strict=True)]
        last = np.concatenate(final, 1)[0, probe.keep]
        return Trace(kept, np.asarray(_logits(graph, params, last)))


def deepmind(checkpoint: Checkpoint, probe: Probe) -> Trace:
    """Trace DeepMind's recurrentgemma in JAX."""
    from recurrentgemma.common import ScanType
    from recurrentgemma.jax.griffin import Griffin
    from recurrentgemma.jax.modules import Embedder, ResidualBlock

    device = choose_device("cpu")
    tree: dict[str, Any] = {}
    for name, array in export(checkpoint, DEEPMIND_FLAX):
        put_nested(tree, name, jax.device_put(np.array(array, np.float32), device))

    def captured(module: Any, method: str) -> bool:
        return (type(module), method) in ((Embedder, "encode"), (ResidualBlock, "__call__"))

    # The default scan over time is unrolled, and XLA compiles a deep model for minutes.
    config = deepmind_config(checkpoint.config)._replace(scan_type=ScanType.ASSOCIATIVE_NATIVE)
    length = probe.tokens.shape[1]

    @jax.jit
    def run(params: Any, tokens: Array) -> tuple[list[Any], Any]:
        (logits, _), variables = Griffin(config, gradient_checkpointing=False).apply(
            {"params": params},
            tokens,
            jnp.arange(length, dtype=jnp.int32)[None],
            return_cache=False,
            capture_intermediates=captured,
            mutable=["intermediates"],
        )
        seen = variables["intermediates"]
        outputs = [seen["embedder"]["encode"][0]]
        outputs += [seen[f"blocks.{i}"]["__call__"][0][0] for i in range(config.num_layers)]
        return [x[0, probe.keep] for x in outputs], logits[0, probe.keep]

    with (
        jax.default_device(device),
        jax.default_matmul_precision("highest"),
        # recurrentgemma mixes dtypes and ranks, which this process may forbid.
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        hidden, logits = run(tree, probe.tokens)
    return Trace([np.asarray(x) for x in hidden], np.asarray(logits))


# The config is part of the graph, so that all checkpoints of one config share a compilation.
@jax.jit(static_argnums=0)
def _step(graph: Any, params: Any, tokens: Array, state: State) -> tuple[list[Array], Array, State]:
    model = nnx.merge(graph, params)
    seen = record_blocks(model.model.layers)
    hidden, state = model.step(tokens, jnp.full(1, tokens.shape[1], jnp.int32), state)
    return seen, hidden, state


@jax.jit(static_argnums=0)
def _logits(graph: Any, params: Any, hidden: Array) -> Array:
    return nnx.merge(graph, params).logits(hidden)
