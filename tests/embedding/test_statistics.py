"""Every part that an engine's author meets has `statistics()`: plain numbers, by the names that are
on the page."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from embedding_rig import Engine, settings
from msgspec.structs import asdict

import hisparse
from hisparse.connector.scheduler import SchedulerConnector
from hisparse.connector.worker import WorkerConnector
from hisparse.device.cpu.streams import SimDevice
from hisparse.device.handle import HiSparseCacheHandle, IndexCache
from hisparse.device.worker import HiSparseWorker
from hisparse.fsm.log import MemoryLog
from hisparse.fsm.log_disk import DiskLog
from hisparse.fsm.metrics import NAMES, Metrics
from hisparse.kv.coordinator import HiSparseCoordinator
from hisparse.kv.managers import (
    HiSparseHotManager,
    HiSparseIndexManager,
    HiSparseResidentManager,
)
from hisparse.kv.suffix_cpu import CpuSuffix

PAGE = (Path(__file__).parents[2] / "docs" / "embedding.md").read_text(encoding="utf-8")
MANAGERS = (HiSparseResidentManager, HiSparseIndexManager, HiSparseHotManager)
PARTS = [
    *(hisparse.HiSparseBackend, SchedulerConnector, HiSparseCoordinator, Metrics, CpuSuffix),
    *(*MANAGERS, MemoryLog, DiskLog, WorkerConnector, HiSparseWorker),
    *(HiSparseCacheHandle, IndexCache, SimDevice),
]


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """What each part says, after two requests that share a prefix have come to decode."""
    config, log = settings(suffix={"name": "cpu", "gib": 1e-4}), tmp_path_factory.mktemp("log")
    with hisparse.HiSparseBackend(config, log=log) as backend:
        engine = Engine(backend)
        for name in "ab":
            cached = engine.admit(name, range(30), 9).cached_rows
            engine.step({name: 30 - cached})
            for _ in range(4):
                engine.decode(name)
        coordinator, worker = backend.coordinator, backend.worker
        made = [backend, backend.scheduler, coordinator, coordinator.metrics, coordinator.suffix]
        made += [manager(coordinator.state) for manager in MANAGERS]
        made += [MemoryLog(None), coordinator.log, backend.rank, worker]
        made += [worker.handles[0], worker.index, backend.device]
        yield {type(part): part for part in made}


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_a_part_tells_its_numbers_by_the_names_on_the_page(parts, part):
    said = parts[part].statistics()
    said = said if isinstance(said, dict) else asdict(said)
    assert said and json.loads(json.dumps(said)) == said
    if part in (Metrics, hisparse.HiSparseBackend):
        return  # names of events: in the module that counts them; of parts: another test
    assert [name for name in said if f"`{name}`" not in PAGE] == []


def test_managers_count_entries_of_tables_and_the_blocks_in_them(parts):
    state = parts[HiSparseCoordinator].state
    leased = np.flatnonzero(state.blocks.refs).tolist()
    said = [parts[manager].statistics() for manager in MANAGERS]
    assert sum(one["blocks"] for one in said) == len(leased)
    assert sum(one["entries"] for one in said) == int(state.blocks.refs.sum())
    index = parts[HiSparseIndexManager].statistics()
    assert index["entries"] > index["blocks"] > 0  # the prefix is shared


def test_the_tier_of_indexer_pages_says_what_it_keeps(parts):
    said = parts[CpuSuffix].statistics()
    assert said["published"] > 0 and said["ids"] - said["free"] >= said["published"]


def test_metrics_are_a_copy_by_all_their_names(parts):
    metrics = parts[Metrics]
    said = metrics.statistics()
    assert tuple(said) == NAMES and said["steps"] > 8
    said["steps"] = 0
    assert metrics.statistics()["steps"] > 8


def test_a_warm_up_leaves_no_trace_in_the_counts_of_the_index(parts):
    worker, index = parts[HiSparseWorker], parts[IndexCache]
    before = index.statistics()
    assert before["writes"] > 0 and before["reads"] > 0
    with worker.warm_up(2) as rows:
        index.write(0, rows, np.zeros((2, 8), np.uint8))
        assert index.statistics()["writes"] == before["writes"] + 1
    assert index.statistics() == before


@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="without transformers")
def test_the_cache_of_a_batch_says_what_it_holds():
    import torch

    from hisparse.integrations.transformers import HiSparseCache, config_of
    from hisparse.integrations.transformers.tiny import tiny_model

    model = tiny_model("glm_moe_dsa", seed=1)
    config = config_of(
        model,
        pools={"page_size": 4, "gpu_blocks": 80, "host_pool_gib": 0.02},
        policy={"hot_rows": 12},
        schedule={"max_requests": 2, "max_model_len": 24, "step_rows": 24},
    )
    ids = torch.arange(2, 14).reshape(2, 6)
    mask = torch.tensor([[1] * 6, [0] * 2 + [1] * 4])
    with hisparse.HiSparseBackend(config) as backend, HiSparseCache(model, backend) as cache:
        model.generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=3, eos_token_id=None
        )
        said = cache.statistics()
    assert said == {"lines": 2, "ended": 0, "columns": 8, "padding": 2, "rows": 14}
    assert [name for name in said if f"`{name}`" not in PAGE] == []
