"""Ranks that are lost and join again, and a scheduler that goes on with a log: production code on
both sides, one thing that happens each."""

from __future__ import annotations

import random
from unittest import mock

import numpy as np
import pytest
from kinds_rig import found_by
from mutants.logs import a_lost_rank_comes_back_to_full_caches

from hisparse.engine.trace import WorkloadRequest
from hisparse.errors import LogDamage, ProtocolError, UsageError
from hisparse.fsm import events as ev
from hisparse.fsm.audit import Audit
from hisparse.fsm.fold import fold
from hisparse.fsm.log import MemoryLog
from hisparse.fsm.rank_order import RankOrder
from hisparse.fsm.snapshot import restore, snapshot
from hisparse.fsm.state import digest
from hisparse.fsm.wire import Ack, AckKind, Acknowledgements
from hisparse.kv import restart
from hisparse.kv.coordinator import HiSparseCoordinator
from hisparse.testing.atlas.scheduler import SchedulerCrash
from hisparse.testing.replica import SimReplica
from hisparse.testing.swarm import Swarm

PROMPT = 24


def replica(ranks=2, seed=21):
    config = Swarm.of(seed, ranks=ranks, kinds=[]).config
    return SimReplica(config, f"restarts {seed}", lags=(0.3,))


def asked(world, name, tokens=PROMPT, more=12):
    size = min(tokens, world.config.schedule.max_model_len - more - 1)
    prompt = np.arange(size, dtype=np.int64) % 90
    return world.submit(WorkloadRequest(name, 0.0, prompt, more))


def stepped(world, steps):
    for _ in range(steps):
        world.step()
    return world


def kinds_of(world, *kinds):
    return [e for _, e in world.log.read(1) if isinstance(e, kinds)]


def test_a_lost_rank_joins_in_a_new_epoch_and_everybody_comes_back():
    world = replica()
    served = asked(world, "a")
    stepped(world, 6)
    before = (served.epoch, list(served.tokens))
    world.crash_rank(1)
    world.settle()
    assert served.outcome == "finished" and served.epoch > before[0]
    assert world.state.worker_epoch == [1, 2] and world.ranks[1].worker.worker_epoch == 2
    (lost,), (joined,) = kinds_of(world, ev.RankLost), kinds_of(world, ev.RankJoined)
    assert lost.worker_epoch == joined.worker_epoch == 2
    audit = Audit(world.config)
    assert all(audit.take(seq, event) for seq, event in world.log.read(1))
    audit.finish()
    assert audit.violations == [] and digest(audit.state) == world.coordinator.digest()


def test_nobody_is_admitted_and_nothing_is_found_before_the_rank_is_back():
    world = replica()
    asked(world, "a")
    stepped(world, 30)
    assert world.state.prefix, "something is cached"
    world.ranks[1].die()
    world.connector.lose_rank(1)
    late = asked(world, "late")
    for _ in range(3):
        world.engine.step()  # nobody starts the rank again
    assert world.state.requests[late.key].row < 0 and late.key in world.state.waiting
    assert world.connector.join_rank(1) is not None
    assert not world.state.prefix and not world.state.index_prefix and not world.state.suffix_index
    world.coordinator.admit_waiting()
    assert world.state.requests[late.key].row >= 0
    assert world.state.requests[late.key].hit_tokens == 0


def test_a_rank_cannot_join_before_others_have_let_go_of_what_it_lost():
    world = replica()
    asked(world, "a")
    stepped(world, 3)
    world.ranks[1].die()
    world.connector.lose_rank(1)
    assert world.state.requests, "rank 0 has not said that it is done"
    assert world.connector.join_rank(1) is None and not kinds_of(world, ev.RankJoined)


def test_what_a_lost_rank_says_is_inert():
    world = replica()
    asked(world, "a")
    stepped(world, 4)
    words = Acknowledgements(1, 1, world.state.acked[1] + 1, (Ack(AckKind.RETIRED, 1),))
    world.connector.lose_rank(1)
    before = world.coordinator.digest()
    assert not world.coordinator.update_acknowledgements(words)
    assert world.coordinator.digest() == before


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_is_not_cannot_be_lost_or_join(rank):
    world = replica()
    for verb in (world.coordinator.lose_rank, lambda n: world.coordinator.join_rank(n, 0)):
        with pytest.raises(UsageError, match=r"this replica has ranks 0\.\.1"):
            verb(rank)
    with pytest.raises(UsageError, match="was not lost"):
        world.coordinator.join_rank(0, 0)


def test_a_command_is_for_the_epoch_of_each_rank():
    world = replica()
    stepped(world, 2)
    world.crash_rank(1)
    stepped(world, 6)
    assert [rank.worker.worker_epoch for rank in world.ranks] == [1, 2]
    old = world.make_rank(1, worker_epoch=1, at_seq=world.connector.position)
    world.coordinator.plan_step([], [])
    meta = world.connector.build_connector_meta()
    with pytest.raises(ProtocolError, match="command of worker epoch 2, this is epoch 1"):
        old.connector.start_load_kv(meta)
    for rank in world.ranks:
        rank.connector.start_load_kv(meta)


def test_the_accesses_of_two_workers_of_a_rank_do_not_race():
    """`hisparse check`, of a rank's stream that goes on over the rank's death."""
    said = {0: [], 1: []}

    class Heard(SimReplica):
        def make_rank(self, number, device=None, **more):
            return super().make_rank(number, device, sink=said[number].append, **more)

    world = Heard(Swarm.of(21, ranks=2, kinds=[]).config, "heard", lags=(0.97,))
    for i in range(8):
        asked(world, f"q{i}")
        stepped(world, 5)
        world.crash_rank(1)
        stepped(world, 9)
    world.settle()
    audit = Audit(world.config)
    sizes = len(audit.state.blocks.state), len(audit.state.pages.state)
    orders = [RankOrder(f"rank-{n}", list(enumerate(said[n], 1)), *sizes) for n in said]
    for seq, event in world.log.read(1):
        assert audit.take(seq, event)
        for order in orders:
            order.folded(seq, event, audit.state)
    for order in orders:
        order.finish()
        assert order.clocks.found == [] and order.steps > 20


