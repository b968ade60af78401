"""`hisparse replay --at` and `--watch`."""

from __future__ import annotations

import itertools
import json

import pytest
from cli_case import call, error_of, report_of
from log_case import clean_events, write_log

from hisparse.fsm import events as ev
from hisparse.fsm.fold import fold
from hisparse.fsm.machines import BLOCK_LEASE
from hisparse.fsm.state import digest


@pytest.fixture(scope="module")
def clean():
    return clean_events()


@pytest.fixture(scope="module")
def directory(tmp_path_factory, clean):
    return write_log(tmp_path_factory.mktemp("at") / "log", *clean)


def test_the_state_at_a_seq_is_the_fold_up_to_it(directory, clean):
    config, events = clean
    for seq in (1, len(events) // 2, len(events)):
        report = report_of(call("replay", directory, "--at", seq, "--json"))
        expected = fold(config, enumerate(events[:seq], 1))
        assert (report["seq"], report["state_digest"]) == (seq, digest(expected))


def test_a_step_is_the_seq_that_planned_it(directory, clean):
    seq = next(
        i for i, e in enumerate(clean[1], 1) if isinstance(e, ev.StepPlanned) and e.step == 7
    )
    report = report_of(call("replay", directory, "--at", "step:7", "--json"))
    assert report["seq"] == seq and report["step"] == 7


@pytest.mark.parametrize(
    "where,text",
    [
        ("1000000", "is not in the log"),
        ("step:99999", "not in the log"),
        ("soon", "give SEQ, step:N"),
    ],
)
def test_a_place_that_is_not_in_the_log_is_refused(directory, where, text):
    assert text in error_of(call("replay", directory, "--at", where))


def watched(directory, what, *more):
    result = call("replay", directory, "--watch", what, "--json", *more)
    return json.loads(result.stdout)["changes"]


def test_a_watched_block_moves_only_along_arrows_of_its_machine(directory):
    arrows = {(a["source"].name, a["dest"].name) for a in BLOCK_LEASE.declaration
              if not isinstance(a["source"], list)}  # fmt: skip
    arrows |= {(s.name, a["dest"].name) for a in BLOCK_LEASE.declaration
               if isinstance(a["source"], list) for s in a["source"]}  # fmt: skip
    changes = watched(directory, "block=3")
    moves = [(c["before"]["state"], c["after"]["state"]) for c in changes if "state" in c["before"]]
    assert len(moves) > 5 and {*moves} <= arrows
    assert all(a[1] == b[0] for a, b in itertools.pairwise(moves))


def test_a_watched_request_goes_from_waiting_to_gone(directory):
    changes = watched(directory, "request=req-1")
    states = [c["after"]["state"] for c in changes if "state" in c["after"]]
    assert states == ["WAITING", "ADMITTED", "PREFILL", "DECODE", "DRAINING"]
    assert changes[-1]["after"] == {} and changes[-1]["event"]["kind"] == "RequestDrained"


def test_a_watched_transfer_ends_settled(directory):
    changes = watched(directory, "transfer=1")
    assert changes[0]["event"]["kind"] == "TransferPinned"
    assert changes[-1]["after"] == {"state": "SETTLED"}


def test_watching_stops_at_the_place_asked_for(directory):
    whole = watched(directory, "page=1")
    half = whole[len(whole) // 2]["event"]["seq"]
    part = watched(directory, "page=1", "--at", half)
    assert part == [c for c in whole if c["event"]["seq"] <= half]


def test_watching_prints_an_event_and_what_it_changed(directory):
    lines = call("replay", directory, "--watch", "block=3").stdout.splitlines()
    assert "BlocksReserved" in lines[0] and "state FREE -> RESERVED" in lines[1]


@pytest.mark.parametrize("what", ["block=x", "block=99999", "page=0", "hat=3", "block"])
def test_a_watch_that_names_nothing_is_refused(directory, what):
    error_of(call("replay", directory, "--watch", what))


def test_an_event_that_contradicts_the_state_is_a_violation(tmp_path, clean):
    config, events = clean
    bad = write_log(tmp_path, config, [*events[:50], ev.StepPlanned(0, 77, (), (), ())])
    for options in (["--watch", "block=3"], ["--at", "51"]):
        assert "replay_equal" in error_of_last(call("replay", bad, *options))


def error_of_last(result):
    assert result.exit_code == 1, (result.output, result.exception)
    return result.stderr.splitlines()[-1]
