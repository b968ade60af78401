"""A size that no machine has, or not this one, is refused with the field, the value and what to do:
before anything is written, and never by what numpy or the system says of it."""

from __future__ import annotations

import re
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
from embedding_rig import settings

from hisparse import HiSparseBackend, HiSparseConfig, checked_config
from hisparse.config import SIZE_MAX
from hisparse.errors import CapacityError, ConfigError
from hisparse.fsm.state import state_bytes
from hisparse.fsm.state_size import MAX_STATE_BYTES

SIZES = [
    f"{section}.{name}"
    for section, part in HiSparseConfig.model_fields.items()
    for name, field in getattr(part.annotation, "model_fields", {}).items()
    if field.annotation is int
]
SPARE_BYTES = 1 << 30


def with_size(path, value):
    made = settings(suffix={"name": "cpu", "gib": 0.0005})
    section, name = path.split(".")
    made[section] = made.get(section, {}) | {name: value}
    if path == "policy.top_k":
        made["policy"]["hot_rows"] = value
    return made


@contextmanager
def little_memory():
    """What is allocated beyond `SPARE_BYTES` is refused by the system."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_the_sizes_are_all_of_them():
    assert {"pools.gpu_blocks", "layout.row_bytes", "log.ring_events"} < set(SIZES)


@pytest.mark.parametrize("path", SIZES)
@pytest.mark.parametrize("value", [1 << 31, 1 << 62, 1 << 64, 10**30])
def test_a_size_of_more_than_32_bits_is_refused_by_name(path, value):
    section, name = path.split(".")
    with pytest.raises(ConfigError) as told:
        checked_config(with_size(path, value))
    assert name in str(told.value) and str(value) in str(told.value)
    valid = HiSparseConfig.model_validate(settings())  # whose sizes are looked at when it is used
    part = getattr(valid, section).model_copy(update={name: value})
    with pytest.raises(CapacityError, match=f"{path}={value} must be at most"):
        HiSparseBackend(valid.model_copy(update={section: part}))


@pytest.mark.parametrize("path", SIZES)
def test_the_largest_size_works_or_is_refused(path):
    with little_memory():
        try:
            HiSparseBackend(with_size(path, SIZE_MAX)).shutdown()
        except ConfigError as error:
            assert re.search(r"(layout|pools|policy|schedule|suffix|log)\.\w+", str(error)), error


@pytest.mark.parametrize("path", ["pools.host_pool_gib", "suffix.gib"])
@pytest.mark.parametrize("gib", [16, 3000, 1 << 20])
def test_a_tier_larger_than_the_machine_is_refused(path, gib):
    with little_memory(), pytest.raises(CapacityError, match=re.escape(path)):
        HiSparseBackend(with_size(path, gib))


def test_a_log_that_nobody_would_read_again_is_not_begun(tmp_path):
    made = settings(pools={"page_size": 1, "host_pool_gib": 3.0}, log={"mode": "ring"})
    assert state_bytes(checked_config(made)) > MAX_STATE_BYTES
    with pytest.raises(CapacityError, match=r"not read again.*pools\.page_size"):
        HiSparseBackend(made, log=tmp_path / "log")
    assert not (tmp_path / "log").exists()
