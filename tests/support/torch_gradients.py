"""Expected gradients from torch's autograd in float64."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch


def pulled_back(
    function: Callable, arrays: Sequence[Any], cotangents: Sequence[Any]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the values of a function of float64 tensors, and the gradients of its arguments."""
    inputs = [torch.tensor(np.asarray(v, np.float64), requires_grad=True) for v in arrays]
    values = function(*inputs)
    weights = [torch.tensor(np.asarray(v, np.float64)) for v in cotangents]
    gradients = torch.autograd.grad(values, inputs, weights, materialize_grads=True)
    return [v.detach().numpy() for v in values], [v.numpy() for v in gradients]
