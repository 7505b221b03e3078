"""Adapters of peft for a tiny model, with which tests compare our merging."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parity import BASE, weights
from peers import recurrent_gemma
from safetensors.torch import save_file

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.configs.huggingface import to_huggingface

LINEAR = ["linear_x", "linear_y", "linear_out", "q_proj", "k_proj", "v_proj", "o_proj"]
LINEAR += ["gate_proj", "up_proj", "down_proj"]


def write_base(
    folder: Path, config: GriffinConfig = BASE, dtype: torch.dtype = torch.float32
) -> None:
    """Write a folder that transformers reads."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: torch.from_numpy(value).to(dtype) for name, value in weights(config).items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    raw = to_huggingface(config) | {
        "dtype": str(dtype).removeprefix("torch."),
        "pad_token_id": None,
    }
    (folder / "config.json").write_text(json.dumps(raw))


def load_base(folder: Path, dtype: torch.dtype | str = "auto", vocab: int | None = None) -> Any:
    model_class = recurrent_gemma()
    model = model_class.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    if vocab is not None:
        torch.manual_seed(vocab)  # seed of the added rows
        model.resize_token_embeddings(vocab)
    return model


def write_adapter(
    folder: Path,
    base: Path,
    seed: int = 0,
    vocab: int | None = None,
    method: str = "Lora",
    **config: Any,
) -> None:
    """Save an adapter with random weights with peft.

    Args:
        folder: Folder to write.
        base: Folder of the base model.
        seed: Seed of the random weights.
        vocab: Vocabulary size to which the base is resized first, or None.
        method: Name of a method of peft, as in the names of its configs.
        config: Arguments of peft's config of that method.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = {"r": 3, "lora_alpha": 5} if method == "Lora" else {}
        given |= {"task_type": "CAUSAL_LM"} | config
        kind = getattr(peft, f"{method}Config")
        model = peft.get_peft_model(load_base(base, vocab=vocab), kind(**given))
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if not parameter.requires_grad:
                    continue
                noise = torch.randn(parameter.shape, generator=draw)
                if "lora_embedding" in name or "lora_A" in name or "lora_B" in name:
                    parameter.copy_(0.3 * noise)
                else:  # biases, magnitudes, rows and whole modules change little
                    parameter.mul_(1 + 0.2 * noise).add_(0.02 * noise)
        model.save_pretrained(folder)


def load_adapted(
    base: Path, adapter: Path, dtype: torch.dtype | str = "auto", vocab: int | None = None
) -> Any:
    """Load the base with the unmerged adapter, after resizing it as lm-eval's hf model does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(load_base(base, dtype, vocab), adapter).eval()


@torch.no_grad()
def logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    return model(input_ids=torch.from_numpy(tokens).long(), use_cache=False).logits.numpy()
