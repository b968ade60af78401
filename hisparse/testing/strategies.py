"""Strategies of Hypothesis for what hisparse is made of, registered by type.

    worlds, configs     World, HiSparseConfig      valid, small, with room for one request at least
    programs            Program                    schedules: operations of a small world, in order
    trace_requests      TraceRequest               a line of a trace; `traces` is a whole one
    workload_requests   WorkloadRequest            a request with its tokens
    events              each class of event        any values that its fields may have

After this module is imported, ``st.from_type`` and ``@given(...)`` with type hints find them. All
shrink towards little: one rank, small pages, one request, no fault. Needs hypothesis
(``pip install 'hisparse[testing]'``).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st

from hisparse.config import HiSparseConfig, ceil_div
from hisparse.engine.trace import HASH_BLOCK, TraceRequest, WorkloadRequest
from hisparse.fsm.events import EVENT_TYPES, Event
from hisparse.testing.atlas import ATLAS
from hisparse.testing.program import Operation, Program
from hisparse.testing.worlds import EOS, GPU_SHARES, HOST_SHARES, World

LAGS = (0.0, 0.3, 0.6, 0.9, 0.97)  # each extreme hides waits that the other shows
RANKS_MAX = 3
POLICIES = ("hybrid", "lru", "even", "host_first")
REQUESTS_MAX = 6  # of a program


# -- worlds ---------------------------------------------------------------------------------------
@st.composite
def worlds(draw: st.DrawFn, *, policy: str | None = None, ranks_max: int = RANKS_MAX) -> World:
    """Small worlds under pressure; with `policy`, all have that one."""

    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    return World(
        page_size=one_of(2, 4, 8),
        tokens_max=one_of(24, 48),
        requests_max=one_of(4, 8),
        ranks=draw(st.integers(1, ranks_max)),
        policy=policy if policy is not None else one_of(*POLICIES),
        write_back=one_of("eager", "on_pressure"),
        on_copy_failure=one_of("rewind", "fail"),
        hot_rows=one_of(4, 8, 11),
        watermark_blocks=one_of(0, 3),
        promote_pages=one_of(0, 1, 4),
        promote_after_steps=one_of(1, 3, 8),
        prefill_chunk=one_of(4, 8, 16),
        step_rows=one_of(16, 32),
        lookahead_rows=one_of(0, 1, 3),
        gpu_share=one_of(*GPU_SHARES),
        host_share=one_of(*HOST_SHARES),
        suffix_pages=one_of(0, 2, 12, 400),
    )


def configs() -> st.SearchStrategy[HiSparseConfig]:
    """Configurations that `check_capacity` takes."""
    return worlds().map(World.config)


# -- what clients ask -----------------------------------------------------------------------------
@st.composite
def trace_requests(draw: st.DrawFn, ids: int = 5) -> TraceRequest:
    """A line of a trace, over so many hash ids: few, so that prefixes are shared."""
    length = draw(st.integers(1, 4 * HASH_BLOCK))
    blocks = ceil_div(length, HASH_BLOCK)
    hash_ids = draw(st.lists(st.integers(0, ids - 1), min_size=blocks, max_size=blocks))
    return TraceRequest(
        draw(st.integers(0, 10_000)), length, draw(st.integers(0, 2000)), tuple(hash_ids)
    )


def traces(requests_max: int = 8) -> st.SearchStrategy[list[TraceRequest]]:
    """Whole traces, in the order of arrival."""
    lines = st.lists(trace_requests(), max_size=requests_max)
    return lines.map(lambda found: sorted(found, key=lambda line: line.timestamp_ms))


def prompts(tokens_max: int = 24) -> st.SearchStrategy[list[int]]:
    """Token ids that mostly begin alike: a part of one of two stems, and a tail."""
    stem = st.builds(
        lambda first, n: [first + i for i in range(n)],
        st.sampled_from([0, 40]),
        st.integers(0, tokens_max - 1),
    )
    tail = st.lists(st.integers(0, EOS - 1), min_size=1, max_size=3)
    return st.builds(lambda a, b: (a + b)[-tokens_max:], stem, tail)


def workload_requests() -> st.SearchStrategy[WorkloadRequest]:
    """Requests of a few ids, over shared prefixes."""
    return st.builds(
        WorkloadRequest,
        st.integers(0, REQUESTS_MAX - 1).map(lambda n: f"r{n}"),
        st.integers(0, 1000).map(float),
        prompts().map(lambda tokens: np.array(tokens, dtype=np.int64)),
        st.integers(1, 12),
    )


# -- schedules ------------------------------------------------------------------------------------
def operations() -> st.SearchStrategy[Operation]:
    """One operation, over a few request ids, so that they collide."""
    ids = st.integers(0, REQUESTS_MAX - 1).map(lambda n: f"r{n}")
    plain = st.sampled_from(["step", "step", "step", "reset", "wake_up", "crash_scheduler"])
    on_request = st.sampled_from(["abort", "preempt", "stop"])
    return st.one_of(
        plain.map(lambda verb: (verb, {})),
        st.builds(
            lambda r, p, n: ("submit", {"request": r, "prompt": p, "max_new": n}),
            ids,
            prompts(),
            st.integers(1, 12),
        ),
        st.builds(lambda verb, r: (verb, {"request": r}), on_request, ids),
        st.sampled_from(list(ATLAS)).map(lambda kind: ("arm", {"kind": kind})),
        st.sampled_from([1, 2]).map(lambda level: ("sleep", {"level": level})),
        st.builds(
            lambda rank, n: ("crash_rank", {"rank": rank, "notice_steps": n}),
            st.integers(0, RANKS_MAX - 1),
            st.sampled_from([0, 1, 4]),
        ),
    )


def programs(operations_max: int = 40) -> st.SearchStrategy[Program]:
    """Operations on a small world, for `hisparse.testing.simulator.play`."""
    return st.builds(
        lambda world, lags, done: Program(
            world.config(), "program", lags, dict.fromkeys(ATLAS, 0.0), operations=tuple(done)
        ),
        worlds(),
        st.lists(st.sampled_from(LAGS), min_size=1, max_size=RANKS_MAX).map(tuple),
        st.lists(operations(), max_size=operations_max),
    )


# -- events ---------------------------------------------------------------------------------------
def events(kind: type[Event] | None = None) -> st.SearchStrategy[Event]:
    """Events of one class, or of any: every value that the fields' types allow, sense or no."""
    return _events_of(kind) if kind is not None else st.one_of([_events_of(k) for k in EVENT_TYPES])


