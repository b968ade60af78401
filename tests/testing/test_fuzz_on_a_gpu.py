"""Simulated worlds whose ranks are on a GPU: real copies, streams held open by kernels."""

from __future__ import annotations

import pytest
from device_rig import knock_out

from hisparse.testing import on_gpu
from hisparse.testing.campaign import run_campaign
from hisparse.testing.on_gpu import CudaReplica, simulate_on_gpu
from hisparse.testing.swarm import Swarm

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]


def test_worlds_in_which_faults_strike_hold_on_a_gpu():
    campaign = run_campaign([0, 5, 8, 13], run=simulate_on_gpu, steps=100, asks_marks=False)
    assert not campaign.red, campaign.found[0].told()
    report = campaign.report()
    assert report["rows_checked"] > 20_000 and report["faults"]["stream_held"] > 5
    assert sum(hits > 0 for hits in report["sometimes"].values()) > 20


@pytest.mark.parametrize(
    "edge",
    ["compute_after_spill", "d2h_after_compute", "h2d_after_compute", "compute_after_restore"],
)
def test_without_an_ordering_edge_a_world_on_a_gpu_does_not_hold(edge, monkeypatch):
    """What the property is about happens: else it would hold for nothing."""

    class Unordered(CudaReplica):
        def make_rank(self, number, device=None, **more):
            rank = super().make_rank(number, device, **more)
            knock_out(rank.worker.transfers, edge)
            return rank

    monkeypatch.setattr(on_gpu, "STALLS_NS", (20_000_000,))
    for seed in range(8):
        swarm = Swarm.of(seed, ranks=1, steps=80, kinds=())
        violation = simulate_on_gpu(seed, swarm, Unordered).violation
        if violation is not None:
            assert violation.invariant == "content", violation
            return
    raise AssertionError(f"{edge} left out, and no world shows it")
