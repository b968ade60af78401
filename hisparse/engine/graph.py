"""Capture of a step of fixed shape in a CUDA graph, and its replay.

Owns the graphs of one replica and the memory that they share: one of them runs at a time, and what
it leaves is read before the next. What a capture runs in Python does not run again in a replay, so
it may only queue kernels: a step's command is queued outside, by whoever replays.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from hisparse.errors import DeviceError


class GraphCapture:
    """Called with the work of a step, on the stream that it is to run on; returns its replay."""

    def __init__(self) -> None:
        self.replays = 0
        self.nodes: list[int] = []
        """of each graph, in the order of capture"""
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def __call__(self, compute: Callable[[], None]) -> Callable[[], None]:
        # other threads pin host memory meanwhile, which a capture in global mode would forbid
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        pool = self._graphs[0].pool() if self._graphs else None
        stream = torch.cuda.current_stream()
        with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            compute()
        graph.instantiate()
        self._graphs.append(graph)
        self.nodes.append(count_nodes(graph))

        def replay() -> None:
            self.replays += 1
            graph.replay()

        return replay


def count_nodes(graph: torch.cuda.CUDAGraph) -> int:
    """Nodes of a captured graph. Raises DeviceError with the driver's code."""
    count = ctypes.c_size_t()
    made = ctypes.c_void_p(graph.raw_cuda_graph())
    code = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(made, None, ctypes.byref(count))
    if code:
        raise DeviceError(f"cuGraphGetNodes failed with code {code}")
    return count.value
