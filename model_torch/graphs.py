"""Decoding on a CUDA device by CUDA graphs: a step is one launch instead of a thousand."""

import contextlib

import torch
from jaxtyping import Float, Int
from torch import Tensor

from griffin_eval.model_torch.decoding import DecodingState
from griffin_eval.model_torch.griffin import Griffin
from griffin_eval.model_torch.state import State, map_leaves

WARM_UP = 2  # steps before one is captured, in which kernels are compiled and chosen


class GraphedDecoding:
    """A `DecodingState` on a CUDA device, with the same methods, whose steps are CUDA graphs.

    Its tensors stay where they are, so that a step differs from others only in the offset of the
    windows. The first step at an offset is captured and later ones replay it, with the same kernels
    on the same addresses: the same bits come out.

    Args:
        model: that continues the rows; its weights may not be replaced.
        state: of the rows, before their first token; it is consumed.
    """

    def __init__(self, model: Griffin, state: DecodingState):
        self._model, self._state = model, state
        device = state.rows.pos.device
        self._tokens, self._active = torch.zeros(
            2, len(state.rows.pos), dtype=torch.int64, device=device
        )
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._steps = 0

    def insert(
        self, rows: Int[Tensor, " N"], pool: State, sources: Int[Tensor, " N"]
    ) -> "GraphedDecoding":
        """See `DecodingState.insert`."""
        self._state = self._state.insert(rows, pool, sources)
        return self

    def step(
        self, model: Griffin, tokens: Int[Tensor, " B"], active: Int[Tensor, " B"]
    ) -> tuple[Float[Tensor, "B W"], "GraphedDecoding"]:
        """See `DecodingState.step`."""
        assert model is self._model
        self._tokens.copy_(tokens)
        self._active.copy_(active)
        self._steps += 1
        offset = self._state.offset
        if self._steps <= WARM_UP:
            hidden, self._state = self._in_place()
            return hidden, self
        if offset not in self._graphs:
            self._graphs[offset] = self._captured()
        graph, hidden = self._graphs[offset]
        graph.replay()
        self._state = self._state._replace(offset=1 if self._state.is_full else offset + 1)
        return hidden.clone(), self

    def _captured(self) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """A step at the present offset, and where it leaves hidden vectors; nothing is run."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Not by torch.cuda.graph, which returns all of PyTorch's free memory before.
            graph.capture_begin(self._memory, capture_error_mode="thread_local")
            try:
                hidden, _ = self._in_place()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # of a capture that was broken off
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph, hidden

    def _in_place(self) -> tuple[Tensor, DecodingState]:
        """A step that leaves every tensor of the state where it was."""
        before = self._state.rows
        hidden, after = self._state.step(self._model, self._tokens, self._active)

        def write(old: Tensor, new: Tensor) -> Tensor:
            return old if new is old else old.copy_(new)

        return hidden, after._replace(rows=map_leaves(write, before, after.rows))