def test_a_snapshot_knows_that_a_rank_is_lost():
    world = replica()
    stepped(world, 2)
    world.connector.lose_rank(0)
    again = restore(world.config, snapshot(world.state))
    assert again.lost == 1 and digest(again) == world.coordinator.digest()


def test_a_scheduler_goes_on_with_its_log_and_what_was_cached_is_found():
    world = replica()
    asked(world, "a")
    stepped(world, 40)
    findable = dict(world.state.prefix)
    open_ = asked(world, "b", more=8)
    stepped(world, 3)
    world.crash_scheduler()
    assert world.state.lost == 0, "the ranks are where the log is"
    assert open_.outcome == "failed"
    assert findable and set(findable) <= set(world.state.prefix)
    hit = asked(world, "a-again")
    stepped(world, 1)
    assert world.state.requests[hit.key].hit_tokens > 0
    world.settle()


@pytest.mark.parametrize("seed", range(4))
def test_a_log_that_ends_in_the_middle_of_anything_can_be_gone_on_with(seed):
    """Cut after every single event: each recovers, drains, and serves."""
    world = replica(ranks=2, seed=20 + seed)
    rng = random.Random(seed)
    for i in range(8):
        asked(world, f"q{i}", tokens=rng.randrange(8, 40), more=rng.randrange(2, 8))
        stepped(world, rng.randrange(1, 4))
    events = [event for _, event in world.log.read(1)]
    for cut in range(0, len(events), 3):
        log = MemoryLog(None)
        for event in events[:cut]:
            log.append(event)
        log.commit()
        made = HiSparseCoordinator.recover(world.config, log)
        for rank in range(2):
            made.lose_rank(rank)
        assert not made.state.requests and not made.state.transfers, cut
        assert all(made.join_rank(rank, made.state.seq) for rank in range(2)), cut
        assert made.checker.violations == [], (cut, made.checker.violations[0])
        assert digest(fold(world.config, log.read(1))) == made.digest(), cut


def test_a_rank_beyond_the_end_of_the_log_is_lost():
    """It did what the log does not know of: nothing that it holds can be trusted."""
    world = replica()
    asked(world, "a")
    stepped(world, 5)
    kept = MemoryLog(None)
    for _, event in world.log.since(0, world.connector.position - 4):
        kept.append(event)
    kept.commit()
    assert world.restarts.reopen(kept) == [0, 1]
    assert world.state.lost == 0b11
    asked(world, "b")
    world.settle()


def test_a_rank_that_joined_in_an_end_that_the_log_lost_is_lost_again():
    """Its epoch is the one that the log gave out and its cursor is where the log ends; what it has
    said since is not to be taken for the next one's."""
    world = replica()
    stepped(world, 3)
    world.connector.lose_rank(1)
    kept = MemoryLog(None)
    for _, event in world.log.since(0, world.state.seq):
        kept.append(event)
    kept.commit()
    world.open(HiSparseCoordinator.recover(world.config, kept))
    given_out, end = world.state.worker_epoch[1], world.coordinator.recovered_seq
    assert 1 in world.connector.attach({1: (given_out, end)})
    assert world.state.worker_epoch[1] == given_out + 1, "an epoch names one worker"


def test_a_rank_that_has_not_begun_an_accepted_step_is_lost():
    """Its rows were never written there, however well it would continue the log."""
    world = replica(ranks=1)
    asked(world, "a")
    stepped(world, 3)
    world.ranks[0].behind_until = world.now + 3
    stepped(world, 2)
    assert world.ranks[0].inbox and world.state.rows.computed.any()
    world.crash_scheduler(keep_inboxes=False)
    assert world.state.lost == 0b1
    world.settle()


def test_an_empty_log_recovers_to_nothing():
    world = replica()
    made = HiSparseCoordinator.recover(world.config, MemoryLog(None))
    assert made.state.seq == 0 and made.log.last_seq == 0


def test_a_log_with_a_gap_is_not_gone_on_with():
    log = MemoryLog(None)
    log.append(ev.LogGap(0, 0, "disk full"))
    log.commit()
    with pytest.raises(LogDamage, match="or with an empty log"):
        HiSparseCoordinator.recover(replica().config, log)


# -- without it, the simulator finds out -----------------------------------------------------------


def test_caches_that_outlive_a_lost_rank_are_read_as_other_bytes():
    with a_lost_rank_comes_back_to_full_caches():
        assert found_by("rank_crash", seeds=60, steps=120) == "content"


def test_copies_that_wait_for_a_lost_rank_never_settle():
    def nothing(state, rank, seq):
        return ev.AcknowledgementsTaken(seq, rank, 0, 0, 0, (), (), (), (), (), (), 0)

    with mock.patch.object(restart, "unanswered", nothing):
        assert found_by("rank_crash", ranks=2, steps=120) in ("progress", "rank_quorum")


def test_words_that_were_taken_in_and_not_acted_on_are_lost_with_the_scheduler():
    def forget(state, last, suffix, cause):
        return complete(state, None, suffix, cause)

    complete = restart.complete
    often = mock.patch.object(SchedulerCrash, "rates", (0.1,))
    with mock.patch.object(restart, "complete", forget), often:
        assert found_by("scheduler_crash", seeds=60, steps=120) in ("progress", "survives")
