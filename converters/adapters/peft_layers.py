"""Merges adapters of peft's methods other than LoRA, with peft's own layers.

Each linear map is merged by itself, in a model that has only this map at its place, so that memory
grows with the largest one.
"""

import threading
import warnings
from typing import Any

import numpy as np

from griffin_eval.converters.adapters.adapter import Adapter
from griffin_eval.converters.adapters.changes import PREFIX
from griffin_eval.errors import CheckpointError
from griffin_eval.messages import first_line, listed

_ONE_AT_A_TIME = threading.Lock()  # warnings and random numbers are the process's


def merged_parameter(
    adapter: Adapter, parameter: str, values: np.ndarray, shape: tuple[int, ...]
) -> np.ndarray:
    """Return a linear map's weight or bias with an adapter merged into it, float32.

    Args:
        parameter: Canonical name.
        values: Weight or bias of the base, float32.
        shape: Shape of the weight, [outputs, inputs].

    Raises:
        CheckpointError: peft or PyTorch is missing, or peft refuses the adapter.
    """
    try:
        import peft
        import torch
        from peft.utils import set_peft_model_state_dict
    except ImportError as error:
        raise CheckpointError(
            f"{adapter.folder}: peft, which merges an adapter of the method "
            f"{adapter.config.method}, cannot be imported ({first_line(error)}): pip install peft"
        ) from None
    module, _, kind = parameter.rpartition(".")
    model = parent = torch.nn.Module()
    *around, last = module.split(".")
    for name in around:
        parent.add_module(name, child := torch.nn.Module())
        parent = child
    state = {
        name.removeprefix(PREFIX): torch.from_numpy(adapter.array(name, "float32"))
        for name in adapter.container.tensors
        if name.startswith(f"{PREFIX}{module}.")
    }
    try:
        with _ONE_AT_A_TIME, warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")  # patterns for other maps match nothing
            parent.add_module(last, linear := torch.nn.Linear(shape[1], shape[0]))
            linear.requires_grad_(False).weight.zero_()
            getattr(linear, kind).copy_(torch.from_numpy(values))
            config = peft.PeftConfig.from_pretrained(str(adapter.folder))
            peft.inject_adapter_in_model(config, model)
            loaded = set_peft_model_state_dict(model, state)
            layer: Any = model.get_submodule(module)
            layer.merge()
    except Exception as error:  # peft has no error of its own for a wrong config or tensor
        raise CheckpointError(
            f"{adapter.folder}: peft cannot merge {module}: {first_line(error)}"
        ) from error
    missing = [name for name in loaded.missing_keys if ".base_layer." not in name]
    if wrong := missing + loaded.unexpected_keys:
        raise CheckpointError(
            f"{adapter.file}: tensors of {module} are missing or not known to peft: "
            f"{listed(wrong, repr)}"
        )
    return getattr(layer.get_base_layer(), kind).detach().numpy()
