"""Traces of the PyTorch implementations for `griffin_eval.crosscheck.logits`."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.configs.huggingface import read_config, to_huggingface
from griffin_eval.converters.export import export
from griffin_eval.converters.naming.deepmind import DEEPMIND_TORCH
from griffin_eval.crosscheck.logits import CHUNKS, Probe, Trace, deepmind_config
from griffin_eval.model_torch.hooks import record_blocks
from griffin_eval.model_torch.loading import load


@torch.inference_mode()
def twin(checkpoint: Checkpoint, probe: Probe) -> Trace:
    """Trace `griffin_eval.model_torch`, which reads the probe in chunks with a carried state."""
    model = load(checkpoint, torch.float32, torch.device("cpu")).eval()
    seen = record_blocks(model.model.layers)
    tokens = torch.from_numpy(probe.tokens).long()
    state = model.init_state(1, tokens.shape[1])
    hidden, final = [], []
    for chunk in tokens.chunk(CHUNKS, 1):
        last, state = model.step(chunk, torch.tensor([chunk.shape[1]]), state)
        hidden.append(seen[:])
        final.append(last)
        seen.clear()
    keep = torch.from_numpy(probe.keep)
    kept = [torch.cat(parts, 1)[0, keep].numpy() for parts in zip(*hidden, strict=True)]
    return Trace(kept, model.logits(torch.cat(final, 1)[0, keep]).numpy())


@torch.inference_mode()
def transformers(checkpoint: Checkpoint, probe: Probe) -> Trace:
    """Trace transformers' RecurrentGemma, loaded from hf files directly if nothing changes them."""
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    # Adapters, dequantisation and overrides change what the files say.
    changed = checkpoint.adapters or checkpoint.codecs
    as_it_lies = checkpoint.format.name == "hf" and not changed
    if as_it_lies and read_config(checkpoint.folder)[0] == checkpoint.config:
        model = RecurrentGemmaForCausalLM.from_pretrained(checkpoint.folder, **options)
    else:
        weights = {name: _float32(checkpoint.numpy(name)) for name in checkpoint.dtypes}
        config = RecurrentGemmaConfig(**to_huggingface(checkpoint.config))
        model = RecurrentGemmaForCausalLM.from_pretrained(
            None, config=config, state_dict=weights, **options
        )
    seen = record_blocks(model.eval().model.layers)
    tokens, keep = torch.from_numpy(probe.tokens).long(), torch.from_numpy(probe.keep)
    logits = model(input_ids=tokens, use_cache=False, logits_to_keep=keep).logits
    return Trace([x[0, keep].numpy() for x in seen], logits[0].numpy())


@torch.inference_mode()
def deepmind(checkpoint: Checkpoint, probe: Probe) -> Trace:
    """Trace DeepMind's recurrentgemma in PyTorch."""

    from recurrentgemma.torch.griffin import Griffin

    config = deepmind_config(checkpoint.config)
    model = Griffin(config, gradient_checkpointing=False, dtype=torch.float32)
    weights = {name: _float32(array) for name, array in export(checkpoint, DEEPMIND_TORCH)}
    model.load_state_dict(weights, assign=True)
    seen = record_blocks(model.eval().blocks)
    tokens, keep = torch.from_numpy(probe.tokens).long(), torch.from_numpy(probe.keep)
    logits, _ = model(tokens, torch.arange(tokens.shape[1])[None], return_cache=False)
    return Trace([x[0, keep].numpy() for x in seen], logits[0, keep].numpy())


def _float32(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(array, np.float32))
