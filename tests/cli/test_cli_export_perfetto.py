"""`hisparse export --to perfetto`: the trace, parsed back with the published protobufs."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise

import pytest
from cli_case import SMALL, call, error_of
from log_case import clean_events, write_log

from hisparse.fsm import events as ev
from hisparse.fsm.timeline import Clock, indexed

proto = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4


class Slice:
    def __init__(self, event, at):
        self.name, self.begin, self.end = event.name, at, None
        self.flows = list(event.flow_ids)
        self.args = {a.name: a.string_value or a.int_value for a in event.debug_annotations}
        self.inner: list[Slice] = []


class Parsed:
    """Tracks by name, with their slices (nested), instants and counts in order of time."""

    def __init__(self, data):
        trace = proto.Trace.FromString(data)
        descriptors = [p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")]
        self.names = {d.uuid: d.name for d in descriptors}
        self.parents = {d.uuid: self.names.get(d.parent_uuid, "") for d in descriptors}
        self.slices, self.instants = defaultdict(list), defaultdict(list)
        self.counts = defaultdict(list)
        events = [p for p in trace.packet if p.HasField("track_event")]
        assert all(p.trusted_packet_sequence_id == 1 for p in events)
        stacks = defaultdict(list)
        for packet in sorted(events, key=lambda p: p.timestamp):  # stable, as the viewer's
            event, at = packet.track_event, packet.timestamp
            track, stack = event.track_uuid, stacks[event.track_uuid]
            if event.type == BEGIN:
                made = Slice(event, at)
                (stack[-1].inner if stack else self.slices[track]).append(made)
                stack.append(made)
            elif event.type == END:
                stack.pop().end = at
            elif event.type == INSTANT:
                self.instants[self.names[track]].append(Slice(event, at))
            else:
                value = event.double_counter_value or event.counter_value
                self.counts[self.names[track]].append((at, value))

    def below(self, parent):
        """(track name, slice) of all tracks below `parent`."""
        for track, found in self.slices.items():
            if self.parents[track] == parent:
                yield from ((self.names[track], one) for one in found)


@pytest.fixture(scope="module")
def clean():
    return clean_events(write_back="on_pressure")


@pytest.fixture(scope="module")
def directory(tmp_path_factory, clean):
    return write_log(tmp_path_factory.mktemp("perfetto") / "log", *clean)


def exported(directory, out, *options, exit_code=0):
    result = call("export", directory, "--to", "perfetto", "-o", out, "--json", *options)
    assert result.exit_code == exit_code, (result.output, result.exception)
    return json.loads(result.stdout), Parsed(out.read_bytes()), result.stderr


@pytest.fixture(scope="module")
def parsed(directory, tmp_path_factory):
    return exported(directory, tmp_path_factory.mktemp("out") / "t.pftrace", "--clock", "seq")[1]


@pytest.fixture(scope="module")
def spill(clean):
    """(transfer, seq that pinned, seq that enqueued, seq that completed)."""
    events = list(enumerate(clean[1], 1))
    pinned, event = next((s, e) for s, e in events if isinstance(e, ev.TransferPinned))
    ident = event.transfers[-1]

    def last(kind):
        return next(s for s, e in events if isinstance(e, kind) and e.last and ident in e.transfers)

    return ident, pinned, last(ev.TransferEnqueued), last(ev.TransferCompleted)


def test_a_transfer_is_a_slice_from_pinned_to_completed(parsed, clean, spill):
    ident, pinned, enqueued, completed = spill
    event = clean[1][pinned - 1]
    (found,) = [
        s for _, s in parsed.below("transfers") if s.name == f"transfer {ident} {event.kind.name}"
    ]
    assert (found.begin, found.end) == (pinned * 1000, completed * 1000)
    assert found.args["block"] == f"{event.blocks[-1]}@{event.block_epochs[-1]}"
    assert [(s.name, s.begin, s.end) for s in found.inner] == [
        ("PINNED", pinned * 1000, enqueued * 1000),
        ("ENQUEUED", enqueued * 1000, completed * 1000),
    ]


def test_arrows_lead_from_cause_to_event_to_slice(parsed, clean, spill):
    ident, pinned, *_ = spill
    cause = clean[1][pinned - 1].cause
    assert cause
    at = {s.args["seq"]: s for name in ("inputs", "decisions") for s in parsed.instants[name]}
    assert len(at) == len(clean[1])
    assert pinned in at[cause].flows and pinned in at[pinned].flows
    (copy,) = [s for _, s in parsed.below("transfers") if s.name.startswith(f"transfer {ident} ")]
    assert set(copy.flows) & set(at[pinned].flows)
    carried = defaultdict(int)
    for found in (
        *at.values(),
        *(s for p in ("GPU blocks", "requests") for _, s in parsed.below(p)),
    ):
        for flow in found.flows:
            carried[flow] += 1
    arrows = [s for s, e in enumerate(clean[1], 1) if e.cause]
    assert arrows and all(carried[seq] == 2 for seq in arrows)


def test_every_block_and_page_is_in_the_state_that_its_slice_says(parsed, clean, spill):
    _, pinned, enqueued, _ = spill
    event = clean[1][pinned - 1]
    for parent, name in (
        ("GPU blocks", f"block {event.blocks[-1]}"),
        ("host pages", f"page {event.pages[-1]}"),
    ):
        found = [s for track, s in parsed.below(parent) if track == name]
        (state,) = [s for s in found if s.begin == pinned * 1000]
        assert (state.name, state.end) == ("PINNED", enqueued * 1000)
        assert all(not s.inner for s in found)
        for one, after in pairwise(found):
            assert one.end is not None and one.end <= after.begin


def test_a_request_goes_through_its_states(parsed, clean):
    found = [s for track, s in parsed.below("requests") if track == "request req-0"]
    names = [s.name for s in found]
    assert names[0] == "WAITING" and "DECODE" in names and found[-1].end is not None
    finished = next(s for s, e in enumerate(clean[1], 1) if isinstance(e, ev.RequestDrained))
    assert any(s.end == finished * 1000 for _, s in parsed.below("requests"))


def test_counters_follow_the_pools(parsed, clean):
    used = [value for _, value in parsed.counts["GPU blocks used"]]
    assert used[0] == 0 and max(used) > 10 and max(used) < clean[0].pools.gpu_blocks
    rates = [value for _, value in parsed.counts["prefix hit rate"]]
    assert all(0 <= rate <= 100 for rate in rates) and rates[-1] > 0


def test_tracks_beyond_the_cap_are_counted(directory, tmp_path):
    report, parsed, said = exported(directory, tmp_path / "t", "--blocks", 3, "--pages", 0)
    assert len({name for name, _ in parsed.below("GPU blocks")}) == report["tracks"]["block"] == 3
    assert report["tracks"]["page"] == 0 < report["left_out"]["page"]
    assert f"{report['left_out']['block']} blocks" in said


def test_the_step_clock_keeps_the_order_of_events(clean):
    events = list(enumerate(clean[1], 1))
    clock, causes = indexed(events, "step")
    times = [clock.at(seq) for seq, _ in events]
    assert times == sorted(set(times))
    for seq, event in events:
        if isinstance(event, ev.StepPlanned):
            assert clock.at(seq) == event.step * 1_000_000
    cause = next(e.cause for _, e in events if e.cause)
    assert causes.led_to(cause) == [s for s, e in events if e.cause == cause]
    assert Clock([], 0, "step").at(7) == Clock([], 0, "step").at(9)  # beyond the log


def test_a_rank_has_its_streams_and_copies_point_to_their_accesses(tmp_path):
    result = call("run", *SMALL, "--no-verify", "--log", tmp_path / "log")
    assert result.exit_code == 0, result.stderr
    _, parsed, _ = exported(tmp_path / "log", tmp_path / "t")
    steps = [s for track, s in parsed.below("rank-0") if track == "steps"]
    assert len(steps) > 5 and steps[0].name == "step 1"
    assert all(a.end <= b.begin for a, b in pairwise(steps))
    copies = {flow: s for _, s in parsed.below("transfers") for flow in s.flows}
    access = next(s for s in parsed.instants["d2h"] if s.name.startswith("read gpu"))
    ident = access.args["fields"].rpartition("transfer ")[2]
    copy = copies[access.flows[0]]
    assert copy.name.split()[1] == ident and copy.begin < access.begin
    waits = {flow for s in parsed.instants["d2h"] if s.name.startswith("wait") for flow in s.flows}
    records = [s for s in parsed.instants["compute"] if s.name.startswith("record")]
    assert waits & {flow for s in records for flow in s.flows}


def test_an_event_that_cannot_be_folded_ends_the_trace(tmp_path, clean):
    config, events = clean
    bad = [*events[:50], ev.TransferFailed(0, 0, (1 << 40,)), *events[50:]]
    log = write_log(tmp_path / "log", config, bad)
    report, parsed, said = exported(log, tmp_path / "t", exit_code=1)
    assert report["events"] == 50 and "cannot follow the state" in report["error"]
    assert "the trace ends early" in said and list(parsed.below("requests"))


def test_the_stream_is_not_a_choice(tmp_path):
    config, _ = clean_events()
    directory = write_log(tmp_path, config, [ev.Tick(0, 1)])
    write_log(tmp_path, config, [ev.WorkerOpened(0, 0, 1, 0)], stream="rank-0")
    refused = call(
        "export", directory, "--to", "perfetto", "-o", tmp_path / "t", "--stream", "rank-0"
    )
    assert "leave --stream out" in error_of(refused)
