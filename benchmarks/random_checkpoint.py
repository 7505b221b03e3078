"""Checkpoints with random weights, for tests and timings."""

import json
from pathlib import Path

import numpy as np

from griffin_eval.config import GriffinConfig
from griffin_eval.layout import ParamSpec, param_specs

VOCABULARY = 1024
SMALL = GriffinConfig(
    vocab_size=VOCABULARY,
    width=128,
    mlp_width=3 * 128,
    num_heads=4,
    num_layers=5,
    lru_width=128,
    gate_blocks=4,
    visible_keys=128,
)


def write_checkpoint(folder: Path) -> None:
    """Write a small RecurrentGemma in transformers' format with a byte-level BPE tokenizer."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    write_weights(SMALL, folder, **ids)
    (folder / "generation_config.json").write_text(json.dumps(ids))

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(special.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((topics[name] for name in sorted(topics)), trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", bpe.token_to_id("<bos>"))]
    )
    PreTrainedTokenizerFast(tokenizer_object=bpe, **special).save_pretrained(folder)


def write_weights(config: GriffinConfig, folder: Path, **ids: int) -> None:
    """Write a folder that transformers reads, with seeded weights that make every part of the model
    affect its logits; its config has these ids of tokens."""
    from safetensors.numpy import save_file

    from griffin_eval.converters.configs.huggingface import to_huggingface

    rng = np.random.default_rng(0)
    weights = {name: _draw(spec, rng) for name, spec in param_specs(config).items()}
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    raw = to_huggingface(config) | {"dtype": "float32", "pad_token_id": None} | ids
    (folder / "config.json").write_text(json.dumps(raw))


def _draw(spec: ParamSpec, rng: np.random.Generator) -> np.ndarray:
    noise = rng.standard_normal(spec.shape, np.float32)
    if spec.init == "lambda":
        return noise * np.float32(0.5) - 4
    if spec.name.endswith(("bias", "norm.weight")):
        return noise * np.float32(0.1)
    inputs = spec.shape[-2] if "gate_weight" in spec.name else spec.shape[-1]
    return noise * np.float32(inputs**-0.5)
