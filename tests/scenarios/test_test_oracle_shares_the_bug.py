"""H10: the views of all layers share one base offset; a test that compares a run without offload
with one that offloads passes, because both are wrong alike.

Here tests compare with a model of rows that shares nothing with the tiers: bytes are a function of
(tokens, layer), written by one side and known to the other. The defect is put in on purpose: what
compares the library with itself passes, what compares it with the model fails, and neither would
have run, since views that overlap are refused when they are bound.
"""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
from byte_rig import ByteRig
from kv_rig import make_config

from hisparse.config import ModelLayout
from hisparse.device import binding
from hisparse.device.layout import Geometry
from hisparse.errors import InvariantViolation


class Recorded(ByteRig):
    """Keeps what was read, instead of comparing it with the model."""

    def __init__(self, config):
        super().__init__(config, lag=0.0, seed=5)
        self.read = []

    def _expect(self, pending, want):
        pending.on_done(lambda data: self.read.append((data.copy(), want)))


@contextmanager
def one_base_for_all_layers(*, bound=True):
    """Resident and hot rows of every layer lie where those of layer 0 do."""
    right = Geometry.resident_span

    def wrong(self, layer):
        return dataclasses.replace(right(self, layer), offset=0)

    with mock.patch.object(Geometry, "resident_span", wrong):
        if bound:
            yield
            return
        with mock.patch.object(binding, "check_disjoint_views", lambda views: None):
            yield


def served(policy):
    layout = ModelLayout(row_bytes=32, index_row_bytes=8, index_groups=((0, 1, 2),))
    rig = Recorded(make_config(name=policy).model_copy(update={"layout": layout}))
    rig.arrive("q", list(range(40)), new=12)
    for _ in range(10):
        rig.step()
        rig.poll()
    rig.device.synchronize(None)
    return rig


def same(a, b):
    return all(np.array_equal(x, y) for (x, _), (y, _) in zip(a.read, b.read, strict=True))


def right(rig):
    return all(np.array_equal(got, want) for got, want in rig.read)


def test_comparing_the_library_with_itself_does_not_see_it_and_the_model_of_rows_does():
    with one_base_for_all_layers(bound=False):
        resident, offloaded = served("hybrid"), served("host_first")
    assert same(resident, offloaded), "a before-and-after test passes"
    assert not right(resident) and not right(offloaded)


def test_without_the_defect_both_agree():
    resident, offloaded = served("hybrid"), served("host_first")
    assert same(resident, offloaded) and right(resident) and right(offloaded)
    host_rows = [rig.worker.statistics()["host_rows"] for rig in (resident, offloaded)]
    assert host_rows[0] == 0 < host_rows[1], "one never reads the host tier, the other does"


def test_the_rig_of_these_scenarios_sees_it():
    with one_base_for_all_layers(bound=False), pytest.raises(AssertionError, match="not its own"):
        rig = ByteRig(make_config(), lag=0.0)
        rig.arrive("q", list(range(40)))
        for _ in range(3):
            rig.step()
            rig.device.synchronize(None)


def test_views_that_overlap_are_refused_at_bind():
    with one_base_for_all_layers(), pytest.raises(InvariantViolation, match="share bytes"):
        ByteRig(make_config())
