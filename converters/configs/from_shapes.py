"""The fields of a config that the shapes of a checkpoint state, and those they cannot state."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from griffin_eval.config import MAX_LAYERS, PRESETS, GriffinConfig
from griffin_eval.converters.naming.ops import Shape
from griffin_eval.errors import CheckpointError

# Fields that shapes do not show. Fields with a value have it in every published model.
UNSEEN: dict[str, Any] = {
    "visible_keys": None,
    "embedding_scale": None,
    "logits_soft_cap": None,
    "norm_eps": 1e-6,
    "rope_base": 10_000.0,
    "rope_fraction": 0.5,
    "lru_constant": 8.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_kv_heads": 1,  # shapes show only the product with the head's size
}


def fields_from_shapes(shapes: Mapping[str, Shape], source: str) -> dict[str, Any]:
    """Return the fields of `GriffinConfig` that follow from shapes by canonical name;
    CheckpointError if the embedding or all layers are missing, or there are too many."""

    def of(name: str, rank: int) -> Shape | None:
        shape = shapes.get(name)
        return shape if shape is not None and len(shape) == rank else None

    embedding = of("model.embed_tokens.weight", 2)
    indices = {int(m[1]) for n in shapes if (m := re.match(r"model\.layers\.([0-9]{1,6})\.", n))}
    if embedding is None or not indices:
        raise CheckpointError(
            f"{source}: no config, and none can be inferred, since the "
            f"{'embedding' if embedding is None else 'layers'} of a Griffin model cannot be found "
            "among its tensors"
        )
    fields: dict[str, Any] = {"vocab_size": embedding[0], "width": embedding[1]}
    fields["num_layers"] = max(indices) + 1
    if fields["num_layers"] > MAX_LAYERS:
        raise CheckpointError(
            f"{source}: expected at most {MAX_LAYERS} layers, found {fields['num_layers']}: number "
            "the layers from 0 without gaps"
        )
    blocks: list[str] = []
    for i in range(fields["num_layers"]):
        layer = f"model.layers.{i}."
        block = layer + "temporal_block."
        attends = of(block + "k_proj.weight", 2)
        if attends:
            queries = (of(block + "q_proj.weight", 2) or embedding[1:])[0]
            fields["num_heads"] = queries // max(attends[0], 1)
            if queries != embedding[1]:
                fields["head_dim"] = attends[0]
            biased = any(block + f"{i}_proj.bias" in shapes for i in "qkv")
            fields["attention_bias"] = biased or fields.get("attention_bias", False)
        if linear := of(block + "linear_x.weight", 2):
            fields["lru_width"] = linear[0]
        if gate := of(block + "rg_lru.input_gate_weight", 3):
            fields["gate_blocks"] = gate[0]
            imaginary = block + "rg_lru.imaginary_param" in shapes
            fields["complex_gates"] = imaginary or fields.get("complex_gates", False)
        if conv := of(block + "conv_1d.weight", 3):
            fields["conv_width"] = conv[2]
        if up := of(layer + "mlp_block.up_proj.weight", 2):
            fields["mlp_width"] = up[0]
        blocks.append("local_attention" if attends else "recurrent")
    fields["block_pattern"] = _shortest_pattern(blocks)
    return fields


def complete_fields(
    inferred: Mapping[str, Any], user_fields: Mapping[str, Any], preset: str | None, source: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of a config, from shapes and the user's additions, and each field's source.
    Some of the fields in ``UNSEEN`` may be lacking.

    Args:
        inferred: Fields from `fields_from_shapes`.
        user_fields: Fields that the user sets.
        preset: Name of a preset that supplies the fields that shapes do not show.

    Raises:
        CheckpointError: the shapes are not those of the preset, or not those of any model.
    """
    if preset is not None and (differing := _differing(inferred, PRESETS[preset])):
        raise CheckpointError(f"{source} is not preset {preset}: {'; '.join(differing)}")
    if "mlp_width" not in inferred:
        raise CheckpointError(f"{source}: no layer has an up_proj, which says how wide MLPs are")
    fields = {name: value for name, value in UNSEEN.items() if value is not None}
    origins = dict.fromkeys(fields, "default")

    def add(values: Mapping[str, Any], origin: str) -> None:
        fields.update(values)
        origins.update(dict.fromkeys(values, origin))

    if preset is not None:
        add(dataclasses.asdict(PRESETS[preset]), f"preset {preset}")
        # No shape says which keys attention sees.
        inferred = {name: value for name, value in inferred.items() if name != "block_pattern"}
    add(inferred, "shapes")
    add(user_fields, "given")
    heads_of_keys = fields["num_kv_heads"]
    if "num_heads" in inferred and isinstance(heads_of_keys, int):  # shapes alone suppose one
        for name, value in (
            ("num_heads", inferred["num_heads"] * heads_of_keys),
            ("head_dim", inferred.get("head_dim", 0) // max(heads_of_keys, 1)),
        ):
            if name in inferred and name not in user_fields:
                fields[name] = value
    # Fields that no block of this model uses.
    heads = fields.get("num_heads", fields.get("gate_blocks", 1))
    unused = {"num_heads": heads, "gate_blocks": heads, "complex_gates": False}
    unused |= {"attention_bias": False, "head_dim": None, "absent_biases": ()}
    unused |= {"lru_width": fields["width"], "conv_width": 4, "tie_embeddings": True}
    if "num_heads" not in fields:
        unused["visible_keys"] = 1
    add({name: value for name, value in unused.items() if name not in fields}, "default")
    return fields, origins


def ask_for(unknown: Iterable[str], inferred: Mapping[str, Any], source: str) -> str:
    """Return the sentence that asks the user for unknown fields."""
    fit = [name for name, config in PRESETS.items() if not _differing(inferred, config)]
    hint = f"; its shapes are those of preset {' or '.join(fit)}" if fit else ""
    return (
        f"{source} has no config, and its tensors do not say {', '.join(unknown)}: give a preset "
        f"or these values{hint}"
    )


def _differing(fields: Mapping[str, Any], preset: GriffinConfig) -> list[str]:
    differing = [
        f"{name} is {value}, not {getattr(preset, name)}"
        for name, value in fields.items()
        if name not in ("vocab_size", "block_pattern") and value != getattr(preset, name)
    ]
    pattern, layers = fields["block_pattern"], range(fields["num_layers"])
    recurrent = [pattern[i % len(pattern)] == "recurrent" for i in layers]
    if recurrent != [block == "recurrent" for block in preset.block_types]:
        differing.append("its blocks are of other types")
    return differing


def _shortest_pattern(blocks: list[str]) -> tuple[str, ...]:
    for length in range(1, len(blocks) + 1):
        if all(blocks[i] == blocks[i % length] for i in range(len(blocks))):
            return tuple(blocks[:length])
    return tuple(blocks)
