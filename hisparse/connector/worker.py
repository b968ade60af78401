"""`WorkerConnector`: `HiSparseConnector` in worker role, with the verbs of a model's step.

Owns the rank's `HiSparseWorker`, and with it the pools and the copies. What to move where comes
from the plan's command alone; the engine writes the new rows of each layer and index group, and
resolves what its indexer selected::

    begin_step(plan) ─► for each layer: write, then resolve ─► end_step ─► acknowledgements()
                        for each index group, at its leader: write_index, index_keys, top-k

Arrays come back in the kind in which they were given: torch for torch, numpy for numpy. On a GPU,
numpy is uploaded, and what comes back is torch, there; all work is queued on the worker's compute
stream, which is torch's current stream between `begin_step` and `end_step` (the stream that was
current before is joined at both ends), and no call waits.

Every call is checked before it queues anything: what raises UsageError changed nothing. (Positions
that lie on a GPU are not looked at: there the device tells of a wrong one, with ``checks="on"``, by
the end of a later step.)
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from hisparse.config import HiSparseConfig
from hisparse.config_check import usable_config
from hisparse.connector.agreement import agreed, check_agreed
from hisparse.connector.arrays import StepArrays
from hisparse.connector.base import KVConnectorRole
from hisparse.connector.hisparse import HiSparseConnector
from hisparse.connector.plan import StepPlan
from hisparse.errors import CapacityError, ConfigError, UsageError
from hisparse.kv.validate import is_count

if TYPE_CHECKING:
    from hisparse.device.backend import Device, Sink
    from hisparse.device.transfers import CopyFault


class WorkerConnector(HiSparseConnector):
    """One rank's half of a replica.

    Args:
        config: sizes and policy, the same as the scheduler's.
        device: a backend, or the name of one: ``cpu``, ``cuda``.
        rank: this rank's number.
        worker_epoch, at_seq: of a rank that follows a lost one: what `join_rank` answered.
        sink: gets the rank's own events.
        copy_fault: see `HiSparseWorker`.

    Raises ConfigError, also for a rank that ``config.ranks`` does not have, or DeviceError for a
    backend that is not there.
    """

    def __init__(
        self,
        config: HiSparseConfig | Mapping[str, Any],
        *,
        device: Device | str = "cpu",
        rank: int = 0,
        worker_epoch: int = 1,
        at_seq: int = 0,
        sink: Sink | None = None,
        copy_fault: CopyFault | None = None,
    ) -> None:
        from hisparse.device import as_device
        from hisparse.device.worker import HiSparseWorker

        self.config = usable_config(config)
        if type(rank) is not int or not 0 <= rank < self.config.ranks:
            raise ConfigError(
                f"rank={rank!r}: ranks={self.config.ranks}, so rank must be an int in "
                f"0..{self.config.ranks - 1}"
            )
        self._sizes = agreed(self.config)
        self.device: Device = as_device(device)
        try:
            worker = HiSparseWorker(
                self.config,
                self.device,
                rank=rank,
                worker_epoch=worker_epoch,
                at_seq=at_seq,
                sink=sink,
                copy_fault=copy_fault,
            )
        except MemoryError as error:
            raise CapacityError(
                f"tables and replacement state of this rank do not fit this machine ({error}): "
                f"lower schedule.max_requests={self.config.schedule.max_requests}, "
                f"schedule.max_model_len={self.config.schedule.max_model_len} or "
                f"policy.hot_rows={self.config.policy.hot_rows}"
            ) from error
        super().__init__(KVConnectorRole.WORKER, worker=worker)
        self._plan: StepPlan | None = None
        self._written: set[int] = set()  # layers, in this step
        self._indexed: set[int] = set()  # index groups
        self._arrays = StepArrays(self.config, self.device)
        self._stream = ExitStack()  # torch's current stream, while a step lasts

    # -- a step -----------------------------------------------------------------------------------
    def begin_step(self, plan: StepPlan | bytes) -> StepPlan:
        """Queue the plan's copies and table changes; from here on its rows are written and read.

        Raises UsageError inside a step; ConfigError for a plan of a scheduler with another
        configuration; ProtocolError for one that does not follow the last one.
        """
        if self._plan is not None:
            raise UsageError(
                f"begin_step: step {self._plan.step} has not ended: end_step (or abandon_step) it "
                "first"
            )
        if not isinstance(plan, StepPlan):
            plan = StepPlan.from_bytes(plan)
        check_agreed(plan.sizes, self._sizes)
        from hisparse.device.exchange import joined

        with ExitStack() as stack:
            stack.enter_context(joined(self.device))
            self.start_load_kv(plan.command)
            self._stream = stack.pop_all()
        self._plan = plan
        self._written, self._indexed = set(), set()
        return plan

    def write(self, layer: int, data: Any) -> None:
        """New rows of `layer`: uint8 ``[n, row_bytes]``, one for each token of the plan, in its
        order. Read as they are now; the array may be used again at once. Raises UsageError for a
        layer that was written in this step: what reads its rows may have read them."""
        plan = self._begun("write")
        handle = self._handle(layer, "write")
        _check_once(plan, layer in self._written, f"write(layer={layer})", "layer")
        shape = (len(plan), self.config.layout.row_bytes)
        given = self._arrays.given(data, f"write(layer={layer}): data", shape)
        if len(plan):
            handle.write(plan.rows, given)
        self._written.add(layer)

    def write_index(self, group: int, data: Any) -> None:
        """New indexer rows of `group`: uint8 ``[n, index_row_bytes]``; like `write`."""
        plan = self._begun("write_index")
        self._check_group(group, "write_index")
        _check_once(plan, group in self._indexed, f"write_index(group={group})", "group")
        shape = (len(plan), self.config.layout.index_row_bytes)
        what = f"write_index(group={group}): data"
        given = self._arrays.given(data, what, shape)
        if len(plan):
            self.worker.index.write(group, plan.rows, given)
        self._indexed.add(group)

    def index_keys(self, group: int, request: str) -> Any:
        """Indexer rows of a request of this step, from position 0 to its last row of the step:
        uint8 ``[length, index_row_bytes]``. Raises UsageError before `write_index` of the group."""
        plan = self._begun("index_keys")
        self._check_group(group, "index_keys")
        if not isinstance(request, str) or request not in plan.granted:
            raise UsageError(
                f"index_keys: request {request!r} has no row in step {plan.step}: it has those of "
                f"{list(plan.requests)}"
            )
        if group not in self._indexed:
            raise UsageError(
                f"index_keys(group={group}): the rows of step {plan.step} are not there yet: "
                "write_index comes first"
            )
        at = plan.requests.index(request)
        length = plan.first_positions[at] + plan.counts[at]
        found = self.worker.index.keys(group, plan.request_rows[at], length).result()
        return self._arrays.answer(found)

    def resolve(self, layer: int, top_k: Any = None) -> Any:
        """Rows that attention reads: uint8 ``[n, k, row_bytes]``, from wherever they are.

        Args:
            top_k: of a leader, int32 or int64 ``[n, k]``: positions that each token of the plan
                selects in its own request, -1 for none (which gives zeros); k is at most
                ``policy.top_k``. Of a follower, None: it reads its leader's selection.

        The rows hold until the layer's next `resolve`: on `cpu` they lie in memory that is used
        again (`arrays`).

        Raises UsageError before `write` of the layer, for positions that nobody has written, for a
        follower before its leader.
        """
        plan = self._begun("resolve")
        handle = self._handle(layer, "resolve")
        if layer not in self._written:
            raise UsageError(
                f"resolve(layer={layer}): the rows of step {plan.step} are not there yet: "
                "write comes first"
            )
        chosen = None
        if top_k is not None:
            what = f"resolve(layer={layer}): top_k"
            chosen = self._arrays.selected(plan, top_k, what)
        if not len(plan):  # kernels are launched for something
            return self._arrays.nothing(handle.runtime.group.group, chosen)
        out = self._arrays.memory(layer, len(plan), handle.runtime.next_width(chosen))
        return self._arrays.answer(handle.gather(plan.rows, chosen, out=out).result())

    def end_step(self) -> None:
        """All work of the step is queued.

        Raises UsageError outside a step, where rows of a layer or group were not written, or a
        follower did not resolve what its leader did.
        """
        plan = self._begun("end_step")
        if len(plan):
            layout = self.config.layout
            layers = sorted(set(range(layout.layers)) - self._written)
            groups = sorted(set(range(len(layout.index_groups))) - self._indexed)
            if layers or groups:
                raise UsageError(
                    f"end_step: step {plan.step} lacks rows of layers {layers} and index groups "
                    f"{groups}: write them, or abandon_step"
                )
        self._close_step()

    def abandon_step(self) -> None:
        """End the step where it is, since the model failed in it: none of its rows may be accepted.

        Followers still take over what their leaders fetched, so that the next step is sound; of a
        resolve that failed there is nothing to take over.
        """
        self._begun("abandon_step")
        for group in self.worker.groups:
            for layer in group.layers[1:]:
                self.worker.handles[layer].runtime.take_over()
        self._close_step()

    def _close_step(self) -> None:
        self.wait_for_save()
        self._plan = None
        self._stream.close()

    def acknowledgements(self) -> bytes:
        """What the scheduler should know by now and has not said it took in, for `acknowledge`;
        empty if nothing. Never waits."""
        return self.get_output().kv_connector_worker_meta or b""

    @property
    def in_step(self) -> bool:
        return self._plan is not None

    # -- checks -----------------------------------------------------------------------------------
    def _begun(self, verb: str) -> StepPlan:
        if self._plan is None:
            raise UsageError(f"{verb}: no step has begun: plan_step and begin_step come first")
        return self._plan

    def _handle(self, layer: int, verb: str) -> Any:
        if not is_count(layer) or not 0 <= layer < len(self.worker.handles):
            raise UsageError(
                f"{verb}: layer={layer!r} must be in 0..{len(self.worker.handles) - 1}"
            )
        return self.worker.handles[layer]

    def _check_group(self, group: int, verb: str) -> None:
        groups = len(self.config.layout.index_groups)
        if not is_count(group) or not 0 <= group < groups:
            raise UsageError(f"{verb}: group={group!r} must be in 0..{groups - 1}")


def _check_once(plan: StepPlan, written: bool, what: str, unit: str) -> None:
    """Raises UsageError, beginning with `what`, for rows of the plan that are `written`."""
    if written and len(plan):
        more = f", and of {len(plan.requests) - 1} more" if len(plan.requests) > 1 else ""
        raise UsageError(
            f"{what}: the rows of request {plan.requests[0]!r} from position "
            f"{plan.first_positions[0]} on{more} are written in step {plan.step} already: pass all "
            f"rows of a {unit} in one call, or abandon_step and plan them anew"
        )
