"""Documents whose tokens are split over several devices."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from griffin_eval.config import GriffinConfig
from griffin_eval.errors import ArgumentError
from griffin_eval.model_jax.griffin import Griffin
from griffin_eval.model_jax.state import AttentionState, RecurrentState, State
from griffin_eval.sharding.split import TIME


def read_over_time(
    model: Griffin, tokens: Array, lengths: Array, state: State, mesh: Mesh
) -> tuple[Array, State]:
    """Run `Griffin.step` with the tokens of every row split over several devices.

    For each recurrent block, a device sends two vectors to all others: the state at the end of its
    part, and the factor by which its part decays an earlier state. For each convolution and
    attention block, it sends its last inputs, or keys and values, to the next device. The final
    state is replicated.

    Args:
        model: Model whose weights are replicated on every device.
        tokens: int [B, T] ids; each device reads T / devices adjacent ones.
        lengths: int [B], number of tokens to read of each row, 0 to T.
        state: State before the tokens.
        mesh: Mesh from `griffin_eval.sharding.mesh_jax.make_time_mesh`, set by `jax.set_mesh`.

    Returns:
        Hidden vectors [B, T, W], split like the tokens, and the state after the tokens.
    """
    devices, total = mesh.shape[TIME], tokens.shape[1]
    check_split(model.config, total, devices)
    each = total // devices
    graph, params = nnx.split(model)

    def read_part(params: nnx.State, tokens: Array, lengths: Array, state: State):
        here = jax.lax.axis_index(TIME).astype(jnp.int32)
        mine = jnp.clip(lengths - here * each, 0, each)
        hidden, after = nnx.merge(graph, params).step(
            tokens, mine, state._replace(pos=state.pos + here * each)
        )
        owner = jnp.maximum((lengths + each - 1) // each - 1, 0)  # device with the last read token

        def of_owner(leaf: Array) -> Array:
            return jnp.where((owner == here)[:, None, None], leaf, jnp.zeros_like(leaf))

        windows = [
            (layer.conv,) if isinstance(layer, RecurrentState) else tuple(layer)
            for layer in after.layers
        ]
        windows = jax.lax.psum(jax.tree.map(of_owner, windows), TIME)
        layers = tuple(
            RecurrentState(layer.h, *window)
            if isinstance(layer, RecurrentState)
            else AttentionState(*window)
            for layer, window in zip(after.layers, windows, strict=True)
        )
        return hidden, State(state.pos + lengths, state.attention_start, layers)

    part, whole = PartitionSpec(None, TIME), PartitionSpec()
    return jax.shard_map(
        read_part,
        in_specs=(whole, part, whole, whole),
        out_specs=(part, whole),
        check_vma=False,
    )(params, tokens, lengths.astype(jnp.int32), state)


def check_split(config: GriffinConfig, tokens: int, devices: int) -> None:
    """Raise ArgumentError unless ``devices`` can split rows of ``tokens`` tokens."""
    if "global_attention" in config.block_types:
        raise ArgumentError(
            "a document cannot be split along time in a model with global attention, each token of "
            "which sees all before it"
        )
    if config.complex_gates:
        raise ArgumentError("a document cannot be split along time in a model with complex gates")
    needed = max(
        config.visible_keys - 1 if "local_attention" in config.block_types else 0,
        config.conv_width - 1 if "recurrent" in config.block_types else 0,
        1,
    )
    if tokens % devices or tokens // devices < needed:
        raise ArgumentError(
            f"a document of {tokens} tokens cannot be split over {devices} devices: expected parts "
            f"of one length of at least {needed} tokens, which a block remembers"
        )
