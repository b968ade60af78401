"""`hisparse replay`: the live digest again, from the log alone; and logs that are no good."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli_case import SMALL, call, call_process, error_of, report_of

from hisparse.cli.opening import open_history
from hisparse.fsm.codec import Codec
from hisparse.fsm.events import EVENT_TYPES
from hisparse.fsm.log_disk import DiskLog
from hisparse.fsm.log_reader import DiskReader

NO_TORCH = "import sys; sys.modules['torch'] = None"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """(directory, report) of a small run with its log on disk."""
    directory = tmp_path_factory.mktemp("recorded") / "log"
    return directory, report_of(call("run", *SMALL, "--log", directory, "--json"))


@pytest.fixture
def copy(recorded, tmp_path):
    """A copy of the log that a test may spoil: (directory, its only segment)."""
    directory = tmp_path / "log"
    shutil.copytree(recorded[0], directory)
    return directory, directory / "scheduler" / "00000001.seg"


def cut(segment: Path, count: int) -> None:
    segment.write_bytes(segment.read_bytes()[:-count])


def test_replay_gives_the_live_digest(recorded):
    directory, live = recorded
    replayed = report_of(call("replay", directory, "--json"))
    assert replayed["state_digest"] == live["state_digest"]
    assert replayed["seq"] == replayed["events"] == live["events"]
    assert replayed["requests"] == replayed["transfers"] == [] and replayed["lost"] is None
    gpu, host = replayed["pools"]["gpu"], replayed["pools"]["host"]
    assert gpu["blocks"] == live["gpu_blocks"] - 1 == sum(gpu["by_state"].values())
    assert host["pages"] == sum(host["by_state"].values())
    assert host["by_state"]["PUBLISHED"] == host["findable"] > 0


def test_replay_prints_a_table(recorded):
    result = call("replay", recorded[0])
    assert result.exit_code == 0 and result.stderr == ""
    assert recorded[1]["state_digest"] in result.stdout and "gpu pool" in result.stdout


def test_replay_writes_nothing(copy):
    directory, segment = copy
    cut(segment, 3)
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    call("replay", directory)
    assert before == {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_torn_tail_is_exit_3_and_says_what_was_lost(recorded, copy):
    directory, segment = copy
    cut(segment, 3)
    result = call("replay", directory, "--json")
    assert result.exit_code == 3
    report = json.loads(result.stdout)
    assert report["seq"] == recorded[1]["events"] - 1
    assert report["lost"]["segment"] == segment.name
    assert report["lost"]["expected_seq"] == recorded[1]["events"]
    assert "torn tail in 00000001.seg" in result.stderr and result.stderr.count("\n") == 1


def test_the_middle_of_a_run_shows_requests_and_transfers(copy):
    """Cut short, the log holds a state in which something is going on."""
    directory, segment = copy
    whole = segment.read_bytes()
    for part in range(4, 10):
        segment.write_bytes(whole[: len(whole) * part // 10])
        report = json.loads(call("replay", directory, "--json").stdout)
        if report["requests"] and report["transfers"]:
            break
    assert {"request", "epoch", "state", "row", "computed"} <= set(report["requests"][0])
    assert {"transfer", "kind", "state", "block", "page"} <= set(report["transfers"][0])
    assert call("replay", directory).exit_code == 3


def test_damage_before_the_tail_is_exit_1_and_the_state_that_before_it(copy):
    directory, segment = copy
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    result = call("replay", directory, "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 1 and report["seq"] == report["lost"]["expected_seq"] - 1
    assert "damage in 00000001.seg at offset" in result.stderr
    line = error_of(call("replay", directory, "--at", report["seq"] + 1), 1)
    assert "as far as it can be read: damage in" in line


def test_a_broken_header_is_refused(copy):
    directory, segment = copy
    data = bytearray(segment.read_bytes())
    data[40] ^= 1
    segment.write_bytes(data)
    assert "00000001.seg" in error_of(call("replay", directory), 1)


def test_no_log_there(tmp_path):
    assert "no such directory" in error_of(call("replay", tmp_path / "gone"))
    assert "holds no log" in error_of(call("replay", tmp_path))
    (tmp_path / "scheduler").mkdir()
    assert "holds no log" in error_of(call("replay", tmp_path))
    (tmp_path / "scheduler" / "00000001.seg").write_bytes(b"something else altogether")
    assert "00000001.seg" in error_of(call("replay", tmp_path), 1)


def test_events_that_contradict_the_state_are_a_violation(tmp_path, recorded):
    """Intact frames in an impossible order: the run's own log, its first events left out."""
    codec = Codec(EVENT_TYPES)
    config = open_history(recorded[0]).config.model_dump_json()
    log = DiskLog(tmp_path / "scheduler", codec, clock=lambda: 0.0, config_json=config)
    for seq, event in DiskReader(recorded[0] / "scheduler", codec):
        if seq > 4:
            log.append(event)
    log.close()
    line = error_of(call("replay", tmp_path), 1)
    assert "replay_equal" in line and "cannot follow the state" in line and "(seq " in line


def test_replay_needs_no_torch(recorded):
    done = call_process("replay", recorded[0], "--json", code=NO_TORCH)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state_digest"] == recorded[1]["state_digest"]


def test_help_needs_no_torch():
    done = call_process("--help", code=NO_TORCH)
    assert done.returncode == 0 and "replay" in done.stdout
