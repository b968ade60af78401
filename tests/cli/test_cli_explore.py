"""`hisparse explore`: exit codes, the keys of its JSON, the log of what it found."""

from __future__ import annotations

import json

from cli_case import call, error_of
from mutants.pools import reuse_an_epoch

KEYS = {"states", "unique", "depth", "seconds", "violations"}
SMALL = ("explore", "--requests", "1", "--ranks", "1", "--failures", "1")


def test_a_world_that_holds_exits_0_and_reports_by_the_documented_keys():
    result = call(*SMALL, "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and set(report) >= KEYS
    assert report["complete"] and report["violations"] == [] and report["unique"] == 1636


def test_a_violation_exits_1_with_its_path_and_a_log_that_check_reads(tmp_path):
    invariant = "one_content"
    with reuse_an_epoch():
        result = call(*SMALL, "--keep-log", tmp_path / "log", "--json")
    (found,) = json.loads(result.stdout)["violations"]
    assert result.exit_code == 1 and found["invariant"] == invariant
    assert found["moves"][0] == "q0 arrives" and "RequestArrived" in found["events"][0]
    checked = call("check", tmp_path / "log", "--json")
    assert checked.exit_code == 1 and invariant in checked.stdout


def test_a_world_with_copies_in_flight_is_explored_without_renaming_and_counted_as_projected():
    result = call(*SMALL, "--transfers", "1", "--projected", "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and report["complete"] and report["violations"] == []
    assert (report["projected"], report["world"]["transfers"]) == (71, 1)


def test_a_model_is_written_with_what_it_declares_and_how_it_is_run(tmp_path):
    out = tmp_path / "world.pml"
    result = call(*SMALL, "--transfers", "1", "--to", "promela", "-o", out)
    text = out.read_text()
    assert result.exit_code == 0 and result.stdout == ""
    for said in (
        "guard: quorum",
        "left out: arrivals",
        "invariants: IllegalTransition",
        "run: spin",
    ):
        assert said in result.stderr and f" * {said}" in text
    assert call(*SMALL, "--transfers", "1", "--to", "promela").stdout.strip() == text.strip()


def test_a_copy_that_may_fail_after_it_is_read_is_not_modelled():
    spill = ("--copies", "spill", "--write-back", "on_pressure", "--pages", "4", "--blocks", "7")
    result = call("explore", *spill, "--host-pages", "8", "--transfers", "1", "--failures", "1",
                  "--to", "promela")  # fmt: skip
    assert result.exit_code == 2 and "use --failures 0" in error_of(result)


def test_copies_that_never_are_in_flight_exit_2():
    result = call(*SMALL, "--copies", "restore", "--projected")
    assert result.exit_code == 2 and "copies of kind RESTORE" in error_of(result)
