"""What the resolve takes of a GPU: bytes that are known before, and thread blocks of a fetch.

Its arrays are made by NumPy in CuPy's place and its launches recorded: no GPU is needed.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from device_rig import make_config

from hisparse.config import RESIDENT
from hisparse.device.cuda import resolver
from hisparse.device.cuda.kernels import ResolveSizes, resolve_memory
from hisparse.device.cuda.resolver import CudaResolver, CudaTables, ResolveCall

FETCH_SMS = 8  # of the GPU's, at most, are busy with a fetch


class Kernel:
    """Keeps the grid of each launch."""

    shared_size_bytes = 5552

    def __init__(self):
        self.grids = []

    def __call__(self, grid, threads, arguments, shared_mem=0):
        self.grids.append(grid)


class Cupy:
    """NumPy, and a device of `places` multiprocessors."""

    def __init__(self, places=132, capability="90", block_bytes=232_448):
        device = SimpleNamespace(
            attributes={
                "MultiProcessorCount": places,
                "MaxSharedMemoryPerBlockOptin": block_bytes,
            },
            compute_capability=capability,
        )
        self.cuda = SimpleNamespace(Device=lambda: device)

    def __getattr__(self, name):
        return getattr(np, name)


@pytest.fixture
def made(monkeypatch):
    """Makes resolvers; `made.kernels` by name."""
    kernels = {}

    def get(name):
        return kernels.setdefault(name, Kernel())

    def make(sizes, requests, layers, *device):
        monkeypatch.setattr(resolver, "require_cupy", lambda: Cupy(*device))
        tables = CudaTables(None, None, None)
        return CudaResolver(sizes, tables, requests, layers, np.zeros(1, np.int32))

    monkeypatch.setattr(resolver, "load", lambda *_: SimpleNamespace(get_function=get))
    make.kernels = kernels
    return make


def nbytes(owner):
    return sum(a.nbytes for a in vars(owner).values() if isinstance(a, np.ndarray))


SHAPES = [
    make_config(2048, 4, 16, 2048, groups=((0, 1),)),
    make_config(7, 3, 5, 6, groups=((0, 2, 3), (1,))),
]


@pytest.mark.parametrize("config", SHAPES)
def test_what_a_config_says_is_what_leaders_take(config, made):
    sizes, said = ResolveSizes.of(config), resolve_memory(config)
    requests, groups = config.schedule.max_requests, config.layout.index_groups
    leaders = [made(sizes, requests, len(layers)) for layers in groups]
    assert sum(leader.state_bytes for leader in leaders) == said["cuda_state_bytes"]
    for leader in leaders:  # nothing of it is left out, but for what faults.py owns and the step
        assert nbytes(leader) == leader.state_bytes + leader.counters.nbytes + leader.step.nbytes
    assert nbytes(ResolveCall(sizes, 3)) == sizes.call_bytes(3)


def test_without_a_host_tier_nothing_is_taken():
    config = make_config()
    policy = config.policy.model_copy(update={"name": RESIDENT})
    alone = config.model_copy(update={"policy": policy})
    assert resolve_memory(alone) == {"cuda_state_bytes": 0, "cuda_call_bytes": 0}


@pytest.mark.parametrize("places", [2, 8, 9, 132])
@pytest.mark.parametrize("requests", [1, 64, 256])
def test_a_fetch_is_launched_on_eight_multiprocessors_at_most(places, requests, made):
    sizes = ResolveSizes(64, 32, 64, 16, 656, 512)
    leader, call = made(sizes, requests, 3, places), ResolveCall(sizes, requests)
    leader.resolve(call, None)
    leader.replay(call, 1, 0, 0)
    leader.replay(call, 2, 0, 0)
    fetches = [blocks for (blocks,) in made.kernels["hisparse_replay"].grids]
    shared = made.kernels.get("hisparse_resolve_one", Kernel()).grids
    ((resolve,),) = shared or made.kernels["hisparse_resolve"].grids
    assert bool(shared) == (requests == 1 and places > FETCH_SMS)
    for blocks in (*fetches, resolve - requests):  # a resolve has a block that plans a request
        assert 0 < blocks <= min(FETCH_SMS, places - 1)
    assert len(fetches) == 2


@pytest.mark.parametrize(
    ("rows", "span", "device", "shared"),
    [
        (1, 1, (132, "90"), True),
        (1, 1, (148, "100"), True),
        (1, 1, (108, "80"), False),  # no clusters
        (1, 1, (8, "90"), False),  # nor eight multiprocessors beside one that plans
        (1, 1, (132, "90", 6000), False),  # nor memory for what they tell each other
        (2, 1, (132, "90"), False),
        (2, 2, (132, "90"), False),
    ],
)
def test_one_row_is_resolved_by_eight_blocks_where_the_device_can(rows, span, device, shared, made):
    sizes = ResolveSizes(64, 32, 64, 16, 656, 512)
    made(sizes, 2, 3, *device).resolve(ResolveCall(sizes, rows, span), None)
    launched = {name for name, kernel in made.kernels.items() if kernel.grids}
    assert launched == {"hisparse_resolve_one" if shared else "hisparse_resolve"}
