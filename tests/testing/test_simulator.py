"""The simulator: a run is a function of its seed, nothing is found in the code as it is, and each
kind of fault whose rule can be seen at once is found where the code breaks that rule."""

from __future__ import annotations

from unittest import mock

import pytest
from kinds_rig import found_by
from mutants import acknowledgements, admission, ends, streams

from hisparse.connector.hisparse import HiSparseConnector
from hisparse.errors import ConfigError
from hisparse.testing import simulator
from hisparse.testing.atlas import ATLAS, marks_of, select
from hisparse.testing.campaign import Campaign, run_campaign
from hisparse.testing.simulator import Simulation, simulate
from hisparse.testing.swarm import Swarm


@pytest.mark.parametrize("seeds", [range(i, i + 4) for i in range(0, 12, 4)], ids=str)
def test_in_worlds_where_everything_goes_wrong_nothing_is_violated(seeds):
    for seed in seeds:
        result = simulate(seed)
        assert result.violation is None, (seed, result.violation)
        assert set(result.sometimes) <= set(marks_of(ATLAS, 3)), seed


def test_a_run_is_a_function_of_its_seed():
    first, again = simulate(3), simulate(3)
    assert first.fired and first.fired == again.fired and first.sometimes == again.sometimes
    assert (first.digest, first.events, first.rows_checked) == (
        again.digest,
        again.events,
        again.rows_checked,
    )


def test_leaving_a_kind_out_leaves_what_others_draw():
    swarm = Swarm.of(3)
    kept = next(iter(swarm.faults))
    assert Swarm.of(3, kinds=[kept]).config == swarm.config
    assert [Swarm.of(3, kinds=[kept, other]).faults.get(kept) for other in ("ack_gap", "ack_cut")]


BROKEN = {
    "ack_gap": acknowledgements.gap_in_acknowledgements_passed_over,
    "ack_lost": acknowledgements.acknowledgements_said_once,
    "ack_foreign_transfer": acknowledgements.acknowledgements_name_no_epoch,
    "command_duplicated": streams.commands_apply_wherever_they_begin,
    "dummy_step": streams.dummy_steps_compute_row_0,
    "id_reused": admission.id_in_use_is_taken,
    "stale_epoch": admission.ends_name_no_epoch,
    "late_abort": ends.late_abort_forgets_the_request,
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_rule_is_found_by_the_kind_that_tries_it(kind):
    with BROKEN[kind]():
        found_by(kind)


def test_a_log_that_shows_the_fault_gives_a_witness():
    publish = HiSparseConnector.update_connector_output

    def deaf(self, output):
        """Every copy is said to be complete that was planned."""
        state = self.coordinator.state
        for copy in state.transfers.values():
            copy.completed = copy.writers
        publish(self, output)

    with mock.patch.object(HiSparseConnector, "update_connector_output", deaf):
        campaign = run_campaign(range(20), kinds=[], steps=60)
    assert campaign.found and campaign.report()["violations"][0]["invariant"]


def test_marks_that_no_seed_hit_make_a_campaign_red():
    campaign = Campaign(("ack_lost", "ack_late"), None, seeds=[0, 1])
    campaign.sometimes["ack_lost"] = 3
    assert campaign.marks_missing == ["ack_late"] and campaign.red
    campaign.sometimes["ack_late"] = 1
    assert not campaign.red
    assert Campaign(("ack_lost",), None, seeds=[0]).marks_missing == []  # a repetition


def test_faults_are_named_by_kind_or_family_and_left_out_by_a_minus():
    assert select("") == tuple(ATLAS)
    assert select("copies,-copy_partial") == ("copy_failed",)
    assert set(select("-acknowledgements")) == {
        kind for kind, fault in ATLAS.items() if fault.family != "acknowledgements"
    }
    with pytest.raises(ConfigError, match=r"'ack_lots' is no kind of fault: use one of ack_lost"):
        select("ack_lots")


def test_the_longest_request_of_each_world_cannot_stay_resident_nor_the_gpu_hold_all_of_the_host():
    for seed in range(200):
        config = Swarm.of(seed).config
        assert config.max_pages > config.backed_pages, seed
        assert config.pools.gpu_blocks <= config.host_pages, seed


def test_a_world_that_would_never_spill_is_filled_until_it_does(monkeypatch):
    def spills():
        return Simulation(9, Swarm.of(9, ranks=1, steps=90, kinds=())).run().counts["spills"]

    assert spills() > 0
    monkeypatch.setattr(simulator, "RUSH_FROM", 1)
    assert spills() == 0
