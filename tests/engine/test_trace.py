"""Traces: sharing survives scaling, a written trace reads back, a bad line is named."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse.engine.trace import (
    TraceRequest,
    block_tokens,
    read_trace,
    scale_request,
    scale_trace,
    write_trace,
)
from hisparse.engine.trace_generate import generate_trace
from hisparse.errors import ConfigError

GOOD = {"timestamp": 5, "input_length": 700, "output_length": 3, "hash_ids": [0, 1]}
ids = st.lists(st.integers(0, 382**2), min_size=1, max_size=6)


@st.composite
def requests(draw: st.DrawFn, hash_ids: st.SearchStrategy[list[int]] = ids) -> TraceRequest:
    blocks = draw(hash_ids)
    rest = draw(st.integers(1, 512))
    return TraceRequest(
        timestamp_ms=draw(st.integers(0, 10**9)),
        input_length=512 * (len(blocks) - 1) + rest,
        output_length=draw(st.integers(0, 3000)),
        hash_ids=tuple(blocks),
    )


def common(a: np.ndarray | tuple, b: np.ndarray | tuple) -> int:
    """Length of the common prefix."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


# -- scaling -------------------------------------------------------------------------------------
@st.composite
def relatives(draw: st.DrawFn) -> tuple[TraceRequest, TraceRequest]:
    """Two requests with some leading ids in common, full blocks all."""
    shared = draw(st.lists(st.integers(0, 382**2), max_size=3))
    pair = []
    for _ in range(2):
        blocks = [*shared, *draw(ids)]
        pair.append(TraceRequest(0, 512 * len(blocks), 1, tuple(blocks)))
    return pair[0], pair[1]


@settings(deadline=None)
@given(relatives(), st.sampled_from([1 / 256, 1 / 64, 1 / 32, 0.07, 1.0]), st.integers(0, 3))
def test_equal_leading_ids_are_equal_leading_tokens(
    pair: tuple[TraceRequest, TraceRequest], scale: float, seed: int
) -> None:
    a, b = pair
    full = round(512 * scale)
    left = scale_request(a, scale, seed=seed).prompt
    right = scale_request(b, scale, seed=seed).prompt
    # both ways: ids alike give tokens alike, and tokens part inside the block where ids part
    assert common(left, right) // full == common(a.hash_ids, b.hash_ids)


@settings(deadline=None)
@given(requests(), st.floats(1e-4, 2.0))
def test_scaled_lengths(r: TraceRequest, scale: float) -> None:
    work = scale_request(r, scale)
    full, blocks = max(1, round(512 * scale)), len(r.hash_ids)
    rest = r.input_length - 512 * (blocks - 1)
    assert len(work.prompt) == full * (blocks - 1) + max(1, round(rest * scale))
    assert full * (blocks - 1) < len(work.prompt) <= full * blocks  # the blocks just cover it
    assert work.max_new == max(1, round(r.output_length * scale))
    assert work.arrival_ms == r.timestamp_ms * scale
    assert work.prompt.dtype == np.int64
    assert scale_request(r, scale, 2).max_new == min(2, work.max_new)


@settings(deadline=None)
@given(
    st.integers(0, 2**63 - 1), st.integers(1, 90), st.integers(3, 400), st.data(), st.integers(0, 9)
)
def test_block_tokens_are_a_prefix_stable_function_without_eos(
    hash_id: int, count: int, vocab: int, data: st.DataObject, seed: int
) -> None:
    options = {"seed": seed, "vocab_size": vocab, "eos": data.draw(st.integers(0, vocab - 1))}
    tokens = block_tokens(hash_id, count, **options)
    longer = block_tokens(hash_id, count + 7, **options)
    assert np.array_equal(tokens, longer[:count])
    assert tokens.min() >= 0 and tokens.max() < vocab and options["eos"] not in tokens


@settings(deadline=None)
@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_different_ids_differ_within_eight_tokens(a: int, b: int) -> None:
    assert np.array_equal(block_tokens(a, 8), block_tokens(b, 8)) == (a == b)


def test_tokens_are_pinned_and_depend_on_the_seed() -> None:
    assert block_tokens(5, 12).tolist() == [110, 363, 347, 244, 229, 87, 112, 53, 295, 367, 79, 76]
    assert not np.array_equal(block_tokens(5, 16, seed=0), block_tokens(5, 16, seed=1))
    spread = np.concatenate([block_tokens(ident, 32) for ident in range(300)])
    counts = np.bincount(spread, minlength=384)
    assert counts[383] == 0 and counts[:383].min() > 0 and counts.max() < 3 * counts.mean()


