"""Calls that the contract forbids for what went before them, and what is never opened."""

from __future__ import annotations

from dataclasses import replace

import pytest
from embedding_rig import INDEX_ROW, ROW, Engine, opened, settings
from misuse_world import PROMPT, World

from hisparse import HiSparseBackend, SchedulerConnector, WorkerConnector
from hisparse.errors import ConfigError, LogError, ProtocolError, UsageError
from hisparse.fsm.log import MemoryLog


def test_a_follower_does_not_resolve_before_its_leader_nor_choose():
    world = World("written")
    world.backend.write(1, world.zeros(ROW))
    before = world.fingerprint()
    with pytest.raises(UsageError, match="leader 0 has not resolved"):
        world.backend.resolve(1)
    with pytest.raises(UsageError, match="pass None"):
        world.backend.resolve(1, world.top_k(0))
    assert world.fingerprint() == before
    world.go_on()


def test_a_step_does_not_end_before_followers_resolved():
    world = World("begun")
    for layer in range(3):
        world.backend.write(layer, rows := world.zeros(ROW))
    for group in range(2):
        world.backend.write_index(group, rows[:, :INDEX_ROW].copy())
    world.backend.resolve(0, world.top_k(0))
    before = world.fingerprint()
    with pytest.raises(UsageError, match=r"layers \[1\] did not gather"):
        world.backend.end_step()
    assert world.fingerprint() == before
    world.backend.resolve(1)
    world.go_on()


def test_a_prompt_is_not_computed_from_other_tokens():
    world = World("idle")
    world.backend.abort("a")
    assert any(world.engine.step({}).changes.admitted for _ in range(50))
    before = world.fingerprint()
    with pytest.raises(UsageError, match="pass the next ones, or their number"):
        world.backend.plan_step({"w": [*PROMPT[::-1][:4], 5]})
    assert world.fingerprint() == before
    world.engine.prefill("w")


def test_what_has_computed_all_is_to_be_finished():
    with opened() as backend:
        engine = Engine(backend)
        engine.admit("a", PROMPT, 4)
        engine.prefill("a")
        for _ in range(4):
            engine.decode("a")
        before = backend.coordinator.digest()
        with pytest.raises(UsageError, match="computed all 24 that it was admitted for: finish it"):
            backend.plan_step({"a": 1})
        assert backend.coordinator.digest() == before
        backend.finish("a")


def test_a_request_is_finished_once_and_after_its_prompt():
    world = World("idle")
    world.backend.abort("w")
    before = world.fingerprint()
    world.engine.admit("short", [1, 2, 3], 4)
    with pytest.raises(UsageError, match="must be DECODE"):
        world.backend.finish("short")
    world.backend.abort("short")
    assert world.fingerprint() != before
    world.backend.finish("a")
    before = world.fingerprint()
    with pytest.raises(UsageError, match="has ended"):
        world.backend.finish("a")
    with pytest.raises(UsageError, match="has ended"):
        world.backend.plan_step({"a": 1})
    assert world.fingerprint() == before


def test_drain_says_who_has_not_ended():
    world = World("idle")
    with pytest.raises(UsageError, match=r"\('a', 2\).*finish or abort"):
        world.backend.drain()
    world.go_on()


def test_two_engines_do_not_share_a_log(tmp_path):
    log = MemoryLog(None)
    with HiSparseBackend(settings(), log=log):
        with pytest.raises(UsageError, match="a log of its own"):
            HiSparseBackend(settings(), log=log)
        with pytest.raises(UsageError, match="a log of its own"):
            SchedulerConnector(settings(), log=log)
    with HiSparseBackend(settings(), log=tmp_path / "one") as backend:
        engine = Engine(backend)
        engine.admit("a", PROMPT, 8)
        engine.prefill("a")
        before = backend.coordinator.digest(), backend.coordinator.log.last_seq
        with pytest.raises(LogError, match="a directory of its own"):
            HiSparseBackend(settings(), log=tmp_path / "one")
        assert before == (backend.coordinator.digest(), backend.coordinator.log.last_seq)
        engine.decode("a")
    for _ in range(2):  # who was refused holds no lock
        with pytest.raises(
            UsageError, match=r"one' already holds a log of .* give an empty directory"
        ):
            HiSparseBackend(settings(), log=tmp_path / "one")


def test_what_is_shut_down_says_so():
    backend = opened()
    backend.shutdown()
    backend.shutdown()
    for call in (lambda: backend.admit("a", PROMPT, 5), lambda: backend.plan_step({}),
                 backend.acknowledge, backend.drain, backend.end_step):  # fmt: skip
        with pytest.raises(UsageError, match="make another one"):
            call()
    for call in (lambda: backend.write(0, World.zeros(ROW)), lambda: backend.finish("a")):
        with pytest.raises(UsageError):
            call()


def test_a_configuration_that_offloads_nothing_or_has_ranks_is_refused():
    with pytest.raises(ConfigError, match="use 'hybrid'") as caught:
        HiSparseBackend(settings(policy={"name": "resident"}))
    assert caught.value.fixes == {"policy.name": "hybrid"}
    with pytest.raises(ConfigError, match="one SchedulerConnector"):
        HiSparseBackend(settings(ranks=2))
    with pytest.raises(ConfigError, match="gpu_blocks"):
        HiSparseBackend(settings(gpu_blocks=3))


# -- the halves ------------------------------------------------------------------------------------


def test_bytes_that_the_other_half_did_not_make_are_refused_and_change_nothing():
    scheduler, rank = SchedulerConnector(settings()), WorkerConnector(settings())
    scheduler.admit("a", PROMPT, 8)
    plan = scheduler.plan_step({"a": 8})
    message = plan.to_bytes()
    for spoilt in (b"", b"\xc1", message[:-1], message[1:], b"\x90", "junk", None):
        with pytest.raises(ProtocolError, match="no StepPlan"):
            rank.begin_step(spoilt)
    with pytest.raises(ProtocolError, match="no message of a command"):
        rank.begin_step(replace(plan, command=b"\xc1"))
    assert rank.worker.to_seq == 0 and not rank.in_step
    rank.begin_step(message)
    rank.abandon_step()
    scheduler.end_step({"a": 0})
    digest = scheduler.coordinator.digest()
    for spoilt in (b"\xc1", b"\x93", message, "junk", [1]):
        with pytest.raises(ProtocolError, match="no message of acknowledgements"):
            scheduler.acknowledge(spoilt)
    assert scheduler.coordinator.digest() == digest
    scheduler.acknowledge(rank.acknowledgements())
    with pytest.raises(ProtocolError, match="does not continue"):
        rank.begin_step(message)
    scheduler.shutdown()
    rank.shutdown()
