"""`hisparse log`: what is in a log, which events, live, repaired, compressed."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_case import SMALL, call, error_of, report_of
from damaged_logs import Refusing

from hisparse.engine.options import RunConfig
from hisparse.engine.run import Job
from hisparse.fsm.codec import Codec
from hisparse.fsm.events import EVENT_TYPES, Tick
from hisparse.fsm.fold import fold
from hisparse.fsm.history import names_id
from hisparse.fsm.log_disk import DiskLog
from hisparse.fsm.log_history import LogHistory
from hisparse.fsm.snapshot import restore, snapshot
from hisparse.fsm.state import digest

CODEC = Codec(EVENT_TYPES)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """(directory, report, events) of a small run with its log on disk."""
    directory = tmp_path_factory.mktemp("recorded") / "log"
    report = report_of(call("run", *SMALL, "--log", directory, "--json"))
    return directory, report, list(LogHistory.open(directory).read(1))


@pytest.fixture
def copy(recorded, tmp_path):
    """A copy of the log that a test may spoil: (directory, its only segment)."""
    directory = tmp_path / "log"
    shutil.copytree(recorded[0], directory)
    return directory, directory / "scheduler" / "00000001.seg"


@pytest.fixture
def segmented(recorded, tmp_path):
    """The same events over many segments."""
    history = LogHistory.open(recorded[0])
    log = DiskLog(
        tmp_path / "many" / "scheduler",
        CODEC,
        clock=lambda: 0.0,
        config_json=history.header.config,
        segment_bytes=3000,
    )
    for seq, event in recorded[2]:
        log.append(event)
        if seq % 10 == 0:
            log.commit()
    log.close()
    return tmp_path / "many"


def damage(segment: Path) -> None:
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)


def cat(directory, *options):
    """The objects that `log cat --json` prints."""
    result = call("log", "cat", directory, "--json", *options)
    assert result.exit_code == 0, (result.stderr, result.exception)
    return [json.loads(text) for text in result.stdout.splitlines()]


def seqs(directory, *options):
    return [one["seq"] for one in cat(directory, *options)]


# -- info -----------------------------------------------------------------------------------------


def test_info_counts_what_the_run_counted(recorded):
    directory, run, events = recorded
    report = report_of(call("log", "info", directory, "--json"))
    assert report["events"] == report["last_seq"] == run["events"] == len(events)
    assert report["requests"] == run["requests"]
    assert sum(report["kinds"].values()) == len(events)
    assert report["config"]["gpu_blocks"] == run["gpu_blocks"]
    assert report["bytes"] == sum(s["bytes"] for s in report["segments"]) > run["log_bytes"]


def test_info_prints_a_table(recorded):
    result = call("log", "info", recorded[0])
    assert result.exit_code == 0 and result.stderr == ""
    assert "00000001.seg" in result.stdout and "StepPlanned" in result.stdout


def test_a_torn_tail_is_exit_3_of_info(copy):
    copy[1].write_bytes(copy[1].read_bytes()[:-3])
    result = call("log", "info", copy[0], "--json")
    assert result.exit_code == 3 and "torn tail in 00000001.seg" in result.stderr
    assert json.loads(result.stdout)["lost"]["torn"] is True


def test_damage_anywhere_is_exit_1_of_info(segmented):
    damage(sorted((segmented / "scheduler").glob("*.seg"))[2])
    result = call("log", "info", segmented, "--json")
    assert result.exit_code == 1 and "damage in 00000003.seg" in result.stderr
    assert "00000003.seg" in json.loads(result.stdout)["lost"]["segment"]


def test_the_stream_of_a_rank_can_be_asked_for(recorded):
    report = report_of(call("log", "info", recorded[0], "--stream", "rank-0", "--json"))
    assert report["kinds"]["WorkerOpened"] == 1
    refused = error_of(call("log", "info", recorded[0], "--stream", "rank-9"))
    assert "has no stream 'rank-9', but rank-0, scheduler" in refused


def test_a_run_takes_a_snapshot_every_so_many_events(tmp_path):
    config = RunConfig.model_validate(
        {
            "requests": 8,
            "scale": 0.02,
            "verify": False,
            "log": {"mode": "disk", "dir": tmp_path, "snapshot_events": 100},
        }
    )
    run = Job(config).run()
    history = LogHistory.open(tmp_path)
    seqs = history.snapshots.seqs()
    assert len(seqs) > 1 and all(b - a >= 100 for a, b in itertools.pairwise([0, *seqs]))
    for seq in seqs:
        taken = history.snapshots.read(seq)
        assert digest(restore(history.config, taken)) == digest(folded(history, seq))
    assert digest(history.state_at(history.last_seq)) == run["state_digest"]


def folded(history, seq):
    """The state after `seq`, from the first event on."""
    events = itertools.takewhile(lambda one: one[0] <= seq, history.read(1))
    return fold(history.config, events)


@pytest.mark.parametrize("verb", [("replay",), ("log", "info")])
def test_events_that_the_writer_dropped_are_exit_3(recorded, tmp_path, verb):
    source, disk, last = LogHistory.open(recorded[0]), Refusing(), 60
    log = DiskLog(
        tmp_path / "scheduler",
        CODEC,
        clock=lambda: 0.0,
        config_json=source.header.config,
        on_error="continue",
        disk=disk,
    )
    for seq, event in recorded[2][:last]:
        log.append(event)
        disk.full = 20 < seq <= 40
        if seq % 10 == 0:
            log.commit()
    log.snapshot(last, snapshot(source.state_at(last)))
    log.close()
    result = call(*verb, tmp_path, "--json")
    assert result.exit_code == 3
    assert "dropped seqs 21 to 40 before 00000002.seg" in result.stderr
    if verb == ("replay",):
        assert json.loads(result.stdout)["state_digest"] == digest(source.state_at(last))


# -- cat ------------------------------------------------------------------------------------------


def test_cat_prints_every_event_with_its_fields(recorded):
    shown, events = cat(recorded[0]), recorded[2]
    assert [(one["seq"], one["event"]) for one in shown] == [
        (seq, type(event).__name__) for seq, event in events
    ]
    assert all(one["cause"] == event.cause for one, (_, event) in zip(shown, events, strict=True))


def test_cat_prints_a_line_an_event(recorded):
    lines = call("log", "cat", recorded[0], "--seq", "5..8").stdout.splitlines()
    assert [text.split()[0] for text in lines] == ["5", "6", "7", "8"]
    assert all("cause=" in text for text in lines)


def test_cat_filters_by_kind(recorded):
    shown = cat(recorded[0], "--kind", "StepPlanned", "--kind", "RequestArrived")
    assert {one["event"] for one in shown} == {"StepPlanned", "RequestArrived"}
    assert "known are" in error_of(call("log", "cat", recorded[0], "--kind", "Nonsense"))


@pytest.mark.parametrize(
    ("option", "machine"),
    [("--block", "BlockLease"), ("--host-page", "HostPage"), ("--transfer", "Transfer")],
)
def test_cat_filters_by_id(recorded, option, machine):
    expected = [seq for seq, event in recorded[2] if names_id(event, machine, 3)]
    assert seqs(recorded[0], option, 3) == expected != []


def test_cat_filters_by_request_and_its_row(recorded):
    shown = cat(recorded[0], "--request", "r1")
    admitted = next(one for one in shown if one["event"] == "RequestAdmitted")
    assert all(one.get("request", "r1") == "r1" for one in shown)
    rows = [one.get("rows") or [one["row"]] for one in shown if "row" in one]
    assert len(rows) > 3 and all(admitted["row"] in named for named in rows)
    assert shown[-1]["event"] == "RequestDrained"


def test_cat_filters_by_ranges(recorded):
    events = recorded[2]
    steps = {e.step: seq for seq, e in events if type(e).__name__ == "StepPlanned"}
    assert seqs(recorded[0], "--seq", "7..9") == [7, 8, 9]
    assert seqs(recorded[0], "--seq", "..2") == [1, 2]
    assert seqs(recorded[0], "--seq", f"{len(events)}..") == [len(events)]
    assert seqs(recorded[0], "--step", "3..4") == [*range(steps[3], steps[5])]
    assert seqs(recorded[0], "--step", f"{max(steps)}")[0] == steps[max(steps)]
    assert "no range" in error_of(call("log", "cat", recorded[0], "--seq", "a..b"))
    assert "empty range" in error_of(call("log", "cat", recorded[0], "--seq", "9..7"))
    assert "step 99999" in error_of(call("log", "cat", recorded[0], "--step", "99999"))


def test_cat_wide_is_a_line_a_step_and_a_letter_a_block(recorded):
    directory, run, _ = recorded
    shown = cat(directory, "--wide")
    assert {len(one["blocks"]) for one in shown} == {run["gpu_blocks"] - 1}
    assert [one["step"] for one in shown] == sorted({one["step"] for one in shown})
    history = LogHistory.open(directory)
    for one in shown[:: len(shown) // 5]:
        states = history.state_at(one["seq"]).blocks.state[1:]
        assert [".rdpeckQ".index(letter) for letter in one["blocks"]] == states.tolist()


def test_cat_wide_takes_columns_and_a_range(recorded):
    result = call("log", "cat", recorded[0], "--wide", "--block", 1, "--block", 2, "--step", "4..6")
    lines = [text.split() for text in result.stdout.splitlines()]
    assert [step for step, _ in lines] == ["4", "5", "6"]
    assert all(len(blocks) == 2 for _, blocks in lines)
    assert ". FREE" in result.stderr
    assert "is not there" in error_of_last(
        call("log", "cat", recorded[0], "--wide", "--block", 10**6)
    )


def error_of_last(result):
    assert result.exit_code == 2
    return result.stderr.splitlines()[-1]


# -- tail -----------------------------------------------------------------------------------------


def test_tail_prints_the_last_events(recorded):
    result = call("log", "tail", recorded[0], "-n", "4", "--json")
    last = len(recorded[2])
    assert [json.loads(text)["seq"] for text in result.stdout.splitlines()] == [
        *range(last - 3, last + 1)
    ]


def test_tail_follows_a_writer_of_another_process(tmp_path, recorded):
    config = LogHistory.open(recorded[0]).header.config
    log = DiskLog(tmp_path / "scheduler", CODEC, clock=lambda: 0.0, config_json=config)
    log.append(Tick(0, 1))
    log.commit()
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "hisparse", "log", "tail", "-f", str(tmp_path), "--json"],
        stdout=subprocess.PIPE,
        text=True,
        # a job in a shell's background ignores it, and so would what it starts
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert json.loads(process.stdout.readline())["now_us"] == 1
        for now in (2, 3):
            log.append(Tick(0, now))
            log.commit()
            assert json.loads(process.stdout.readline())["now_us"] == now
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130
    finally:
        process.kill()
        process.stdout.close()
        log.close()


# -- recover, compact -----------------------------------------------------------------------------


def test_recover_of_an_intact_log_is_exit_0(copy):
    result = call("log", "recover", copy[0], "--json")
    assert result.exit_code == 0 and result.stderr == ""
    done = json.loads(result.stdout)["streams"]["scheduler"]
    info = json.loads(call("log", "info", copy[0], "--json").stdout)
    assert done["lost"] == []
    assert (done["events"], done["last_seq"]) == (info["events"], info["last_seq"])


def test_recover_sets_a_torn_tail_aside_and_exits_3(copy):
    directory, segment = copy
    data = segment.read_bytes()
    segment.write_bytes(data[:-3])
    result = call("log", "recover", directory, "--json")
    assert result.exit_code == 3 and "torn tail" in result.stderr
    (torn,) = segment.parent.glob("*.torn")
    assert segment.read_bytes() + torn.read_bytes() == data[:-3]
    info = call("log", "info", directory, "--json")
    assert info.exit_code == 0
    done = json.loads(result.stdout)["streams"]["scheduler"]
    assert done["events"] == json.loads(info.stdout)["events"]


def test_recover_leaves_damage_in_the_middle_alone_and_exits_1(segmented):
    path = sorted((segmented / "scheduler").glob("*.seg"))[2]
    damage(path)
    before = path.read_bytes()
    result = call("log", "recover", segmented)
    assert result.exit_code == 1 and "--salvage" in result.stderr
    assert path.read_bytes() == before
    done = json.loads(call("log", "recover", segmented, "--json").stdout)["streams"]["scheduler"]
    assert done["events"] == done["last_seq"] > 0  # those before the damage


def test_recover_salvages_what_is_intact_and_says_what_it_lost(segmented, recorded, tmp_path):
    damage(sorted((segmented / "scheduler").glob("*.seg"))[2])
    out = tmp_path / "out"
    result = call("log", "recover", segmented, "--salvage", out, "--json")
    assert result.exit_code == 3 and "00000003.seg" in result.stderr
    done = json.loads(result.stdout)["streams"]["scheduler"]
    (lost,) = done["lost"]
    assert done["events"] == len(recorded[2]) - 1
    kept = [one for one in LogHistory.open(out).read(1) if one[0] != lost["first_seq"]]
    assert kept == [one for one in recorded[2] if one[0] != lost["first_seq"]]
    assert call("log", "info", out).exit_code == 3  # its gap is loss, and says so


def test_a_live_log_is_not_changed(copy):
    log = DiskLog(copy[0] / "scheduler", CODEC, clock=lambda: 0.0)
    for verb in ("recover", "compact"):
        assert "is being written by pid" in error_of(call("log", verb, copy[0]))
    log.close()


def test_compact_compresses_sealed_segments_and_the_log_reads_the_same(segmented, recorded):
    names = sorted(p.name for p in (segmented / "scheduler").glob("*.seg"))
    result = call("log", "compact", segmented, "--json")
    done = json.loads(result.stdout)["streams"]["scheduler"]
    assert result.exit_code == 0 and done["compressed"] == len(names) - 1
    assert done["saved_bytes"] > 0
    left = sorted(p.name for p in (segmented / "scheduler").iterdir() if ".seg" in p.name)
    assert left == [*(f"{name}.zst" for name in names[:-1]), names[-1]]
    assert list(LogHistory.open(segmented).read(1)) == recorded[2]
    replayed = report_of(call("replay", segmented, "--json"))
    assert replayed["state_digest"] == recorded[1]["state_digest"]


def test_compact_leaves_a_damaged_segment_and_exits_1(segmented):
    path = sorted((segmented / "scheduler").glob("*.seg"))[2]
    damage(path)
    result = call("log", "compact", segmented)
    assert result.exit_code == 1 and "00000003.seg" in result.stderr and path.exists()


@pytest.mark.parametrize("verb", ["info", "cat", "tail", "recover", "compact"])
def test_no_log_there(tmp_path, verb):
    assert "no such directory" in error_of(call("log", verb, tmp_path / "gone"))
    assert "holds no log" in error_of(call("log", verb, tmp_path))


@pytest.mark.parametrize("verb", ["info", "cat", "tail", "recover", "compact"])
def test_help_has_an_example(verb):
    assert f"Example: hisparse log {verb}" in call("log", verb, "--help").stdout
