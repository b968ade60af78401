"""The waits between streams on a GPU: a kernel holds one stream, and who must wait for it does.

The scenarios are those of the simulated streams. Without the wait that a scenario is about, the
other streams run ahead of the one that is held, and real bytes go wrong.
"""

from __future__ import annotations

import pytest
import test_device_suffix
import test_device_waits
from backends import stall
from device_rig import Rig

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

HOLD_MS = 40
HELD = {  # the stream that a wait waits for
    "compute_after_spill": "d2h",
    "d2h_after_compute": "compute",
    "h2d_after_compute": "compute",
    "compute_after_restore": "h2d",
}
PAGES = [(name, test_device_waits.SCENARIOS[name], Rig) for name in HELD]
INDEX = [
    (name, scenario, test_device_suffix.suffix_rig)
    for name, scenario in test_device_suffix.SCENARIOS.items()
]
CASES = pytest.mark.parametrize(
    ("name", "scenario", "make_rig"),
    [*PAGES, *INDEX],
    ids=[*(f"page {name}" for name, *_ in PAGES), *(f"index {name}" for name, *_ in INDEX)],
)


def play(scenario, make_rig, name, without=None):
    """Whether bytes were right. Kernels are loaded by a first time, in which nothing is held."""
    scenario(make_rig())
    rig = make_rig(without=without)
    begin = rig.begin

    def held(**fields):
        """Hold the stream before each step that copies."""
        if fields.get("transfers") or fields.get("index_transfers") or HELD[name] == "compute":
            stall(rig.device, HELD[name], HOLD_MS)
        begin(**fields)

    rig.begin = held
    return scenario(rig)


@CASES
def test_with_the_wait_bytes_are_right_however_long_a_stream_is_held(name, scenario, make_rig):
    assert play(scenario, make_rig, name)


@CASES
def test_without_the_wait_bytes_go_wrong(name, scenario, make_rig):
    assert not play(scenario, make_rig, name, without=name)
