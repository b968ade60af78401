"""`hisparse fuzz`: exit codes, the keys of its JSON, what it says of a seed that failed."""

from __future__ import annotations

import json
import sys
from unittest import mock

import pytest
from cli_case import call, error_of

from hisparse.device.worker import HiSparseWorker
from hisparse.testing.atlas import ATLAS

KEYS = {"seed", "steps", "events", "seconds", "faults", "sometimes", "violations"}
ONE = ("fuzz", "--seed", "7", "--steps", "40")


def test_a_seed_that_holds_exits_0_and_reports_by_the_documented_keys():
    result = call(*ONE, "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and set(report) >= KEYS and report["violations"] == []
    assert set(report["faults"]) == set(ATLAS) and report["steps"] >= 40


def test_marks_that_no_seed_hit_exit_1_and_are_named():
    result = call("fuzz", "--seeds", "0..2", "--steps", "2", "--faults", "ack_gap")
    assert result.exit_code == 1 and "marks that no seed hit: ack_gap" in result.stderr


def test_a_short_run_can_be_asked_for_no_marks():
    asked = ("--seeds", "0..2", "--steps", "2", "--faults", "ack_gap", "--no-marks")
    result = call("fuzz", *asked, "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["marks_missing"] == []


def test_a_seed_that_fails_exits_1_and_says_how_to_see_it_again(tmp_path):
    with mock.patch.object(HiSparseWorker, "_check", lambda self, command: None):
        asked = ("--faults", "command_duplicated", "--keep-logs", tmp_path)
        result = call("fuzz", "--seeds", "0..30", "--steps", "40", *asked)
    assert result.exit_code == 1
    assert "it takes command_duplicated" in result.stderr
    again = next(line for line in result.stderr.splitlines() if "again: " in line)
    seed = again.split("--seed ")[1].split()[0]
    assert "--steps 40 --faults command_duplicated" in again
    assert f"hisparse replay {tmp_path / f'seed-{seed}'} --at" in result.stderr.replace("\n", " ")
    assert call("replay", tmp_path / f"seed-{seed}").exit_code == 0


def test_the_log_of_a_seed_can_be_checked(tmp_path):
    assert call(*ONE, "--keep-logs", tmp_path).exit_code == 0
    assert call("check", tmp_path / "seed-7").exit_code == 0
    refused = call(*ONE, "--keep-logs", tmp_path)
    assert refused.exit_code == 2 and "already holds a log" in error_of(refused)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("--seeds", "5..5"), "must be A..B"),
        (("--seeds", "5"), "must be A..B"),
        (("--seed", "5", "--minutes", "1"), "--seed is one run"),
        (("--faults", "gremlins"), "'gremlins' is no kind of fault"),
        (("--ranks", "4"), "--ranks"),
        (("--mutants", "gremlin"), "'gremlin' is no mutant"),
        (("--mutants", "--seed", "5"), "--mutants takes --seeds, --ranks and --steps"),
    ],
)
def test_what_cannot_be_used_exits_2_in_one_line(words, fault):
    result = call("fuzz", *words)
    assert result.exit_code == 2 and fault in error_of(result)


def test_a_gpu_that_cannot_be_used_exits_2_and_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    result = call("fuzz", "--seed", "7", "--device", "cuda")
    assert result.exit_code == 2 and "needs torch: install 'hisparse[cuda12]'" in error_of(result)


def test_the_atlas_is_listed_with_its_rules():
    result = call("fuzz", "--list")
    assert result.exit_code == 0
    assert all(fault.rule in result.stdout for fault in ATLAS.values())


def test_mutants_that_are_found_exit_0_and_are_reported_by_the_documented_keys():
    asked = ("fuzz", "--mutants", "reuse_an_epoch", "--seeds", "0..2", "--steps", "30")
    result = call(*asked, "--json")
    (row,) = json.loads(result.stdout)["mutants"]
    assert result.exit_code == 0 and row["found"] and row["name"] == "reuse_an_epoch"
    assert set(row) == {
        "name", "found", "seeds", "events", "invariant", "witness", "witness_of"
    }  # fmt: skip


def test_a_mutant_that_is_not_found_exits_1_and_says_what_it_breaks():
    asked = ("--mutants", "rejected_drafts_accepted", "--seeds", "0..1", "--steps", "1")
    result = call("fuzz", *asked)
    assert result.exit_code == 1 and "found 0 of 1" in result.stdout
    assert "was not found in 1 seeds: Rows of drafts" in " ".join(result.stderr.split())
