"""A PyTorch function on a CUDA device, launched as a CUDA graph."""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor


class Graph:
    """A function captured at its first call and replayed from then on, with one launch in place of
    hundreds. The same kernels on the same addresses give the same bits."""

    def __init__(self, device: torch.device):
        self._captured: tuple[torch.cuda.CUDAGraph, Tensor] | None = None
        self._stream = torch.cuda.Stream(device)

    def run(self, function: Callable[[], Tensor]) -> Tensor:
        """Return the function's result, which the next call overwrites.

        The function may change tensors in place but must keep their addresses, and must never wait
        for the device. It must have run before, so that its kernels are compiled, and is called
        once, during capture.
        """
        self._captured = self._captured or self._capture(function)
        graph, result = self._captured
        graph.replay()
        return result

    def _capture(self, function: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture a function; return the graph and the tensor of its result."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # torch.cuda.graph would first release all of PyTorch's free memory.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                result = function()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the capture may already be broken off
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph, result
