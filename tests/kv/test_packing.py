"""The packed allocation: bytes needed, held and padded, for layouts of the field."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from kv_rig import SchedulerRig, make_config

from hisparse.config import (
    GIB,
    HiSparseConfig,
    ModelLayout,
    PolicyConfig,
    PoolConfig,
    ScheduleConfig,
    recorded_config,
)
from hisparse.config_packing import candidates, packed, packing_of, planned_footprint
from hisparse.device.layout import Geometry, Span, overlap_spans
from hisparse.fsm.state import BlockColumns
from hisparse.kv.packing import held_footprint

ROOT = Path(__file__).resolve().parents[2]
KI = 1024


def glm(row_bytes: int) -> HiSparseConfig:
    """78 latent layers, of which 21 own an indexer of 132 B a token; hot 4096, pages of 64."""
    sizes = [4] * 15 + [3] * 6
    groups, first = [], 0
    for size in sizes:
        groups.append(tuple(range(first, first + size)))
        first += size
    assert first == 78 and len(groups) == 21
    return HiSparseConfig(
        layout=ModelLayout(row_bytes=row_bytes, index_row_bytes=132, index_groups=tuple(groups)),
        pools=PoolConfig(gpu_blocks=20_000, host_pool_gib=64),
        policy=PolicyConfig(top_k=2048, hot_rows=4096),
        schedule=ScheduleConfig(max_model_len=200 * KI),
    )


@pytest.mark.parametrize("host_backed", [False, True])
@pytest.mark.parametrize("row_bytes", [576, 656])
def test_glm_pads_at_most_two_percent(row_bytes, host_backed):
    config = glm(row_bytes)
    for tokens in (8 * KI, 16 * KI, 32 * KI, 64 * KI, 80_000, 80 * KI, 128 * KI, 200 * KI):
        found = planned_footprint(config, tokens, host_backed=host_backed)
        assert found.padded_share <= 0.02, (tokens, found)


@pytest.mark.parametrize(
    ("row_bytes", "host_backed", "most", "mean"),
    [(576, False, 0.011, 0.003), (656, False, 0.009, 0.003), (576, True, 0.014, 0.011),
     (656, True, 0.023, 0.018)],
)  # fmt: skip
def test_glm_pads_little_at_any_length(row_bytes, host_backed, most, mean):
    config = glm(row_bytes)
    shares = [
        planned_footprint(config, tokens, host_backed=host_backed).padded_share
        for tokens in range(8 * KI, 200 * KI + 1, 64)
    ]
    assert max(shares) <= most and np.mean(shares) <= mean


def layout_of(row_bytes: int, index_row_bytes: int, groups) -> HiSparseConfig:
    return HiSparseConfig(
        layout=ModelLayout(
            row_bytes=row_bytes, index_row_bytes=index_row_bytes, index_groups=groups
        ),
        pools=PoolConfig(gpu_blocks=20_000, host_pool_gib=64),
        schedule=ScheduleConfig(max_model_len=128 * KI),
    )


def test_the_block_takes_the_shape_that_wastes_less():
    for row_bytes, pages in ((576, 16), (656, 18)):
        config = glm(row_bytes)
        assert packed(config).index_pages_per_block == pages
        assert packed(config).block_bytes == config.page_bytes
    every_layer = tuple((layer,) for layer in range(61))  # DeepSeek-V3.2
    config = layout_of(656, 132, every_layer)
    chosen, other = candidates(config)
    assert (chosen.index_pages_per_block, other.index_pages_per_block) == (5, 4)
    assert chosen.worst < 0.02 and other.host_backed_mean > 0.14, (chosen, other)
    assert packing_of(packed(config)) == chosen
    assert 5 * config.index_page_bytes <= chosen.block_bytes and chosen.block_bytes % 656 == 0


def test_a_shape_that_is_given_stays_and_one_that_is_not_is_that_of_old_logs():
    config = layout_of(656, 132, ((0,), (1,)))
    assert config.index_pages_per_block == 4 and config.block_bytes == config.page_bytes
    pools = PoolConfig(gpu_blocks=9, host_pool_gib=1, index_pages_per_block=0)
    assert packed(config.model_copy(update={"pools": pools})).index_pages_per_block == 4
    assert recorded_config(config.model_dump_json()).index_pages_per_block == 4


@pytest.mark.parametrize("host_backed", [False, True])
def test_what_is_told_of_a_shape_is_what_its_requests_hold(host_backed):
    config = glm(656)
    shape = packing_of(config)
    shares = [
        planned_footprint(config, pages * 64, host_backed=host_backed).padded_share
        for pages in range(2 + 64 + 1, config.max_pages + 1)
    ]
    told = (shape.host_backed_mean, shape.host_backed_worst)
    told = told if host_backed else (shape.resident_mean, shape.resident_worst)
    assert told == pytest.approx((np.mean(shares), max(shares)))


def test_a_request_reports_what_it_needs_holds_and_pads():
    rig = SchedulerRig(make_config(blocks=40))
    key = rig.arrive("q", list(range(30)), 8)
    rig.step()
    page = rig.config.block_bytes
    index = rig.config.index_page_bytes
    found = held_footprint(rig.state, rig.row(key))
    pages = int(rig.state.rows.pages[rig.row(key)])
    assert found.needed_bytes == pages * page + pages * index
    assert found.held_bytes == (pages + int(rig.state.rows.index[rig.row(key)])) * page
    assert found.padded_bytes == found.held_bytes - found.needed_bytes >= 0
    assert rig.coordinator.footprint(*key) == found
    counts = rig.coordinator.statistics()
    assert counts["gpu_bytes_held"] == found.held_bytes
    assert counts["gpu_bytes_padded"] == found.padded_bytes


@pytest.mark.parametrize("index_pages", [0, 19])
def test_views_of_a_glm_block_never_overlap(index_pages):
    config = glm(656)
    pools = config.pools.model_copy(update={"index_pages_per_block": index_pages})
    geometry = Geometry.of(config.model_copy(update={"pools": pools}))
    layers = [geometry.resident_span(layer) for layer in range(geometry.layers)]
    groups = [geometry.index_span(group) for group in range(len(geometry.groups))]
    for spans in (layers, groups):
        ends = [span.offset + span.length for span in spans]
        assert all(a <= b.offset for a, b in zip(ends, spans[1:], strict=False))
        assert ends[-1] <= geometry.block_bytes
        assert not any(overlap_spans(a, b) for a, b in pairwise(spans))
    shifted = Span(groups[1].offset - 1, *[getattr(groups[1], n) for n in
                   ("block_stride", "blocks", "rows_per_block", "row_bytes")])  # fmt: skip
    assert overlap_spans(groups[0], shifted)


def test_a_hundred_thousand_blocks_have_no_object_each():
    before = sum(array.nbytes for array in arrays(BlockColumns(2)))
    after = arrays(BlockColumns(100_000))
    assert (sum(array.nbytes for array in after) - before) / 100_000 <= 64, "bytes a block"
    assert all(array.dtype != object for array in after)


def arrays(columns):
    for value in vars(columns).values():
        if isinstance(value, np.ndarray):
            yield value
        else:
            held = [getattr(value, name) for name in value.__slots__]
            yield from (array for array in held if isinstance(array, np.ndarray))


SNIPPET = """
from hisparse.fsm.state import State
from hisparse.kv.groups import KVCacheGroup, SOURCE_GROUP

def wrong(state: State, group: KVCacheGroup) -> object:
    return state.device_pools[group.block_pool_id]

def right(state: State, group: KVCacheGroup) -> object:
    assert group.block_pool_id is not None
    return state.device_pools[group.block_pool_id]
"""


def test_lint_refuses_whoever_indexes_a_device_pool_without_narrowing(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "snippet.py").write_text(SNIPPET)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent",
         "--cache-dir", str(tmp_path / "cache"), str(tmp_path / "snippet.py")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    errors = [line for line in done.stdout.splitlines() if "error" in line]
    assert len([e for e in errors if ":6: error" in e and "None" in e]) == 1, done.stdout
    assert not any(":10:" in e for e in errors)


def test_host_capacity_is_whole_pages_of_an_aligned_stride():
    config = glm(656)
    stride = config.host_page_bytes
    assert stride % 256 == 0 and 0 <= stride - config.block_bytes < 256
    assert config.host_pages * stride <= 64 * GIB < (config.host_pages + 1) * stride
