"""What an all-resident scheduler would have held: the same arrivals and tokens, offload off.

No forward pass and no worker: tokens are those of the served run. What is found out is how many
requests a scheduler holds at once, at the same GPU budget and without bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hisparse.config import HiSparseConfig, LogConfig, ceil_div
from hisparse.connector.base import KVConnectorRole
from hisparse.connector.hisparse import HiSparseConnector
from hisparse.engine.loop import ReferenceEngine
from hisparse.engine.progress import Progress
from hisparse.engine.runner import RecordedRunner
from hisparse.engine.served import Served
from hisparse.engine.trace import WorkloadRequest
from hisparse.fsm.log import MemoryLog
from hisparse.kv.coordinator import HiSparseCoordinator


class ResidentBaseline:
    """The workload of a served run without offload.

    Args:
        config: of that run.
        served: its requests.
        abort_at: see `ReferenceEngine.run`.
    """

    def __init__(
        self,
        config: HiSparseConfig,
        workload: Sequence[WorkloadRequest],
        served: Sequence[Served],
        *,
        eos: int,
        step_ms: float,
        abort_at: dict[str, int],
    ) -> None:
        self._config, self._workload = config, workload
        self._tokens: Mapping[str, list[int]] = {r.request: r.tokens for r in served}
        self._eos, self._step_ms, self._abort_at = eos, step_ms, abort_at

    def figures(self) -> dict[str, int]:
        """At the same GPU budget, requests held at once and those that do not fit it at all; and
        blocks used without bound."""
        bounded, refused = self._served(self._config.pools.gpu_blocks)
        size = self._config.pools.page_size
        pages = sum(ceil_div(len(w.prompt) + w.max_new, size) + 1 for w in self._workload)
        return {
            "concurrent_requests_resident": bounded.concurrent_requests,
            "requests_refused_resident": refused,
            "peak_gpu_blocks_resident": self._served(2 * pages + 2)[0].gpu_blocks,
        }

    def _served(self, gpu_blocks: int) -> tuple[Progress, int]:
        """Its progress with so many blocks, and how many requests were refused."""
        policy = self._config.policy.model_copy(update={"name": "resident"})
        pools = self._config.pools.model_copy(update={"gpu_blocks": gpu_blocks})
        config = self._config.model_copy(
            update={"policy": policy, "pools": pools, "checks": "off", "log": LogConfig(mode="off")}
        )
        coordinator = HiSparseCoordinator(config, MemoryLog(0))

        def next_token(row: int, position: int) -> int:
            known = self._tokens[coordinator.state.request_of(row).request]
            return known[position + 1] if position + 1 < len(known) else 0

        engine = ReferenceEngine(
            coordinator,
            HiSparseConnector(KVConnectorRole.SCHEDULER, coordinator=coordinator),
            RecordedRunner(next_token),
            eos=self._eos,
            step_ms=self._step_ms,
        )
        served = engine.run(self._workload, abort_at=self._abort_at)
        return engine.progress, sum(request.outcome == "refused" for request in served)
