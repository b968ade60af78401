"""The simulator: a run is a function of its seed, nothing is found in the code as it is, and each
kind of fault whose rule can be seen at once is found where the code breaks that rule."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import msgspec
import pytest
from kinds_rig import found_by

from hisparse.connector.hisparse import HiSparseConnector
from hisparse.device.worker import HiSparseWorker
from hisparse.errors import ConfigError
from hisparse.kv import acknowledgements, coordinator, validate
from hisparse.testing.atlas import ATLAS, marks_of, select
from hisparse.testing.campaign import Campaign, run_campaign
from hisparse.testing.simulator import simulate
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


@contextmanager
def gap_is_skipped():
    as_input = acknowledgements.as_input

    def forgiving(state, acks):
        expected = state.acked[acks.rank] + 1
        if acks.first_seq > expected:
            acks = msgspec.structs.replace(acks, first_seq=expected)
        return as_input(state, acks)

    with mock.patch.object(coordinator, "as_input", forgiving):
        yield


@contextmanager
def rank_applies_whatever_comes():
    with mock.patch.object(HiSparseWorker, "_check", lambda self, command: None):
        yield


@contextmanager
def id_in_use_is_taken():
    with mock.patch.object(validate, "arrival", lambda *asked: None):
        yield


@contextmanager
def ends_name_no_epoch():
    abort = coordinator.HiSparseCoordinator.abort

    def whoever(self, request, epoch, reason="abort"):
        now = [key for key in self.state.requests if key[0] == request]
        abort(self, *(now[-1] if now else (request, epoch)), reason)

    with mock.patch.object(coordinator.HiSparseCoordinator, "abort", whoever):
        yield


@contextmanager
def acknowledgements_are_not_said_again():
    """What a rank said once is gone, whether it arrived or not."""
    get = HiSparseWorker.poll

    def once(self):
        said = get(self)
        if said is not None:
            self.acks.trim(said.last_seq)
        return said

    with mock.patch.object(HiSparseWorker, "poll", once):
        yield


@contextmanager
def epochs_of_transfers_do_not_matter():
    def named(state, idents, epochs):
        return [state.transfers[ident] for ident in idents if ident in state.transfers]

    with mock.patch.object(acknowledgements, "_named", named):
        yield


BROKEN = {
    "ack_gap": gap_is_skipped,
    "command_duplicated": rank_applies_whatever_comes,
    "id_reused": id_in_use_is_taken,
    "stale_epoch": ends_name_no_epoch,
    "ack_lost": acknowledgements_are_not_said_again,
    "ack_foreign_transfer": epochs_of_transfers_do_not_matter,
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
