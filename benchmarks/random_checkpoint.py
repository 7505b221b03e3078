"""Checkpoints with random weights, for tests and timings."""

import json
from pathlib import Path

import numpy as np

from griffin_eval.config import GriffinConfig
from griffin_eval.layout import ParamSpec, param_specs

VOCABULARY = 1024


def write_checkpoint(folder: Path) -> None:
    """Write a RecurrentGemma of transformers' class and a byte-level BPE tokenizer, both seeded."""
    from pydoc_data.topics import topics

    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import (
        PreTrainedTokenizerFast,
        RecurrentGemmaConfig,
        RecurrentGemmaForCausalLM,
    )
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    config = RecurrentGemmaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=6 * 128,
        num_attention_heads=4,
        num_key_value_heads=1,
        num_hidden_layers=5,
        attention_window_size=128,
    )
    model = RecurrentGemmaForCausalLM(config)
    with torch.no_grad():  # initialisation leaves most branches near zero, which hides errors
        for name, p in model.named_parameters():
            scale = 0.1 if "norm" in name or name.endswith("bias") else p.shape[-1] ** -0.5
            if name.endswith("recurrent_param"):
                p.normal_(-4.0, 0.5)
            else:
                p.normal_(0.0, scale)
    model.save_pretrained(folder)

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


def write_weights(config: GriffinConfig, folder: Path) -> None:
    """Write a folder that transformers reads, with seeded weights that make every part matter."""
    from safetensors.numpy import save_file

    from griffin_eval.converters.configs.huggingface import to_huggingface

    rng = np.random.default_rng(0)
    weights = {name: _draw(spec, rng) for name, spec in param_specs(config).items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    raw = to_huggingface(config) | {"dtype": "float32", "pad_token_id": None}
    (folder / "config.json").write_text(json.dumps(raw))


def _draw(spec: ParamSpec, rng: np.random.Generator) -> np.ndarray:
    noise = rng.standard_normal(spec.shape, np.float32)
    if spec.init == "lambda":
        return noise * np.float32(0.5) - 4
    if spec.name.endswith(("bias", "norm.weight")):
        return noise * np.float32(0.1)
    inputs = spec.shape[-2] if "gate_weight" in spec.name else spec.shape[-1]
    return noise * np.float32(inputs**-0.5)
