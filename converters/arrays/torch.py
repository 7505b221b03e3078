"""numpy arrays as tensors of PyTorch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch


def torch_tensor(array: "np.ndarray") -> "torch.Tensor":
    """A tensor over the memory of an array, or over a copy if that is read-only or has strides."""
    import numpy as np
    import torch

    array = np.ascontiguousarray(array)
    if not array.flags.writeable:
        array = array.copy()
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)
