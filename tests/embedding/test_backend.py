"""`HiSparseBackend`: what an engine writes is what it reads, wherever the rows are meanwhile."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from embedding_rig import Engine, opened, settings

from hisparse import HiSparseBackend
from hisparse.connector.plan import Admitted, Refused, Waiting
from hisparse.errors import InvariantViolation, UsageError

PROMPT = list(range(100, 130))


def test_rows_that_left_the_gpu_are_read_as_they_were_written():
    with opened() as backend:
        engine = Engine(backend)
        assert isinstance(engine.admit("a", PROMPT, 20), Admitted)
        assert isinstance(engine.admit("b", PROMPT[::-1], 20), Admitted)
        engine.prefill("a")
        engine.prefill("b")
        for _ in range(20):
            engine.decode("a", "b")
        assert backend.worker.statistics()["host_rows"] > 0 and engine.rows_read > 500
        backend.finish("a")
        backend.finish("b")
        backend.drain()
        assert not backend.coordinator.checker.violations
    assert backend.device.statistics()["allocated_bytes"] == 0


def test_a_prompt_that_was_computed_before_is_not_computed_again():
    with opened(gpu_blocks=40) as backend:
        engine = Engine(backend)
        engine.admit("a", PROMPT, 20)
        engine.prefill("a")
        for _ in range(9):
            engine.decode("a")
        backend.finish("a")
        backend.drain()
        said = engine.tokens["a"]
        again = engine.admit("b", [*said, 7, 7], 10)  # the next turn of a conversation
        assert again.cached_rows == len(said) // 4 * 4
        other = engine.admit("c", said, 10, salt=b"another adapter")
        assert other.cached_rows == 0
        engine.step({"b": len(said) + 2 - again.cached_rows})
        backend.abort("b")
        backend.abort("c")


def test_who_does_not_fit_waits_and_is_told_of_later():
    with opened(gpu_blocks=12) as backend:
        engine = Engine(backend)
        first = engine.admit("a", PROMPT, 30)
        second = engine.admit("b", PROMPT[::-1], 30)
        third = engine.admit("c", PROMPT[::-1], 30)
        assert isinstance(first, Admitted)
        assert isinstance(second, Waiting) and second.resource == "gpu_blocks"
        assert isinstance(third, Waiting) and third.resource == "queue"
        assert backend.admit("d", PROMPT, 1000) == Refused("d", 4, "max_model_len", 1030, 64)
        assert backend.requests == ("a", "b", "c")
        backend.abort("a")
        told = []
        for _ in range(50):
            told += [*engine.step({}).changes.admitted, *backend.acknowledge().admitted]
        assert [one.request for one in told] == ["b"]
        engine.prefill("b")


def test_a_preempted_request_comes_back_and_finds_what_was_durable():
    with opened() as backend:
        engine = Engine(backend)
        engine.admit("a", PROMPT, 20)
        engine.prefill("a")
        engine.decode("a")
        backend.preempt("a")
        backend.drain()
        back = engine.admit("a", engine.tokens["a"], 19)
        assert back.cached_rows > 0 and back.epoch == 2
        engine.step({"a": len(PROMPT) + 1 - back.cached_rows})
        engine.decode("a")


def test_rejected_drafts_leave_no_trace():
    with opened(schedule={"lookahead_rows": 3}) as backend:
        engine = Engine(backend)
        engine.admit("a", PROMPT, 20)
        engine.prefill("a")
        for kept in (1, 3, 0, 2):
            said = list(engine.tokens["a"])
            engine.tokens["a"] += [1, 2, 3]
            plan = backend.plan_step({"a": [1, 2, 3]})
            backend.begin_step(plan)
            engine.compute(plan)
            backend.end_step({"a": kept})
            engine.tokens["a"] = said + [1, 2, 3][:kept]
        assert backend.coordinator.state.rows.computed[0] == len(PROMPT) + 6
        engine.decode("a")


def test_a_part_of_a_prompt_is_not_accepted_all_or_nothing_is():
    with opened(gpu_blocks=60) as backend:
        engine = Engine(backend)
        engine.admit("a", PROMPT, 20)

        def computed(n):
            backend.begin_step(backend.plan_step({"a": n}))
            engine.compute(backend._plan)
            return backend.coordinator.state.rows.computed[0]

        assert computed(8) == 0
        with pytest.raises(
            UsageError, match=r"first 8 of its 8 are of its prompt.*use 8\.\.8, or 0"
        ):
            backend.end_step({"a": 3})
        backend.end_step({"a": 0})
        assert computed(len(PROMPT)) == 0
        backend.end_step({"a": len(PROMPT)})
        engine.admit("b", PROMPT[::-1], 20)
        engine.tokens["b"] += [1, 2]  # drafts behind the prompt, in one step with it
        plan = backend.plan_step({"b": [*PROMPT[::-1], 1, 2]})
        backend.begin_step(plan)
        engine.compute(plan)
        prompt = plan.granted["b"] - 2
        assert prompt == len(PROMPT)
        with pytest.raises(UsageError, match=f"use {prompt}..{prompt + 2}, or 0"):
            backend.end_step({"b": prompt - 1})
        backend.end_step({"b": prompt + 1})
        del engine.tokens["b"][-1:]
        engine.decode("b")
        engine.decode("a")


def test_a_plan_that_has_not_begun_is_withdrawn():
    with opened(gpu_blocks=14) as backend:
        engine = Engine(backend)
        engine.admit("a", PROMPT, 20)
        engine.prefill("a")
        for _ in range(12):  # pages go to the host: withdrawn plans have copies, too
            engine.decode("a")
            before = backend.coordinator.state.rows.computed[0]
            withdrawn = backend.plan_step({"a": 3})
            backend.abandon_step()
            assert backend.coordinator.state.rows.computed[0] == before
            with pytest.raises(UsageError, match="no step is planned"):
                backend.begin_step(withdrawn)
        assert not backend.coordinator.checker.violations


def test_a_step_that_the_model_failed_in_is_abandoned_and_computed_again():
    with opened() as backend:
        engine = Engine(backend)
        engine.admit("a", PROMPT, 20)
        engine.prefill("a")
        for _ in range(12):
            engine.decode("a")
        wanted = {"a": 1}
        plan = backend.plan_step(wanted)
        backend.begin_step(plan)
        backend.write_index(0, np.zeros((1, 8), np.uint8))
        backend.write(0, np.zeros((1, 32), np.uint8))
        backend.resolve(0, engine.select(plan))  # its follower, layer 1, never does
        backend.abandon_step()
        for _ in range(4):
            engine.decode("a")


def test_a_step_whose_resolve_failed_is_abandoned_and_computed_again():
    with opened() as backend:
        engine = Engine(backend)
        engine.admit("a", PROMPT, 20)
        plan = backend.plan_step({"a": 8})
        backend.begin_step(plan)
        for layer in range(3):
            backend.write(layer, np.zeros((8, 32), np.uint8))
        later = np.full((8, 1), 7, np.int32)  # than the first token, so that checks refuse it
        with pytest.raises(InvariantViolation, match="behind the token"):
            backend.resolve(0, later)
        backend.abandon_step()
        engine.prefill("a")
        engine.decode("a")


def test_a_fault_in_a_step_is_what_leaves_the_backend():
    with pytest.raises(InvariantViolation, match="behind the token"), opened() as backend:
        Engine(backend).admit("a", PROMPT, 20)
        backend.begin_step(backend.plan_step({"a": 8}))
        backend.write(0, np.zeros((8, 32), np.uint8))
        backend.resolve(0, np.full((8, 1), 7, np.int32))
    assert backend.device.statistics()["allocated_bytes"] == 0


def test_a_step_without_rows_is_written_and_read_as_any_other():
    with opened() as backend:
        for width in (6, 3):
            plan = backend.plan_step({})
            backend.begin_step(plan)
            for group in range(2):
                backend.write_index(group, torch.empty(0, 8, dtype=torch.uint8))
            for layer in range(3):
                backend.write(layer, torch.empty(0, 32, dtype=torch.uint8))
                top_k = None if layer == 1 else torch.empty(0, width, dtype=torch.int64)
                rows = backend.resolve(layer, top_k).view(torch.float32)
                assert rows.shape == (0, width, 8)
            backend.end_step()
        assert backend.device.statistics()["compute_ran"] < 10


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_a_decode_step_answers_in_memory_that_is_used_again(kind):
    rows, row = 8, 4096  # rows so wide that an answer outweighs all that finds it
    wide = settings(gpu_blocks=40, policy={"top_k": 24, "hot_rows": 48}, checks="off")
    wide["layout"]["row_bytes"] = row
    wide["pools"]["host_pool_gib"] = 1 / 64
    with HiSparseBackend(wide) as backend:
        backend.admit("a", range(40), rows)
        places: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}
        for at, n in [(0, 32), (32, 8), *[(40 + i, 1) for i in range(rows)]]:
            plan = backend.plan_step({"a": n})
            backend.begin_step(plan)
            top_k = np.tile(np.arange(0, 24, dtype=np.int32), (n, 1)) if at >= 32 else None
            chosen = np.full((n, 1), -1, np.int32) if top_k is None else top_k
            for group in range(2):
                backend.write_index(group, kind(np.zeros((n, 8), np.uint8)))
            for layer in range(3):
                backend.write(layer, kind(np.full((n, row), at, np.uint8)))
                backend.device.synchronize(backend.device.compute)
                tracemalloc.start()
                read = backend.resolve(layer, None if layer == 1 else kind(chosen))
                most = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                if at > 42:  # two steps of this shape have been
                    places[layer].add(np.asarray(read).ctypes.data)
                    assert most < read.nbytes / 2, (layer, most)
            backend.end_step()
        assert all(len(found) == 1 for found in places.values()), places
        assert len(set.union(*places.values())) == 3  # and each layer has its own


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_after_a_request_that_never_had_a_step(level):
    """Indexer pages of its prefix were to be copied with the next step, the one that sleeps."""
    with opened(gpu_blocks=40) as backend:
        engine = Engine(backend)
        engine.admit("a", PROMPT, 20)
        engine.prefill("a")
        backend.finish("a")
        backend.drain()
        assert engine.admit("b", PROMPT, 20).cached_rows
        backend.abort("b")
        assert backend.sleep(level)
        backend.wake_up()
        engine.admit("c", PROMPT, 20)
        engine.prefill("c")
