"""A decode step of fixed shape on a GPU, captured once and replayed, and what its graph is made
of.
"""

from __future__ import annotations

import ctypes

import numpy as np
from backends import plain
from device_rig import PAGE, PAGES, REQUESTS, Rig, contents, make_config, place_pages
from resolver_reference import ReferenceResolver

from hisparse.device.rows import StepRows

TOP_K = 4
GROUPS = ((0, 2, 3), (1,))
KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL
STATES = {  # whether each page of a request is on the GPU
    "all resident": [True] * PAGES,
    "mixed": [True, False, False, True],
    "all on the host": [False] * (PAGES - 1) + [True],
}


class Decode:
    """A step of fixed shape, captured once: writes each request's row, resolves, copies out.
    With ``verb="resolve"`` it says where rows are."""

    def __init__(self, rig, rows=REQUESTS, span=1, verb="gather"):
        import torch

        self.rig, self.torch, self.verb, n = rig, torch, verb, rows * span
        self.rows = torch.full((n,), -1, dtype=torch.int32, device="cuda")
        self.positions = torch.zeros(n, dtype=torch.int64, device="cuda")
        self.top_k = torch.full((n, TOP_K), -1, dtype=torch.int32, device="cuda")
        row_bytes = rig.config.layout.row_bytes
        self.data = {
            layer: torch.zeros((n, row_bytes), dtype=torch.uint8, device="cuda")
            for layer in rig.layers
        }
        self.step_rows = StepRows(self.rows, self.positions, span=span)
        self.out = {}
        self.graph = None

    def queue(self):
        handles = self.rig.worker.handles
        for group in self.rig.config.layout.index_groups:
            for layer in group:
                handles[layer].write(self.step_rows, self.data[layer])
                chosen = self.top_k if layer == group[0] else None
                take = getattr(handles[layer], self.verb)
                self.out[layer] = take(self.step_rows, chosen).result()

    def capture(self):
        """Between steps; returns the nodes of the graph and the launches that made it."""
        torch, device = self.torch, self.rig.device
        self.rows.fill_(-1)
        torch.cuda.synchronize()
        with self.rig.worker.warm_up(1), device.on_compute():
            self.queue()  # loads kernels, makes the calls whose addresses the graph keeps
        with self.rig.worker.warm_up(1), device.on_compute():
            before = device.statistics()["launches"]
            self.graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.graph(
                self.graph,
                stream=torch.cuda.current_stream(),
                capture_error_mode="thread_local",
            ):
                self.queue()
            self.graph.instantiate()
        return nodes_of(self.graph), device.statistics()["launches"] - before

    def load(self, rows, positions, top_k):
        """Fill the static buffers; the step's own row of a request is its position's content."""
        torch = self.torch
        with self.rig.device.on_compute():
            self.rows.copy_(torch.tensor(rows, dtype=torch.int32))
            self.positions.copy_(torch.tensor(positions))
            self.top_k.copy_(torch.tensor(top_k, dtype=torch.int32))
            for layer, data in self.data.items():
                mine = [
                    contents(max(r, 0), layer, [p])[0] for r, p in zip(rows, positions, strict=True)
                ]
                data.copy_(torch.tensor(np.stack(mine)))

    def run(self, rows, positions, top_k, **fields):
        """One step, replayed; bytes, or places, by layer."""
        self.rig.begin(**fields)
        self.load(rows, positions, top_k)
        with self.rig.device.on_compute():
            self.graph.replay()
        self.rig.end()
        return {layer: plain(out) for layer, out in self.out.items()}


def nodes_of(graph):
    """How many nodes a captured graph has, by the driver; all of them kernels."""
    driver = ctypes.CDLL("libcuda.so.1")
    handle, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t(0)
    assert driver.cuGraphGetNodes(handle, None, ctypes.byref(count)) == 0
    nodes = (ctypes.c_void_p * count.value)()
    assert driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)) == 0
    kinds = []
    for node in nodes:
        kind = ctypes.c_int(-1)
        assert driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        kinds.append(kind.value)
    return kinds


def fixed_rig(**kwargs):
    return Rig(make_config(12, TOP_K, REQUESTS, PAGES, groups=GROUPS, **kwargs))


def placed(rig, on_gpu):
    """Updates that place all requests' pages so; the last page, which is written, on the GPU."""
    reference = ReferenceResolver(PAGE, rig.config.policy.hot_rows, TOP_K)
    return sum((place_pages(rig, reference, row, on_gpu) for row in range(REQUESTS)), ())
