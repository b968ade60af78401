"""A GPU pool that leaves no room for what the worker takes beside it is refused at the start.

How much is free is made up; no GPU is needed.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from device_rig import make_config
from hypothesis import given
from hypothesis import strategies as st
from lagging_device import LaggingDevice

from hisparse.config import RESIDENT
from hisparse.device.checks import checksum_bytes
from hisparse.device.cpu.streams import SimDevice
from hisparse.device.cuda.device import CudaDevice
from hisparse.device.cuda.faults import GROUPS_MAX, FaultRecord
from hisparse.device.cuda.gpu_demand import MAPPED_BYTES, GpuRoom, check_gpu, demand_bytes
from hisparse.device.cuda.kernels import resolve_memory
from hisparse.device.cuda.movers import CudaKernels
from hisparse.device.layout import Geometry
from hisparse.device.worker import HiSparseWorker
from hisparse.errors import CapacityError, ConfigError

MIB = 1 << 20
BLOCKS = 400
CONFIG = make_config(hot_rows=64, requests=64, pages=400, blocks=BLOCKS)
LAYOUT = CONFIG.layout.model_copy(update={"row_bytes": MIB // 4})
CONFIG = CONFIG.model_copy(update={"layout": LAYOUT})  # a block is more than a mapping
POOL = BLOCKS * CONFIG.block_bytes
STATE, CALLS = resolve_memory(CONFIG).values()


def room(free_bytes, **more):
    return GpuRoom("GPU 0 (NVIDIA H200)", free_bytes, 140 << 30, **more)


def with_blocks(blocks):
    pools = CONFIG.pools.model_copy(update={"gpu_blocks": blocks})
    return CONFIG.model_copy(update={"pools": pools})


def test_pool_state_and_calls_are_what_is_asked_for():
    mapped = -(-POOL // MAPPED_BYTES) * MAPPED_BYTES
    assert STATE > 100_000 and CALLS > 10_000
    assert demand_bytes(CONFIG) == mapped + STATE + CALLS
    policy = CONFIG.policy.model_copy(update={"name": RESIDENT})
    assert demand_bytes(CONFIG.model_copy(update={"policy": policy})) == mapped
    checked = CONFIG.model_copy(update={"checks": "on"})
    sums = checksum_bytes(Geometry.of(checked)).taken
    assert sums > 0 and demand_bytes(checked) == demand_bytes(CONFIG) + sums


def test_one_byte_less_than_that_is_refused_by_fields_values_and_fix():
    check_gpu(CONFIG, room(demand_bytes(CONFIG)))
    assert CONFIG.block_bytes > MAPPED_BYTES and demand_bytes(CONFIG) < 2 << 30
    with pytest.raises(CapacityError) as caught:
        check_gpu(CONFIG, room(demand_bytes(CONFIG) - 1))
    most = caught.value.fixes["pools.gpu_blocks"]
    for said in (
        f"pools.gpu_blocks={BLOCKS} of {CONFIG.block_bytes} B are {POOL / (1 << 30):.4g} GiB",
        "schedule.max_requests=64, schedule.max_model_len=1600, policy.hot_rows=64",
        "schedule.step_rows=256, policy.top_k=4",
        "row checksums (checks='off') 0 GiB",
        "GPU 0 (NVIDIA H200) has",
        "free of 140 GiB",
        f"or use pools.gpu_blocks={most}",
    ):
        assert said in str(caught.value)
    assert "empty_cache" not in str(caught.value)


@given(st.integers(POOL // 4, POOL))
def test_the_blocks_that_an_error_gives_would_fit_and_one_more_would_not(free):
    with pytest.raises(CapacityError) as caught:
        check_gpu(CONFIG, room(free))
    most = caught.value.fixes["pools.gpu_blocks"]
    check_gpu(with_blocks(most), room(free))
    with pytest.raises(CapacityError):
        check_gpu(with_blocks(most + 1), room(free))


@pytest.mark.parametrize("left", [-1, 0])
def test_where_not_one_request_would_fit_no_number_of_blocks_is_given(left):
    least = CONFIG.steady_blocks(CONFIG.schedule.max_model_len) + 1
    mapped = -(-least * CONFIG.block_bytes // MAPPED_BYTES) * MAPPED_BYTES
    free = STATE + CALLS + mapped + left
    if left >= 0:
        check_gpu(with_blocks(least), room(free))
        with pytest.raises(CapacityError, match=r"or use pools\.gpu_blocks=\d+") as caught:
            check_gpu(CONFIG, room(free))
        assert caught.value.fixes["pools.gpu_blocks"] == least
        return
    for too_little in (free, 0):
        with pytest.raises(CapacityError, match=r"lower schedule\.max_requests or .* takes") as no:
            check_gpu(CONFIG, room(too_little))
        assert no.value.fixes == {}


def test_what_torch_holds_for_nobody_is_told():
    with pytest.raises(CapacityError, match=r"torch\.cuda\.empty_cache\(\) may free 3 GiB more"):
        check_gpu(CONFIG, room(MIB, cached_bytes=3 << 30))


# -- where it is asked -----------------------------------------------------------------------------
class Small(SimDevice):
    """A device with the checks of the CUDA backend, and of so many bytes; gives no memory."""

    def __init__(self, free_bytes):
        super().__init__()
        self.shared_bytes, self.faults = 232448, FaultRecord(LaggingDevice())
        self.kernels = SimpleNamespace(
            device=self,
            check=lambda config: CudaKernels.check(self.kernels, config),
            drop=lambda tables: None,
        )
        self.asked, self.room = [], lambda wanted: self.asked.append(wanted) or room(free_bytes)

    def allocate(self, size_bytes, fill=0):
        raise AssertionError("memory was taken")


def test_a_worker_is_refused_before_it_takes_memory():
    device = Small(MIB)
    with pytest.raises(CapacityError, match=r"pools\.gpu_blocks=400 "):
        HiSparseWorker(CONFIG, device)
    assert device.asked == [demand_bytes(CONFIG)]
    with pytest.raises(AssertionError, match="memory was taken"):
        HiSparseWorker(CONFIG, Small(1 << 40))


def test_what_the_kernels_cannot_hold_is_said_first():
    with pytest.raises(ConfigError, match=r"pools\.gpu_blocks=\d+: \d+ rows, .* names at most"):
        HiSparseWorker(with_blocks(1 << 30), Small(MIB))
    wide = CONFIG.policy.model_copy(update={"top_k": 9000, "hot_rows": 9000})
    with pytest.raises(ConfigError, match=r"hot_rows=9000 is 2250 blocks .* at least 9$"):
        HiSparseWorker(CONFIG.model_copy(update={"policy": wide}), Small(MIB))


def test_more_index_groups_than_are_counted_for_are_refused_before_memory_is_taken():
    for groups, refusal in ((GROUPS_MAX, AssertionError), (GROUPS_MAX + 1, ConfigError)):
        config = make_config(groups=tuple((i,) for i in range(groups)))
        with pytest.raises(refusal, match=r"memory was taken|^layout\.index_groups: 257 groups"):
            HiSparseWorker(config, Small(1 << 40))


@pytest.mark.parametrize(("wanted", "free"), [(100, 100), (101, 130)])
def test_what_cupy_holds_for_nobody_is_given_back_where_it_is_needed(wanted, free):
    """CuPy keeps 30 bytes of a GPU with 100 free."""
    left = [100, 200]

    def give_back():
        left[0] = 130

    pool = SimpleNamespace(free_all_blocks=give_back)
    runtime = SimpleNamespace(memGetInfo=lambda: tuple(left))
    cuda = SimpleNamespace(
        get_device_name=lambda index: "H200",
        memory_reserved=lambda index: 50,
        memory_allocated=lambda index: 43,
    )
    device = SimpleNamespace(
        index=1,
        cupy=SimpleNamespace(
            cuda=SimpleNamespace(runtime=runtime), get_default_memory_pool=lambda: pool
        ),
        torch=SimpleNamespace(cuda=cuda),
    )
    assert CudaDevice.room(device, wanted) == GpuRoom("GPU 1 (H200)", free, 200, 7)
