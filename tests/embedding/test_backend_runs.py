"""Whole runs through the public names: copies that fail, logs that are checked, several ranks."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from click.testing import CliRunner
from embedding_rig import INDEX_ROW, ROW, Engine, rows_of, settings
from test_embedding_docs import titled

from hisparse import HiSparseBackend, SchedulerConnector, StepPlan, WorkerConnector
from hisparse.cli import cli
from hisparse.fsm.log import MemoryLog

PROMPT = list(range(100, 130))


@pytest.fixture(scope="module")
def page():
    """The names of the example engine of docs/embedding.md."""
    names = {"__name__": "page"}
    for title in ("model.py", "engine.py"):
        text = titled("python")[title].replace("from model import CONFIG, Model\n", "")
        exec(compile(text, title, "exec", dont_inherit=True), names)
    return names


def served(page, **how):
    """Tokens that the example engine generates for four prompts, and what the log counted."""
    with HiSparseBackend(page["CONFIG"], **how) as backend:
        engine = page["Engine"](backend, page["Model"]())
        for i in range(4):
            engine.submit(f"r{i}", [(7 * i + 13 * t) % 512 for t in range(330)], max_new=30)
        for _ in range(2000):
            if engine.live:
                engine.step()
        assert not engine.live
        return engine.done, backend.statistics()["events"]


def test_copies_that_fail_cost_time_or_the_request_and_no_token(page):
    plain, _ = served(page)
    done = rewinds = 0
    for rate in (0.1, 0.3, 0.6):
        rng = random.Random(0)
        tokens, counts = served(page, copy_fault=lambda _, r=rng, p=rate: r.random() < p)
        assert all(said == plain[name] for name, said in tokens.items())
        assert len(tokens) + counts["requests_failed"] == len(plain) == 4
        done += len(tokens)
        rewinds += counts["rewinds"]
    assert rewinds > 2 and 4 < done < 12


def test_who_fails_with_a_copy_is_told_of_and_gone():
    failing = settings(policy={"on_copy_failure": "fail"}, pools={"gpu_blocks": 14}, checks="off")
    with HiSparseBackend(failing, copy_fault=lambda transfer: True) as backend:
        backend.admit("a", PROMPT, 30)
        told = []
        for at in range(60):
            if "a" not in backend.requests:
                break
            n = 6 if at < 5 else 1
            plan = backend.plan_step({"a": n})
            told += plan.changes.failed
            backend.begin_step(plan)
            for group in range(2):
                backend.write_index(group, np.zeros((len(plan), INDEX_ROW), np.uint8))
            for layer in range(3):
                backend.write(layer, np.zeros((len(plan), ROW), np.uint8))
            backend.end_step()
        assert told == ["a"] and backend.requests == ()
        assert backend.statistics()["events"]["requests_failed"] == 1


def test_a_run_on_disk_is_checked_and_replayed_from_its_log_alone(tmp_path):
    with HiSparseBackend(settings(), log=tmp_path / "run") as backend:
        engine = Engine(backend)
        engine.admit("a", PROMPT, 20)
        engine.admit("b", PROMPT[::-1], 20)
        engine.prefill("a")
        engine.prefill("b")
        for _ in range(20):
            engine.decode("a", "b")
        backend.finish("a")
        backend.preempt("b")
    digest = backend.coordinator.digest()

    def hisparse(verb):
        done = CliRunner().invoke(cli, [verb, str(tmp_path / "run")], prog_name="hisparse")
        assert done.exit_code == 0, done.output  # 1: a violation
        return done.output

    assert digest in hisparse("replay")
    assert re.search(r"checked +.*content.*", hisparse("check"))
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"scheduler", "rank-0"}


def test_every_rank_gets_the_plan_and_answers_for_itself():
    config = settings(gpu_blocks=14, ranks=2)
    scheduler = SchedulerConnector(config, log=MemoryLog(None))
    ranks = [WorkerConnector(config, rank=i) for i in range(2)]
    tokens, read = list(PROMPT), 0
    scheduler.admit("a", tokens, 30)
    computed = 0
    while len(tokens) < 55:
        message = scheduler.plan_step({"a": tokens[computed : computed + 8]}).to_bytes()
        n = StepPlan.from_bytes(message).granted.get("a", 0)
        for rank in ranks:
            plan = rank.begin_step(message)
            at = plan.rows.positions
            for group in range(2):
                rank.write_index(group, rows_of(tokens, 100 + group, INDEX_ROW)[at])
            for layer in range(3):
                rows = rows_of(tokens, 10 * rank.worker.rank + layer)  # each has rows of its own
                rank.write(layer, rows[at])
                top_k = np.stack([at, at // 2, at // 3], axis=1).astype(np.int32)
                found = rank.resolve(layer, None if layer == 1 else top_k)
                assert np.array_equal(found, rows[top_k])
                read += len(at)
            rank.end_step()
        scheduler.end_step()
        for rank in ranks:
            scheduler.acknowledge(rank.acknowledgements())
        computed += n
        if computed == len(tokens):
            tokens.append(computed)
    assert all(rank.worker.statistics()["host_rows"] for rank in ranks) and read > 100
    scheduler.shutdown()
    for rank in ranks:
        rank.shutdown()
