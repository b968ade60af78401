"""With HiSparse off (policy `resident`) nothing is made for a worker, nor kept for one."""

from __future__ import annotations

import numpy as np
from scheduler_rig import small_config, workload

from hisparse.connector import hisparse as connector_module
from hisparse.connector.base import KVConnectorOutput, KVConnectorRole
from hisparse.connector.hisparse import HiSparseConnector
from hisparse.engine.loop import ReferenceEngine
from hisparse.fsm import events as ev
from hisparse.fsm import project as project_module
from hisparse.fsm.log import MemoryLog
from hisparse.kv.coordinator import HiSparseCoordinator


class Unmet:
    """A model without a worker; every step has to come without a command."""

    def __init__(self):
        self.metas = []

    def execute(self, meta, tokens, rows, sampled):
        self.metas.append(meta)
        logits = np.zeros((len(sampled), 2), dtype=np.float32)
        return np.ones(len(sampled), dtype=np.int64), logits, KVConnectorOutput()


def test_metadata_is_none_and_no_command_object_is_ever_made(monkeypatch):
    def made(*args, **kwargs):
        raise AssertionError("an object for a worker that is not there")

    for module in (connector_module, project_module):
        for name in ("project", "Projection", "SparseKVOffloadCommand", "TableUpdate"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, made)
    config = small_config(gpu_blocks=60, suffix_pages=20)
    policy = config.policy.model_copy(update={"name": "resident"})
    coordinator = HiSparseCoordinator(config.model_copy(update={"policy": policy}), MemoryLog(None))
    connector = HiSparseConnector(KVConnectorRole.SCHEDULER, coordinator=coordinator)
    runner = Unmet()
    engine = ReferenceEngine(coordinator, connector, runner, eos=0)
    engine.run(workload(3))
    assert len(runner.metas) > 10 and set(runner.metas) == {None}
    told = {type(event) for _, event in coordinator.log.read(1)}
    assert not told & {
        ev.TransferPinned, ev.PagesSpilled, ev.HostPagesReserved, ev.HotLeased, ev.PagesPublished,
        ev.SuffixPinned, ev.SuffixAsked, ev.AcknowledgementsTaken,
    }  # fmt: skip
    state = coordinator.state
    assert coordinator.suffix is None and len(state.suffix.state) == 0
    assert len(state.pages.state) == 1, "the null page, and no host pool"
    assert state.blocks.available == len(state.blocks.state) - 1
