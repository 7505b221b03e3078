"""Functions of PyTorch on a CUDA device that are launched as CUDA graphs."""

import contextlib
from collections.abc import Callable, Hashable

import torch
from torch import Tensor


class Graphs:
    """What functions launch, captured the first time and replayed from then on: with one launch in
    the place of hundreds, and with the same kernels on the same addresses, so that the same bits
    come out.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device):
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def run(self, key: Hashable, function: Callable[[], Tensor]) -> Tensor:
        """What a function returns, which the next call with this key overwrites.

        Args:
            key: of the function; only the first one with a key is called, while it is captured.
            function: of tensors that stay where they are, which it may change in place. It must
                have run before, so that its kernels are compiled, and never wait for the device.
        """
        if key not in self._graphs:
            self._graphs[key] = self._captured(function)
        graph, result = self._graphs[key]
        graph.replay()
        return result

    def _captured(self, function: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """The graph of a function, which nothing runs, and where it leaves its result."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Not by torch.cuda.graph, which returns all of PyTorch's free memory before.
            graph.capture_begin(self._memory, capture_error_mode="thread_local")
            try:
                result = function()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # of a capture that was broken off
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph, result
