"""The connector: two roles, payloads that nobody reads on the way, and write-ahead."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from scheduler_rig import Ranks, engine, small_config, workload

from hisparse.connector.base import KVConnectorBase_V1, KVConnectorOutput, KVConnectorRole
from hisparse.connector.hisparse import HiSparseConnector
from hisparse.engine.loop import ReferenceEngine
from hisparse.errors import LogError, ProtocolError, UsageError
from hisparse.fsm.codec import Codec
from hisparse.fsm.events import EVENT_TYPES, StepPlanned
from hisparse.fsm.log import MemoryLog
from hisparse.fsm.log_disk import DiskLog
from hisparse.fsm.log_files import OsDisk
from hisparse.fsm.log_reader import DiskReader
from hisparse.fsm.project import project
from hisparse.fsm.wire import Ack, AckKind, Acknowledgements, SparseKVOffloadCommand
from hisparse.kv.coordinator import HiSparseCoordinator

CODEC = Codec(EVENT_TYPES)


def scheduler(config=None, log=None):
    """(coordinator, its connector), with one request of two pages admitted and a step planned."""
    coordinator = HiSparseCoordinator(config or small_config(), log or MemoryLog(None))
    connector = HiSparseConnector(KVConnectorRole.SCHEDULER, coordinator=coordinator)
    coordinator.arrive("a", 9, 20, (b"1" * 16, b"2" * 16))
    coordinator.admit_waiting()
    coordinator.plan_step([0], coordinator.grow([0], [8]))
    return coordinator, connector


def decoded(meta):
    return msgspec.msgpack.decode(meta, type=SparseKVOffloadCommand)


class WorkerDouble:
    """Notes what a connector in worker role hands on."""

    def __init__(self, acks=None):
        self.begun, self.ended, self.acks = [], [], acks

    def begin_step(self, command):
        self.begun.append(command)

    def end_step(self, step):
        self.ended.append(step)

    def poll(self):
        return self.acks


# -- roles ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "role,missing",
    [(KVConnectorRole.SCHEDULER, "coordinator="), (KVConnectorRole.WORKER, "worker=")],
)
def test_a_role_needs_its_part(role, missing):
    with pytest.raises(UsageError, match=f"{role.value} role needs {missing}"):
        HiSparseConnector(role)


def test_calls_of_the_scheduler_role_are_refused_in_worker_role():
    connector = HiSparseConnector(KVConnectorRole.WORKER, worker=WorkerDouble())
    output = KVConnectorOutput(msgspec.msgpack.encode((Acknowledgements(0, 1, 1, ()),)))
    for call in (
        connector.build_connector_meta,
        lambda: connector.update_connector_output(output),
        lambda: connector.request_finished_all_groups("a", 1),
    ):
        with pytest.raises(UsageError, match="worker role"):
            call()


def test_calls_of_the_worker_role_are_refused_in_scheduler_role():
    _, connector = scheduler()
    meta = connector.build_connector_meta()
    for call in (lambda: connector.start_load_kv(meta), connector.wait_for_save,
                 connector.get_output):  # fmt: skip
        with pytest.raises(UsageError, match="scheduler role"):
            call()


def test_the_worker_role_hands_command_and_acknowledgements_on():
    acks = Acknowledgements(0, 1, 1, (Ack(AckKind.RETIRED, 1),))
    worker = WorkerDouble(acks)
    connector = HiSparseConnector(KVConnectorRole.WORKER, worker=worker)
    _, source = scheduler()
    meta = source.build_connector_meta()
    connector.start_load_kv(meta)
    connector.wait_for_save()
    assert worker.begun == [decoded(meta)] and worker.ended == [1]
    meta = connector.get_output().kv_connector_worker_meta
    assert msgspec.msgpack.decode(meta, type=tuple[Acknowledgements, ...]) == (acks,)


# -- opaque to the engine -------------------------------------------------------------------------


class Sealed(KVConnectorBase_V1):
    """Hands the engine objects that have nothing to read, and keeps the real payload beside."""

    def __init__(self, inner):
        super().__init__(KVConnectorRole.SCHEDULER)
        self.inner, self.payloads, self.sent, self.came_back = inner, {}, [], []

    def seal(self, payload):
        cover = object()
        self.payloads[id(cover)] = payload
        return cover

    def build_connector_meta(self):
        self.sent.append(self.seal(self.inner.build_connector_meta()))
        return self.sent[-1]

    def update_connector_output(self, output):
        cover = output.kv_connector_worker_meta
        if cover is not None:
            self.came_back.append(cover)
            self.inner.update_connector_output(KVConnectorOutput(self.payloads[id(cover)]))

    def start_load_kv(self, metadata): ...
    def wait_for_save(self): ...
    def get_output(self): ...


def test_the_engine_passes_both_payloads_through_unread():
    coordinator = HiSparseCoordinator(small_config(), MemoryLog(None))
    inner = HiSparseConnector(KVConnectorRole.SCHEDULER, coordinator=coordinator)
    sealed, ranks = Sealed(inner), Ranks()
    arrived, returned = [], []

    class Runner:
        def execute(self, meta, tokens, rows, sampled):
            arrived.append(meta)
            payload = sealed.payloads[id(meta)]
            chosen, logits, output = ranks.execute(payload, tokens, rows, sampled)
            returned.append(sealed.seal(output.kv_connector_worker_meta))
            return chosen, logits, KVConnectorOutput(returned[-1])

    served = ReferenceEngine(coordinator, sealed, Runner(), eos=0).run(workload(1, requests=4))
    assert [one.outcome for one in served] == ["finished"] * 4
    assert len(arrived) > 10
    assert all(a is b for a, b in zip(arrived, sealed.sent, strict=True))
    assert all(a is b for a, b in zip(sealed.came_back, returned, strict=False))
    assert len(sealed.came_back) >= len(returned) - 1


# -- commands and write-ahead ---------------------------------------------------------------------


def test_commands_follow_each_other_without_a_gap():
    made, ranks = engine(small_config())
    made.run(workload(0))
    ends = [(command.from_seq, command.to_seq) for command in ranks.commands]
    assert ends[0][0] == 0
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ends))
    assert any(command.transfers for command in ranks.commands)


def test_without_offload_there_is_no_command():
    config = small_config()
    policy = config.policy.model_copy(update={"name": "resident"})
    _, connector = scheduler(config.model_copy(update={"policy": policy}))
    assert connector.build_connector_meta() is None


def test_a_commands_events_are_on_disk_before_it_leaves(tmp_path):
    log = DiskLog(tmp_path / "scheduler", CODEC, clock=lambda: 0.0)
    coordinator, connector = scheduler(log=log)
    reader = DiskReader(tmp_path / "scheduler", CODEC)
    assert list(reader) == []
    command = decoded(connector.build_connector_meta())
    written = list(reader)
    assert command.to_seq == written[-1][0] == coordinator.state.seq
    assert isinstance(written[-1][1], StepPlanned)
    assert command == project(written, worker_epoch=1, from_seq=0, poison=True)
    log.close()


class FullDisk(OsDisk):
    """Takes the header of the first segment and nothing after it, until there is room."""

    room = False

    def write(self, fd, data, offset):
        if offset and not self.room:
            raise OSError(28, "No space left on device")
        return super().write(fd, data, offset)


def test_no_command_leaves_while_its_events_cannot_be_written(tmp_path):
    disk = FullDisk()
    log = DiskLog(tmp_path / "scheduler", CODEC, clock=lambda: 0.0, disk=disk)
    coordinator, connector = scheduler(log=log)
    with pytest.raises(LogError, match="No space left"):
        connector.build_connector_meta()
    disk.room = True
    command = decoded(connector.build_connector_meta())  # and once there is room, all of it does
    assert (command.from_seq, command.to_seq) == (0, coordinator.state.seq)
    log.close()


# -- acknowledgements -----------------------------------------------------------------------------


def answered():
    """(coordinator, the message of its first step's acknowledgements), not yet taken in."""
    coordinator, connector = scheduler()
    connector.build_connector_meta()
    coordinator.rows_computed(1, [0], [8])
    coordinator.plan_step([0], coordinator.grow([0], [1]))
    command = decoded(connector.build_connector_meta())
    assert len(command.transfers) == 2
    (message,) = Ranks().answer(command)
    return coordinator, message


def test_a_message_taken_in_twice_is_inert():
    coordinator, message = answered()
    assert coordinator.update_acknowledgements(message)
    digest, seq = coordinator.digest(), coordinator.state.seq
    assert not coordinator.update_acknowledgements(message)
    assert (coordinator.digest(), coordinator.state.seq) == (digest, seq)


@pytest.mark.parametrize("taken", [1, 2, 3, 4])
def test_of_a_message_that_overlaps_only_the_new_part_counts(taken):
    coordinator, message = answered()
    whole, _ = answered()
    first = msgspec.structs.replace(message, acks=message.acks[:taken])
    assert coordinator.update_acknowledgements(first)
    assert coordinator.update_acknowledgements(message)
    whole.update_acknowledgements(message)
    assert coordinator.state.acked == whole.state.acked == [len(message.acks)]
    assert np.array_equal(coordinator.state.pages.state, whole.state.pages.state)
    assert coordinator.metrics.counts == whole.metrics.counts


def test_a_message_of_another_worker_epoch_is_inert():
    coordinator, message = answered()
    digest = coordinator.digest()
    for epoch in (0, 2):
        old = msgspec.structs.replace(message, worker_epoch=epoch)
        assert not coordinator.update_acknowledgements(old)
    assert coordinator.digest() == digest


def test_a_gap_in_acknowledgements_is_reported_and_the_stream_can_be_read_again():
    coordinator, message = answered()
    later = msgspec.structs.replace(message, first_seq=2, acks=message.acks[1:])
    digest = coordinator.digest()
    with pytest.raises(ProtocolError, match="read the stream again from 1"):
        coordinator.update_acknowledgements(later)
    assert coordinator.digest() == digest
    assert coordinator.update_acknowledgements(message)


def test_an_acknowledgement_of_a_transfer_under_another_epoch_settles_nothing():
    coordinator, message = answered()
    other = tuple(msgspec.structs.replace(ack, epoch=ack.epoch + 1) for ack in message.acks)
    coordinator.update_acknowledgements(msgspec.structs.replace(message, acks=other))
    assert len(coordinator.state.transfers) == 2
    assert coordinator.metrics.counts["transfers_completed"] == 0


def test_completed_implies_enqueued():
    coordinator, message = answered()
    completed = tuple(ack for ack in message.acks if ack.kind is AckKind.COMPLETED)
    assert coordinator.update_acknowledgements(msgspec.structs.replace(message, acks=completed))
    assert coordinator.metrics.counts["transfers_completed"] == 2
    assert coordinator.checker is not None and not coordinator.checker.violations


def test_the_connector_counts_what_brought_news_and_what_was_inert():
    coordinator, message = answered()
    connector = HiSparseConnector(KVConnectorRole.SCHEDULER, coordinator=coordinator)
    output = KVConnectorOutput(msgspec.msgpack.encode((message,)))
    connector.update_connector_output(output)
    connector.update_connector_output(output)
    connector.update_connector_output(KVConnectorOutput())
    assert (connector.taken, connector.inert) == (1, 1)