def test_scale_trace_numbers_the_requests() -> None:
    trace = generate_trace(5, 0)
    works = scale_trace(trace, 1 / 32, 64, seed=3)
    assert [w.request for w in works] == ["r0", "r1", "r2", "r3", "r4"]
    one = scale_request(trace[2], 1 / 32, 64, request="r2", seed=3)
    assert np.array_equal(works[2].prompt, one.prompt) and works[2].max_new == one.max_new


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"scale": 0}, "scale=0"),
        ({"scale": float("nan")}, "scale=nan"),
        ({"scale": 1, "max_new": 0}, "max_new=0"),
        ({"scale": 1, "vocab_size": 2, "eos": 0}, "vocab_size=2"),
        ({"scale": 1, "eos": 384}, "eos=384"),
    ],
)
def test_scale_request_refuses(arguments: dict, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        scale_request(TraceRequest(0, 5, 5, (0,)), **arguments)


# -- reading -------------------------------------------------------------------------------------
@settings(max_examples=25, deadline=None)
@given(n=st.integers(0, 60), seed=st.integers(0, 2**32 - 1))
def test_generated_trace_reads_back(tmp_path_factory, n: int, seed: int) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    trace = generate_trace(n, seed)
    write_trace(path, trace)
    assert read_trace(path) == trace
    assert read_trace(path, limit=7) == trace[:7]


@settings(max_examples=50, deadline=None)
@given(st.lists(requests(), max_size=8))
def test_any_trace_reads_back(tmp_path_factory, trace: list[TraceRequest]) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    write_trace(path, trace)
    assert read_trace(str(path)) == trace


BAD = [
    ("{", "line='{' is not JSON"),
    ("\xff", "is not JSON"),
    ("[" * 100_000, "is not JSON"),
    ("7", "line=7 is not a request"),
    *[({k: v for k, v in GOOD.items() if k != name}, f"{name} is missing") for name in GOOD],
    ({**GOOD, "timestamp": -1}, "timestamp=-1"),
    ({**GOOD, "timestamp": "5"}, "timestamp='5'"),
    ({**GOOD, "input_length": -4}, "input_length=-4"),
    ({**GOOD, "input_length": 0}, "input_length=0"),
    ({**GOOD, "input_length": 7.5}, "input_length=7.5"),
    ({**GOOD, "input_length": True}, "input_length=True"),
    ({**GOOD, "output_length": -1}, "output_length=-1"),
    ({**GOOD, "output_length": None}, "output_length=None"),
    ({**GOOD, "output_length": 2**63}, "output_length=9223372036854775808"),
    ({**GOOD, "hash_ids": 3}, "hash_ids=3 is not a list"),
    ({**GOOD, "hash_ids": [0, "a\nb"]}, r"hash_ids\[1\]='a"),
    ({**GOOD, "hash_ids": [-1, 0]}, r"hash_ids\[0\]=-1"),
    ({**GOOD, "hash_ids": [0]}, "hash_ids has 1 ids and input_length=700 needs 2"),
    ({**GOOD, "hash_ids": [0, 1, 2]}, "hash_ids has 3 ids and input_length=700 needs 2"),
]


@settings(max_examples=100, deadline=None)
@given(before=st.integers(0, 4), blank=st.booleans(), bad=st.sampled_from(BAD))
def test_a_malformed_line_is_named(
    tmp_path_factory, before: int, blank: bool, bad: tuple[object, str]
) -> None:
    line, match = bad
    path = tmp_path_factory.mktemp("trace") / "bad.jsonl"
    text = line if isinstance(line, str) else json.dumps(line)
    lines = [json.dumps(GOOD)] * before + [""] * blank + [text, json.dumps(GOOD)]
    path.write_text("\n".join(lines), encoding="latin-1")
    with pytest.raises(ConfigError, match=match) as caught:
        read_trace(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:{before + blank + 1}: ") and "\n" not in message
    assert len(read_trace(path, limit=before)) == before  # what precedes it is fine


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(ConfigError, match=str(path)):
            read_trace(path)
    with pytest.raises(ConfigError, match="absent"):
        write_trace(tmp_path / "absent" / "t.jsonl", [])


def test_mooncake_lines_with_more_fields_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({**GOOD, "type": "chat"}) + "\n\n")
    assert read_trace(path) == [TraceRequest(5, 700, 3, (0, 1))]


# -- generating ----------------------------------------------------------------------------------
def test_generator_is_deterministic_by_seed() -> None:
    assert generate_trace(50, 4) == generate_trace(50, 4)
    assert generate_trace(50, 4)[:20] == generate_trace(20, 4)
    assert generate_trace(50, 4) != generate_trace(50, 5)


def test_generator_resembles_the_published_trace() -> None:
    trace = generate_trace(3000, 1)
    lengths = [r.input_length for r in trace]
    assert 8_000 < statistics.mean(lengths) < 16_000
    assert 5_000 < statistics.median(lengths) < 9_000
    assert max(lengths) <= 128_000 and min(lengths) >= 1
    times = [r.timestamp_ms for r in trace]
    assert times == sorted(times)
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(1000 / 3.4, rel=0.1)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.15)  # as of a Poisson process
    seen = Counter(ident for r in trace for ident in r.hash_ids)
    assert 0.25 < 1 - len(seen) / seen.total() < 0.5


def test_an_id_always_follows_the_same_ids() -> None:
    before: dict[int, tuple[int, ...]] = {}
    grown = 0
    for r in generate_trace(400, 2, system_prompts=(100, 1536)):
        for at, ident in enumerate(r.hash_ids):
            grown += before.get(ident) == r.hash_ids[:at] and ident > 3
            assert before.setdefault(ident, r.hash_ids[:at]) == r.hash_ids[:at]
    assert grown > 400  # conversations do grow


def test_generator_without_sharing_shares_nothing() -> None:
    trace = generate_trace(100, 3, followups=0, system_prompts=())
    assert Counter(i for r in trace for i in r.hash_ids).most_common(1)[0][1] == 1
    assert all(len(r.hash_ids) == -(-r.input_length // 512) for r in trace)


@pytest.mark.parametrize(
    "arguments",
    [
        {"n": -1},
        {"seed": -1},
        {"requests_per_s": 0},
        {"followups": 1.5},
        {"max_input": 600},
        {"system_prompts": (-1,)},
    ],
)
def test_generator_refuses(arguments: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        generate_trace(**{"n": 3, "seed": 0, **arguments})