@cache
def _events_of(kind: type[Event]) -> st.SearchStrategy[Event]:
    fields = msgspec.inspect.type_info(kind).fields  # type: ignore[attr-defined]
    return st.builds(kind, **{field.name: _values(field.type) for field in fields})


def _values(kind: object) -> st.SearchStrategy[object]:
    match kind:
        case msgspec.inspect.IntType():
            return st.integers(-(1 << 63), (1 << 64) - 1)
        case msgspec.inspect.StrType():
            return st.text(max_size=8)
        case msgspec.inspect.BytesType():
            return st.binary(max_size=16)
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.FloatType():
            return st.floats(allow_nan=False)
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.EnumType(cls=cls):
            return st.sampled_from(list(cls))
        case msgspec.inspect.VarTupleType(item_type=item):
            return st.lists(_values(item), max_size=5).map(tuple)
        case msgspec.inspect.UnionType(types=types):
            return st.one_of([_values(one) for one in types])
    raise TypeError(f"no strategy for {kind}: teach hisparse.testing.strategies its type")


def _register() -> None:
    st.register_type_strategy(World, worlds())
    st.register_type_strategy(HiSparseConfig, configs())
    st.register_type_strategy(Program, programs())
    st.register_type_strategy(TraceRequest, trace_requests())
    st.register_type_strategy(WorkloadRequest, workload_requests())
    for kind in EVENT_TYPES:
        st.register_type_strategy(kind, _events_of(kind))
    st.register_type_strategy(Event, events())


_register()
