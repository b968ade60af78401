"""H08: a combination is accepted at start and misbehaves later; one fault is told, the next shows
only when that one is mended; advice in the log cannot be followed.

Here one validator knows all constraints and tells every violation at once, each with its field,
value and reason and, where one can be known, a value that would do. The advice is followed below.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
from byte_rig import ByteRig
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_rig import make_config

from hisparse.config import HiSparseConfig, check_capacity
from hisparse.config_check import checked_config, with_fixes
from hisparse.errors import CapacityError, ConfigError

GOOD = {
    "layout": {"row_bytes": 32, "index_row_bytes": 8, "index_groups": [[0, 1], [2]]},
    "pools": {"page_size": 4, "gpu_blocks": 64, "host_pool_gib": 0.001},
    "policy": {"top_k": 4, "hot_rows": 8},
    "schedule": {"max_model_len": 64},
}


def changed(changes):
    return with_fixes(copy.deepcopy(GOOD), changes)


def refused(data):
    with pytest.raises(ConfigError) as caught:
        checked_config(data)
    return caught.value


# name -> the change, what has to be said, and the field that the advice is about
VIOLATIONS = {
    "hot below k": ({"policy.hot_rows": 3}, "hot_rows=3 must be at least top_k=4", "hot_rows"),
    "default hot below k": (
        {"policy.top_k": 5000, "policy.hot_rows": None, "pools.gpu_blocks": 4000},
        "hot_rows=4096 must be at least top_k=5000",
        "hot_rows",
    ),
    "no page size": ({"pools.page_size": 0}, "pools.page_size=0: Input should be greater", "page"),
    "indexer too wide": ({"layout.index_row_bytes": 60}, "must be at most 48", "index_row_bytes"),
    "unknown policy word": ({"policy.write_back": "lazy"}, "'eager' or 'on_pressure'", "write"),
    "unknown field": ({"pools.hot_buffer_gib": 2}, "pools.hot_buffer_gib=2: no such key", "hot_b"),
    "disk without dir": ({"log": {"mode": "disk"}}, "mode='disk' needs dir", "log.dir"),
    "few blocks": ({"pools.gpu_blocks": 5}, "pools.gpu_blocks=5 cannot hold one request", "gpu"),
    "no host page": ({"pools.host_pool_gib": 1e-6}, "holds 2 host pages, and one", "host_pool"),
    "no suffix page": ({"suffix": {"name": "cpu", "gib": 1e-9}}, "holds no indexer page", "suffix"),
    "ranks": ({"ranks": 65}, "ranks=65: Input should be less than or equal to 64", "ranks"),
}


def test_the_base_is_accepted():
    shaped = changed({"pools.index_pages_per_block": 6})  # what `checked_config` chooses
    assert checked_config(GOOD) == check_capacity(HiSparseConfig.model_validate(shaped))


@pytest.mark.parametrize("name", list(VIOLATIONS))
def test_a_violation_names_field_value_and_reason_and_its_advice_can_be_followed(name):
    changes, said, field = VIOLATIONS[name]
    error = refused(changed(changes))
    assert said in str(error) and any(field in path for path in error.fixes), error
    checked_config(with_fixes(changed(changes), error.fixes))


@settings(max_examples=60)
@given(st.sets(st.sampled_from(sorted(set(VIOLATIONS) - {"default hot below k"})), min_size=1))
def test_any_violations_together_are_all_told_at_once_and_mended_at_once(names):
    changes = {}
    for name in names:
        changes |= VIOLATIONS[name][0]
    error = refused(changed(changes))
    for name in names:
        _, said, field = VIOLATIONS[name]
        assert any(field in path for path in error.fixes), (name, error)
        if name not in ("no host page", "few blocks", "no suffix page"):  # sizes follow the others
            assert said in str(error), (name, error)
    checked_config(with_fixes(changed(changes), error.fixes))


def test_what_has_no_value_that_would_do_is_told_with_the_others():
    data = changed({"layout.row_bytes": None, "policy.hot_rows": 3, "pools.gpu_blocks": 5})
    error = refused(data)
    for said in ("layout.row_bytes", "Field required", "hot_rows=3 must be"):
        assert said in str(error)
    assert "layout.row_bytes" not in error.fixes and error.fixes["policy.hot_rows"] == 4


@settings(max_examples=60)
@given(
    st.integers(1, 40), st.integers(1, 64), st.integers(2, 200), st.integers(1, 300),
    st.integers(0, 40), st.floats(1e-7, 1e-3), st.sampled_from(["hybrid", "resident", "even"]),
)  # fmt: skip
def test_pools_are_accepted_or_the_sizes_in_the_refusal_are(k, hot, blocks, longest, ahead, gib, p):
    data = changed({
        "policy.top_k": k, "policy.hot_rows": hot, "policy.name": p, "pools.gpu_blocks": blocks,
        "pools.host_pool_gib": gib, "schedule.max_model_len": longest,
        "schedule.lookahead_rows": ahead,
    })  # fmt: skip
    try:
        checked_config(data)
    except ConfigError as error:
        checked_config(with_fixes(data, error.fixes))


def test_both_pools_too_small_are_one_refusal():
    config = make_config(longest=400, host_pages=8, blocks=5)
    with pytest.raises(CapacityError, match=r"gpu_blocks=6 .*; pools.host_pool_gib") as caught:
        check_capacity(config)
    assert caught.value.fixes.keys() == {"pools.gpu_blocks", "pools.host_pool_gib"}


@pytest.mark.parametrize("rows", [2, 4, 7])
def test_a_hot_region_below_k_times_the_rows_of_a_step_is_supported_in_waves(rows):
    config = make_config(name="host_first", schedule={"lookahead_rows": rows - 1})
    small = {"policy": config.policy.model_copy(update={"hot_rows": config.policy.top_k})}
    rig = ByteRig(checked_config(config.model_copy(update=small).model_dump()), lag=0.6)
    assert rig.worker.capabilities.wave_rows == 1 < rows
    key = rig.arrive("q", list(range(40)), new=20)
    rig.step(rows=16)
    for _ in range(6):
        rig.step(rows=rows)  # every row reads rows of its own, checked
        rig.poll()
    rig.device.synchronize(None)
    assert np.count_nonzero(rig.host(key)) and rig.rows_read
    assert rig.worker.statistics()["host_rows"] > 0
