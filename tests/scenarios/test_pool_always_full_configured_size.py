"""G11: start-up takes tens of minutes for memory that is never used, or says "increase the size".

Here a pool is whole pages, their stride included, of no more than was configured; one that cannot
hold a request of the longest context is refused with the size that would. Pools are pinned while
the engine sets itself up: `statistics()` tells how far that is, and the first step waits for all of
it (`device/test_host_progress.py`).
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparse.config import (
    GIB,
    HiSparseConfig,
    ModelLayout,
    PolicyConfig,
    PoolConfig,
    ScheduleConfig,
    check_capacity,
)
from hisparse.device.layout import Geometry
from hisparse.errors import CapacityError


def config(host_gib, layers=8, row_bytes=656, longest=4096):
    return HiSparseConfig(
        layout=ModelLayout(
            row_bytes=row_bytes, index_row_bytes=132, index_groups=(tuple(range(layers)),)
        ),
        pools=PoolConfig(page_size=64, gpu_blocks=4000, host_pool_gib=host_gib),
        policy=PolicyConfig(top_k=256, hot_rows=512),
        schedule=ScheduleConfig(max_requests=2, max_model_len=longest),
    )


@given(
    st.floats(0.05, 500, allow_nan=False),
    st.integers(1, 78),
    st.sampled_from([576, 656, 1152]),
)
def test_pages_and_their_alignment_are_within_the_budget_by_construction(gib, layers, row_bytes):
    chosen = config(gib, layers, row_bytes)
    geometry = Geometry.of(chosen)
    assert geometry.host_pages * chosen.host_page_bytes <= gib * GIB
    assert (geometry.host_pages + 1) * chosen.host_page_bytes > int(gib * GIB)
    assert geometry.host_pool_bytes <= gib * GIB


def test_a_budget_below_one_request_is_refused_with_the_number_that_would_do():
    with pytest.raises(CapacityError, match=r"pools\.host_pool_gib=0\.01 holds .* use at least"):
        check_capacity(config(0.01))
    with pytest.raises(CapacityError) as caught:
        check_capacity(config(0.01))
    enough = caught.value.fixes["pools.host_pool_gib"]
    assert check_capacity(config(enough)).host_pages == config(enough).max_pages + 1
