"""Matrices that stay quantised in memory; PyTorch dequantises each for its own product."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

ONE_127TH = 7.874015718698502e-3  # bitsandbytes' factor of int8 and its scale


@dataclasses.dataclass(frozen=True)
class QuantisedMatrix:
    """A matrix [O, I] whose rows are groups of elements with a common scale.

    PyTorch's operations accept it as a tensor: `F.embedding` dequantises the rows that it returns,
    and any other operation the whole matrix.

    Attributes:
        bits, elements, scales, shifts, table: Fields of
            `griffin_eval.converters.quantised.PackedRows`.
        rounded_to: Dtype to which the checkpoint's dequantised values are rounded.
        dtype: Dtype to compute in.
    """

    bits: int
    elements: Tensor
    scales: Tensor
    shifts: Tensor | None
    table: Tensor | None
    rounded_to: torch.dtype
    dtype: torch.dtype
    requires_grad = False

    @property
    def shape(self) -> torch.Size:
        rows, stored = self.elements.shape
        return torch.Size((rows, stored * 8 // self.bits))

    @property
    def device(self) -> torch.device:
        return self.elements.device

    def __len__(self) -> int:
        return len(self.elements)

    def rows(self, chosen: slice | Int[Tensor, " N"]) -> "QuantisedMatrix":
        """Select rows, which stay quantised."""
        shifts = None if self.shifts is None else self.shifts[chosen]
        return dataclasses.replace(
            self, elements=self.elements[chosen], scales=self.scales[chosen], shifts=shifts
        )

    def dense(self) -> Float[Tensor, "O I"]:
        """Dequantise all rows."""
        scales = self.scales.float()[..., None]
        values = self._numbers().reshape(*self.scales.shape, -1) * scales
        if self.shifts is not None:
            values = values.to(self.rounded_to).float() + self.shifts.float()[..., None]
        elif self.table is None:
            values = values * ONE_127TH
        return values.to(self.rounded_to).to(self.dtype).view(self.shape)

    def _numbers(self) -> Float[Tensor, "..."]:
        """Return the values of stored numbers, in float32 and in the order of the elements."""
        if self.table is not None:
            return F.embedding(self.elements.int(), self.table)
        if self.bits == 8:
            return self.elements.float()
        # Eight numbers of b bits take b bytes.
        words = F.pad(self.elements.view(-1, self.bits).int(), (0, 1))
        places = [divmod(i * self.bits, 8) for i in range(8)]
        numbers = [(words[:, at] | words[:, at + 1] << 8) >> shift for at, shift in places]
        return (torch.stack(numbers, -1) & (1 << self.bits) - 1).float()

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        if function is F.embedding:
            tokens, weight = arguments
            return weight.rows(tokens.flatten()).dense().view(*tokens.shape, -1)
        dense = [value.dense() if isinstance(value, cls) else value for value in arguments]
        return function(*dense, **(keywords or {}))
