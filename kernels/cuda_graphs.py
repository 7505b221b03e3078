"""A function of PyTorch on a CUDA device that is launched as a CUDA graph."""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor


class Graph:
    """What a function launches, captured the first time and replayed from then on: with one launch
    in the place of hundreds, and with the same kernels on the same addresses, so that the same bits
    come out.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device):
        self._captured: tuple[torch.cuda.CUDAGraph, Tensor] | None = None
        self._stream = torch.cuda.Stream(device)

    def run(self, function: Callable[[], Tensor]) -> Tensor:
        """What the function returns, which the next call overwrites.

        Args:
            function: of tensors that stay where they are, which it may change in place. It must
                have run before, so that its kernels are compiled, and never wait for the device.
                It is called once, while it is captured.
        """
        self._captured = self._captured or self._capture(function)
        graph, result = self._captured
        graph.replay()
        return result

    def _capture(self, function: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """The graph of a function, which nothing runs, and where it leaves its result."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Not by torch.cuda.graph, which returns all of PyTorch's free memory before.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                result = function()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # of a capture that was broken off
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph, result
