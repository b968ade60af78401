"""`hisparse check`: what it finds, what it says of it, and how it exits."""

from __future__ import annotations

import json

import msgspec
import pytest
from cli_case import SMALL, call, call_process, error_of
from damaged_logs import GAP_TO, rewritten
from log_case import clean_events, write_log
from mutants.streams import WAITS, drop_wait

from hisparse.fsm import events as ev

NO_TORCH = "import sys; sys.modules['torch'] = None"
BAD = ev.TransferFailed(0, 0, (1 << 40,))


@pytest.fixture(scope="module")
def clean():
    return clean_events()


@pytest.fixture
def directory(tmp_path, clean):
    return write_log(tmp_path / "log", *clean)


def checked(directory, exit_code):
    result = call("check", directory, "--json")
    assert result.exit_code == exit_code, (result.output, result.stderr, result.exception)
    return json.loads(result.stdout)


def test_a_clean_log_is_fine_and_says_what_was_checked(directory, clean):
    report = checked(directory, 0)
    assert report["events"] == len(clean[1]) and report["segments"] == 1
    assert report["violations"] == report["unordered"] == [] and report["lost"] is None
    assert {"spill_before_free", "conservation", "always_readable"} <= {*report["checked"]}
    not_checked = {i["invariant"]: i["where"] for i in report["not_checked"]}
    assert not_checked["content"] == "device" and not_checked["table_truth"] == "live"
    assert not not_checked.keys() & {*report["checked"]}


@pytest.mark.parametrize("where", [0.0, 0.5, 1.0], ids=["first", "middle", "last"])
def test_a_planted_violation_is_found_with_its_seq_and_witness(tmp_path, clean, where):
    config, events = clean
    at = int(len(events) * where)
    report = checked(write_log(tmp_path, config, [*events[:at], BAD, *events[at:]]), 1)
    first = report["violations"][0]
    assert (first["invariant"], first["seq"]) == ("settle_once", at + 1)
    assert [e["seq"] for e in first["witness"]] == [at + 1]
    assert first["witness"][0]["kind"] == "TransferFailed"


def test_the_witness_is_printed_a_line_an_event(tmp_path, clean):
    config, events = clean
    at = next(i for i, e in enumerate(events) if getattr(e, "completed", ()))
    lost = msgspec.structs.replace(events[at], completed=(), completed_epochs=())
    result = call("check", write_log(tmp_path, config, [*events[:at], lost, *events[at + 1 :]]))
    assert result.exit_code == 1
    text = result.stdout
    assert "violated: rank_quorum at seq" in text
    lines = text.partition("violated: rank_quorum")[2].splitlines()[2:]
    kinds = [line.split()[1] for line in lines[: lines.index("") if "" in lines else None]]
    assert "TransferPinned" in kinds and kinds[-1] == "TransferCompleted"


def test_a_torn_tail_is_recovered_with_loss(directory, clean):
    segment = directory / "scheduler" / "00000001.seg"
    segment.write_bytes(segment.read_bytes()[:-3])
    report = checked(directory, 3)
    assert report["events"] == len(clean[1]) - 1 and report["lost"]["torn"] is True


def test_damage_is_a_loss_and_what_lies_before_it_is_checked(directory):
    segment = directory / "scheduler" / "00000001.seg"
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    report = checked(directory, 1)
    assert report["lost"]["torn"] is False and 0 < report["events"] < report["lost"]["expected_seq"]
    assert report["events"] == report["lost"]["expected_seq"] - 1


@pytest.mark.parametrize("spoilt", [False, True])
def test_behind_dropped_events_it_goes_on_at_the_snapshot(tmp_path, clean, spoilt):
    config, events = clean
    told = [*events, ev.TransferFailed(0, 0, (1 << 40,))] if spoilt else events
    write_log(tmp_path / "good", config, told)
    rewritten(tmp_path / "good", tmp_path / "cut", dropping=True, snapshots=True)
    result = call("check", tmp_path / "cut", "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == (1 if spoilt else 3)
    first, upto = report["gaps"][0]["first_seq"], GAP_TO + 30  # where `rewritten` takes a snapshot
    assert report["resumed"] == [{"after_seq": first - 1, "seq": upto}]
    assert report["events"] == len(told) - (upto - first + 1)
    assert {v["seq"] for v in report["violations"]} == ({len(told)} if spoilt else set())
    left_out = {i["invariant"]: i["from_seq"] for i in report["not_checked"] if i["where"] == "log"}
    assert left_out == dict.fromkeys(("complete_before_publish", "one_content"), first)


def test_no_log_there(tmp_path):
    assert "holds no log" in error_of(call("check", tmp_path))


def test_check_needs_no_torch(directory):
    done = call_process("check", directory, "--json", code=NO_TORCH)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["violations"] == []


@pytest.mark.parametrize("why", [why for why in WAITS if why != "h2d_after_compute"])
def test_a_wait_left_out_is_named_with_both_events(tmp_path, why):
    """The two logs of a run whose worker forgets one wait; it poisons nothing, so that all that
    can show it is what the step's own rows touch."""
    with drop_wait(why):
        result = call("run", *SMALL, "--requests", "10", "--no-verify", "--log", tmp_path / "log")
    assert result.exit_code == 0
    report = checked(tmp_path / "log", 1)
    assert report["violations"] == []
    found = [u for u in report["unordered"] if f"(the wait named {why})" in u["missing_edge"]]
    assert found and len(found) > len(report["unordered"]) * 0.8
    pair = found[0]
    kinds = {"CommandApplied", "MemoryAccessed"}  # the step's own rows, and a copy
    assert {pair["first"]["kind"], pair["second"]["kind"]} == kinds
    copy = pair["first" if pair["first"]["kind"] == "MemoryAccessed" else "second"]
    assert pair["id"] in copy["fields"]["ids"] and copy["fields"]["pool"] == pair["pool"]
    text = call("check", tmp_path / "log").stdout
    assert "unordered: " in text and copy["access"] in text


def test_a_run_with_its_rank_stream_has_nothing_unordered(tmp_path):
    call("run", *SMALL, "--no-verify", "--log", tmp_path / "log")
    report = checked(tmp_path / "log", 0)
    assert report["unordered"] == [] and report["ranks"][0]["steps"] > 5


def test_a_torn_rank_stream_is_a_loss_too(tmp_path):
    call("run", *SMALL, "--no-verify", "--log", tmp_path / "log")
    segment = tmp_path / "log" / "rank-0" / "00000001.seg"
    segment.write_bytes(segment.read_bytes()[:-3])
    report = checked(tmp_path / "log", 3)
    assert report["lost"] is None and report["ranks"][0]["lost"]["torn"] is True
