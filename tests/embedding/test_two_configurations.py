"""Halves that were made from different configurations find out at the first step, in one error."""

from __future__ import annotations

from dataclasses import replace

import pytest
from embedding_rig import settings

from hisparse import SchedulerConnector, WorkerConnector
from hisparse.errors import ConfigError, ProtocolError

OTHER = {
    "pools.gpu_blocks": (settings(gpu_blocks=27), "27 there, 26 here"),
    "pools.page_size": (settings(pools={"page_size": 8}), "8 there, 4 here"),
    "pools.host_pool_gib": (settings(host_pages=201), "there"),
    "layout.row_bytes": (settings(layout={"row_bytes": 64}), "64 there, 32 here"),
    "layout.index_groups": (settings(layout={"index_groups": [[0], [1, 2]]}), "there"),
    "policy.hot_rows": (settings(policy={"hot_rows": 13}), "13 there, 12 here"),
    "schedule.max_model_len": (settings(schedule={"max_model_len": 63}), "63 there, 64 here"),
    "suffix.name": (settings(suffix={"name": "cpu"}), "cpu there, none here"),
    "ranks": (settings(ranks=2), "2 there, 1 here"),
}


@pytest.mark.parametrize("field", OTHER)
def test_a_plan_of_another_configuration_is_refused_by_field_and_both_values(field):
    config, values = OTHER[field]
    scheduler, rank = SchedulerConnector(config), WorkerConnector(settings())
    with pytest.raises(ConfigError, match=f"{field} is .*{values}"):
        rank.begin_step(scheduler.plan_step({}).to_bytes())
    assert not rank.in_step and rank.worker.to_seq == 0
    right = SchedulerConnector(settings())  # nothing was changed: it serves who agrees
    rank.begin_step(right.plan_step({}).to_bytes())
    rank.end_step()


def test_all_fields_that_differ_are_named_at_once():
    scheduler = SchedulerConnector(settings(gpu_blocks=40, policy={"top_k": 5}))
    with pytest.raises(ConfigError, match=r"policy\.top_k is 5.*pools\.gpu_blocks is 40"):
        WorkerConnector(settings()).begin_step(scheduler.plan_step({}))


def test_what_only_one_half_reads_may_differ():
    made = settings(
        checks="off",
        log={"mode": "off"},
        policy={"watermark_blocks": 1, "on_copy_failure": "fail"},
        schedule={"prefill_chunk": 7},
    )
    scheduler, rank = SchedulerConnector(made), WorkerConnector(settings())
    rank.begin_step(scheduler.plan_step({}).to_bytes())
    rank.end_step()


def test_a_plan_that_does_not_say_its_sizes_is_refused():
    plan, rank = SchedulerConnector(settings()).plan_step({}), WorkerConnector(settings())
    for sizes in ("", "[1]", "3"):
        with pytest.raises(ProtocolError, match="pass what plan_step made"):
            rank.begin_step(replace(plan, sizes=sizes).to_bytes())
    rank.begin_step(plan.to_bytes())


@pytest.mark.parametrize("rank", [5, 1, -1, True, "0", None])
def test_a_rank_that_the_configuration_does_not_have_is_refused(rank):
    with pytest.raises(ConfigError, match=r"rank=.*ranks=1, so rank must be an int in 0\.\.0"):
        WorkerConnector(settings(), rank=rank)
