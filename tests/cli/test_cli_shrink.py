"""`hisparse shrink`: the file that it emits passes for as long as its events show the violation."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from cli_case import call, call_process, error_of
from log_case import clean_events, write_log

from hisparse.fsm import events as ev
from hisparse.fsm.codec import UnknownEvent

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def clean():
    return clean_events()


def unacknowledged(events):
    """The log without an acknowledgement that it counts: only the run invariants can tell."""
    at = next(i for i, e in enumerate(events) if getattr(e, "completed", ()) and i > 60)
    lost = msgspec.structs.replace(events[at], completed=(), completed_epochs=())
    return [*events[:at], lost, *events[at + 1 :]]


def shrunk(directory, *options):
    result = call("shrink", directory, *options)
    assert result.exit_code == 1, (result.output, result.exception)
    return result


def outcome(path, text):
    """How pytest ends on the emitted file, in a process of its own."""
    path.write_text(text, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", path],
        capture_output=True,
        text=True,
        cwd=path.parent,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )


def test_the_file_shows_the_violation_and_no_longer_once_it_is_mended(tmp_path, clean):
    config, events = clean
    result = shrunk(write_log(tmp_path / "log", config, unacknowledged(events)))
    text = result.stdout
    done = outcome(tmp_path / "test_case.py", text)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
    assert "INVARIANT = 'rank_quorum'" in text and "def test_rank_quorum" in text
    assert "ev.TransferPinned(" in text and "rank_quorum at seq" in result.stderr
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if "ev.TransferCompleted(" in line)
    ident = lines[at].partition("transfers=(")[2].partition(",")[0]
    epoch = re.search(r"epoch=(\d+),\n\s+readers", text)
    assert epoch is not None
    copies = f"({ident},), ({epoch[1]},)"
    ack = f"ev.AcknowledgementsTaken(0, 0, 1, 1, 1, {copies}, {copies}, (), (), 0)"
    lines.insert(at, f"    (0, {ack}),")
    mended = outcome(tmp_path / "test_mended.py", "\n".join(lines))
    assert mended.returncode == 1 and "1 failed" in mended.stdout, mended.stdout


def test_it_is_minimal(tmp_path, clean):
    config, events = clean
    result = shrunk(write_log(tmp_path / "log", config, unacknowledged(events)), "--json")
    report = json.loads(result.stdout)
    assert (report["invariant"], report["shown_by"], report["minimal"]) == (
        "rank_quorum",
        "Checker",
        True,
    )
    kinds = [event["kind"] for event in report["events"]]
    assert kinds[-1] == "TransferCompleted" and len(kinds) <= 4
    assert report["events"][-1]["seq"] == report["seq"] == report["origin"][-1]
    (ident,) = report["events"][-1]["fields"]["transfers"]
    assert f"transfer {ident} " in report["message"]


BAD = {
    "an event of nothing": (ev.TransferFailed(0, 0, (1 << 40,)), "settle_once", 1),
    "a step out of turn": (ev.StepPlanned(0, 1 << 40, (), (), ()), "AssertionError", 4),
    "an unknown kind": (UnknownEvent(9999, b"\x00'\"\\"), "UnknownEvent", 1),
    "a page twice": (ev.HostPagesReserved(0, 0, (1,), (9,)), "IllegalTransition", 13),
}


@pytest.mark.parametrize("what", BAD)
def test_an_event_that_cannot_follow_is_shown_by_few(tmp_path, clean, what):
    config, events = clean
    bad, name, most = BAD[what]
    at = 40
    directory = write_log(tmp_path / "log", config, [*events[:at], bad, *events[at:]])
    options = () if name == "settle_once" else ("--invariant", name)
    report = json.loads(shrunk(directory, *options, "--json").stdout)
    assert report["invariant"] == name and report["seq"] == at + 1
    assert len(report["events"]) <= most and report["origin"][-1] == at + 1
    done = outcome(tmp_path / "test_case.py", report["source"])
    assert done.returncode == 0, done.stdout


def test_nothing_violated_is_said_and_nothing_is_printed(tmp_path, clean):
    directory = write_log(tmp_path / "log", *clean)
    result = call("shrink", directory)
    assert (result.exit_code, result.stdout) == (0, "") and "nothing is violated" in result.stderr
    segment = directory / "scheduler" / "00000001.seg"
    segment.write_bytes(segment.read_bytes()[:-3])
    result = call("shrink", directory)
    assert (result.exit_code, result.stdout) == (3, "") and "torn" in result.stderr
    assert "holds no log" in error_of(call("shrink", tmp_path))


def test_an_invariant_that_holds_is_not_shrunk(tmp_path, clean):
    directory = write_log(tmp_path / "log", clean[0], unacknowledged(clean[1]))
    result = call("shrink", directory, "--invariant", "settle_once")
    assert result.exit_code == 0 and "settle_once is not violated" in result.stderr


def test_shrink_needs_no_torch_and_its_help_has_an_example(tmp_path, clean):
    directory = write_log(tmp_path / "log", *clean)
    done = call_process("shrink", directory, code="import sys; sys.modules['torch'] = None")
    assert done.returncode == 0, done.stderr
    assert "Example: hisparse shrink" in call("shrink", "--help").stdout
