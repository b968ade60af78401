"""Who owns which byte: the analytic check against brute force, and the real geometry."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from device_rig import Rig, make_config
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse.device.layout import (
    Geometry,
    Span,
    check_disjoint_views,
    overlap_itself,
    overlap_spans,
)
from hisparse.errors import InvariantViolation

spans = st.builds(
    Span,
    offset=st.integers(0, 30),
    block_stride=st.integers(1, 14),
    blocks=st.integers(1, 5),
    rows_per_block=st.integers(1, 4),
    row_bytes=st.integers(1, 4),
)


def owned(span):
    return [
        set(range(start, start + span.length))
        for start in range(
            span.offset, span.offset + span.blocks * span.block_stride, span.block_stride
        )
    ]


@settings(max_examples=1000)
@given(spans, spans, st.booleans())
def test_overlap_is_what_brute_force_says(a, b, equal_strides):
    if equal_strides:
        b = Span(b.offset, a.block_stride, b.blocks, b.rows_per_block, b.row_bytes)
    assert overlap_spans(a, b) == bool(set().union(*owned(a)) & set().union(*owned(b)))


@given(spans)
def test_self_overlap_is_what_brute_force_says(span):
    blocks = owned(span)
    assert overlap_itself(span) == (sum(map(len, blocks)) > len(set().union(*blocks)))


@dataclass
class View:
    span: Span
    base: object
    name: str = "view"


def test_a_shared_byte_is_a_violation_and_another_base_is_not():
    base, other = object(), object()
    a, b = View(Span(0, 16, 4, 2, 4), base, "a"), View(Span(7, 16, 4, 2, 4), base, "b")
    with pytest.raises(InvariantViolation, match=r"disjoint_views: a .* and b .* share bytes"):
        check_disjoint_views([a, b])
    check_disjoint_views([a, View(b.span, other)])
    check_disjoint_views([a, View(Span(8, 16, 4, 2, 4), base)])
    with pytest.raises(InvariantViolation, match="blocks of view overlap"):
        check_disjoint_views([View(Span(0, 7, 4, 2, 4), base)])


@pytest.mark.parametrize("groups", [((0, 2), (1,)), ((0,),), ((0, 1, 2, 3),)])
def test_each_byte_of_a_pool_has_at_most_one_owner(groups):
    geometry = Geometry.of(make_config(groups=groups, blocks=5, hosts=5))
    layers, kinds = range(geometry.layers), range(len(groups))
    for views, size, full in (
        ([geometry.resident_span(i) for i in layers], geometry.gpu_pool_bytes, True),
        ([geometry.host_span(i) for i in layers], geometry.host_pool_bytes, True),
        ([geometry.index_span(g) for g in kinds], geometry.gpu_pool_bytes, False),
    ):
        owners = np.zeros(size, dtype=np.int64)
        for span in views:
            for block in range(span.blocks):
                start = span.offset + block * span.block_stride
                assert start + span.length <= size
                owners[start : start + span.length] += 1
        assert owners.max() == 1 and (owners.min() == 1 or not full)


def test_a_view_is_the_bytes_of_the_pool_and_not_a_copy():
    worker = Rig().worker
    for handle in worker.handles:
        handle.resident.array[3, 2] = handle.layer + 1
    g = worker.geometry
    for layer in range(g.layers):
        start = 3 * g.block_bytes + layer * g.page_bytes + 2 * g.row_bytes
        assert (worker.gpu_pool[start : start + g.row_bytes] == layer + 1).all()
        view = worker.handles[layer].resident
        assert (view.rows[3 * view.block_rows + 2] == layer + 1).all()
