"""Reading with the PyTorch model while something is withheld from single layers."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from griffin_eval.analysis.gates_torch import twin_of
from griffin_eval.kernels.attention.plain_torch import QUERY_BLOCK, QueryBlock, attend
from griffin_eval.model_torch.blocks import RecurrentBlock


class Withheld(NamedTuple):
    """Losses of R rows of a step, in a model of N layers, as arrays or tensors.

    Attributes:
        h, conv, keys: bool [R, N], layers whose RG-LRU keeps its state, whose convolution gets no
            input, and whose attention sees no key.
        first, end: int32 [R], half-open range of withheld tokens.
        after: int32 [R], number of the first query for which keys are hidden.
        ages: int32 [R, 2], half-open range of ages of hidden keys.
    """

    h: Any
    conv: Any
    keys: Any
    first: Any
    end: Any
    after: Any
    ages: Any


# Function of int32 [R, T] tokens, int32 [R] lengths and the losses that returns hidden [R T, W].
Reading = Callable[[np.ndarray, np.ndarray, Withheld], Tensor]
Current = dict[str, Withheld]  # losses of the current step, under "now"


def reader(runner: Any) -> Reading:
    """Return a function that reads documents from their beginning by a `TorchRunner`'s model."""
    model = twin_of(runner.model)
    device = model.model.embed_tokens.weight.device
    current: Current = {}
    for index, block in enumerate(model.model.layers):
        temporal: Any = block.temporal_block
        if isinstance(block.temporal_block, RecurrentBlock):
            temporal.conv_1d = _Convolution(temporal.conv_1d, index, current)
            temporal.rg_lru = _Recurrence(temporal.rg_lru, index, current)
        else:
            temporal.register_forward_pre_hook(functools.partial(_hide, index, current))

    @torch.inference_mode()
    def read(tokens: np.ndarray, lengths: np.ndarray, withheld: Withheld) -> Tensor:
        put = [torch.from_numpy(array).to(device) for array in (tokens, lengths, *withheld)]
        current["now"] = Withheld(*put[2:])
        state = model.init_state(*tokens.shape)
        hidden, _ = model.step(put[0].long(), put[1].long(), state)
        return hidden.flatten(0, 1)

    return read


class _Part(nn.Module):
    """A part of a layer that may lose its input."""

    def __init__(self, module: nn.Module, layer: int, current: Current):
        super().__init__()
        self.module, self.layer, self.current = module, layer, current

    def span(self, length: int) -> tuple[Tensor, Tensor]:
        """Return the tokens of the fact, and the later ones, bool [R, T] each."""
        now = self.current["now"]
        t = torch.arange(length, device=now.first.device)
        return (t >= now.first[:, None]) & (t < now.end[:, None]), t >= now.end[:, None]


class _Convolution(_Part):
    def forward(self, x: Tensor, context: Any, past: Tensor) -> tuple[Tensor, Tensor]:
        y, after = self.module(x, context, past)
        fact, later = self.span(x.shape[1])
        without, _ = self.module(x.masked_fill(fact[..., None], 0.0), context, past)
        lost = self.current["now"].conv[:, self.layer, None] & later
        return torch.where(lost[..., None], without, y), after


class _Recurrence(_Part):
    def forward(self, x: Tensor, context: Any, h0: Tensor) -> tuple[Tensor, Tensor]:
        y, h = self.module(x, context, h0)
        now, length = self.current["now"], x.shape[1]
        # Skip the fact's tokens, so that the tokens before and after them join.
        size = (now.end - now.first)[:, None]
        t = torch.arange(length, device=x.device)[None]
        kept = torch.where(t < now.first[:, None], t, (t + size).clamp(max=length - 1)).long()
        layout = context.layout._replace(
            lengths=(context.layout.lengths - size[:, 0]).clamp(min=1), full=False
        )
        shorter = context._replace(positions=context.positions.gather(1, kept), layout=layout)
        index = kept[..., None].expand_as(x)
        without, _ = self.module(x.gather(1, index), shorter, h0)
        place = torch.where(t < now.end[:, None], t.minimum(now.first[:, None] - 1), t - size)
        empty = place < 0  # no token precedes the fact
        index = place.clamp(min=0).long()[..., None].expand_as(without)
        without = without.gather(1, index).masked_fill(empty[..., None], 0.0)
        return torch.where(now.h[:, self.layer, None, None], without, y), h


def _hide(layer: int, current: Current, _: Any, inputs: Any) -> Any:
    """Return the arguments of an attention block in which some queries do not see some keys."""
    x, context, state = inputs
    layout: Any = _HidingLayout(context.layout, layer, current["now"])
    return x, context._replace(layout=layout), state


class _HidingLayout:
    """A layout of padded rows that start a document, with keys hidden from some queries."""

    def __init__(self, layout: Any, layer: int, now: Withheld):
        self.layout, self.layer, self.now = layout, layer, now

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Any, state: Any) -> Any:
        y, after = self.layout.attend(q, k, v, context, state)
        now, mixed = self.now, []
        s = torch.arange(q.shape[1], device=q.device)[None, None]
        ofs = now.first[:, None, None], now.end[:, None, None], now.after[:, None, None]
        low, high = now.ages[:, None, None, 0], now.ages[:, None, None, 1]
        most = context.max_age.clamp(max=state.k.shape[1])
        for begin in range(0, q.shape[1], QUERY_BLOCK):
            t = s[0, 0, begin : begin + QUERY_BLOCK][None, :, None]
            age = t - s
            hidden = (s >= ofs[0]) & (s < ofs[1]) & (t >= ofs[2]) & (age >= low) & (age < high)
            seen = (age >= 0) & (age <= most[:, begin : begin + QUERY_BLOCK, None]) & ~hidden
            mixed.append(attend(QueryBlock(q[:, begin : begin + QUERY_BLOCK], k, v, seen)))
        without = torch.cat(mixed, 1).flatten(2)
        return torch.where(now.keys[:, self.layer, None, None], without, y), after
