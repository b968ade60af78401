"""The state machine of Hypothesis: nothing is found in the code as it is; faults put into it are,
as short programs that the command line's tools take."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import pytest
from click.testing import CliRunner
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from mutants.pools import reuse_an_epoch

from hisparse.cli import cli
from hisparse.config import HiSparseConfig, check_capacity
from hisparse.engine.trace import TraceRequest, read_trace, scale_trace, write_trace
from hisparse.errors import InvariantViolation, PolicyError
from hisparse.kv.policies import Hybrid
from hisparse.testing import HiSparseMachine
from hisparse.testing.logs import keep
from hisparse.testing.program import Program, from_json, to_json
from hisparse.testing.replica import SimReplica
from hisparse.testing.simulator import play
from hisparse.testing.worlds import World

SEARCH = settings(
    max_examples=60,
    stateful_step_count=30,
    phases=[Phase.generate, Phase.shrink],
    report_multiple_bugs=False,
)


class Tallied(HiSparseMachine):
    fired: ClassVar[Counter[str]] = Counter()
    survived: ClassVar[Counter[str]] = Counter()

    def teardown(self):
        super().teardown()
        self.fired.update(self.player.replica.fired)
        self.survived.update(self.player.replica.sometimes)


def test_faults_strike_are_survived_and_nothing_is_violated():
    run_state_machine_as_test(Tallied, settings=settings(max_examples=60, stateful_step_count=30))
    assert len(Tallied.fired) >= 12, Tallied.fired
    assert Tallied.survived.total() == Tallied.fired.total()


def steps_of(error):
    """The operations of the failing example that hypothesis printed."""
    text = "\n".join(error.__notes__)
    shown = [line for line in text.splitlines() if "state." in line]
    return [line.partition("state.")[2] for line in shown]


class Kept(HiSparseMachine):
    pass


@pytest.fixture(scope="module")
def reused(tmp_path_factory):
    """A search of the code that gives blocks out again under their epoch: its error, and where
    the log and the program are kept."""
    Kept.keep_logs = tmp_path_factory.mktemp("kept")
    with reuse_an_epoch(), pytest.raises(InvariantViolation) as found:
        run_state_machine_as_test(Kept, settings=SEARCH)
    return found.value, Kept.keep_logs / "Kept"


def test_a_fault_in_the_code_is_found_as_a_short_program(reused):
    error, _ = reused
    assert error.invariant == "one_content"
    steps = steps_of(error)
    assert (
        steps[0].startswith("begin(") and "world=World(" in steps[0] and steps[-1] == "teardown()"
    )
    assert 3 <= len(steps) <= 7 and all(len(step) < 100 for step in steps), steps


def test_what_the_machine_found_is_replayed_checked_shrunk_and_done_again(reused):
    error, kept = reused
    invariant = "one_content"
    replay = next(note for note in error.__notes__ if note.startswith("replay: "))
    at = replay.rpartition(" ")[2]
    assert replay == f"replay: hisparse replay {kept} --at {at}"

    def said(*arguments):
        return CliRunner().invoke(cli, [str(a) for a in arguments], prog_name="hisparse")

    assert said("replay", kept, "--at", at).exit_code == 0
    for verb in ("check", "shrink"):
        done = said(verb, kept)
        assert done.exit_code == 1 and invariant in done.output
    assert said("fuzz", "--program", kept / "program.json").exit_code == 0  # without the fault
    with reuse_an_epoch():
        again = said("fuzz", "--program", kept / "program.json")
    assert again.exit_code == 1 and f"{invariant} at seq {int(at) + 1}" in again.output


def test_what_the_simulator_kept_is_kept_beside_its_log_and_not_over_it(tmp_path):
    result = play(Program(World().config(), "one", operations=(("step", {}),)))
    keep(result, tmp_path / "a")
    assert from_json((tmp_path / "a" / "program.json").read_bytes()) == result.program
    with pytest.raises(Exception, match="already holds a log"):
        keep(result, tmp_path / "a")


# -- a policy, a backend of one's own -------------------------------------------------------------
class Greedy(Hybrid):
    choice = "takes_more_than_there_is"

    def victims(self, view, need):
        return [(row, int(view.excess[row]) + 1) for row in range(len(view.excess))]


class Devices(SimReplica):
    made = 0

    def make_device(self, number, life=0):
        Devices.made += 1
        return super().make_device(number, life)


class GreedyMachine(HiSparseMachine):
    policy = Greedy
    replica = Devices


def test_a_broken_policy_of_ones_own_is_found_on_a_replica_of_ones_own():
    with pytest.raises(PolicyError, match="Greedy: victims"):
        run_state_machine_as_test(GreedyMachine, settings=settings(SEARCH, phases=[Phase.generate]))
    assert Devices.made


# -- strategies ----------------------------------------------------------------------------------
@given(config=st.from_type(HiSparseConfig))
def test_configs_hold_a_request(config):
    assert check_capacity(config) is config


@settings(max_examples=30)
@given(program=st.from_type(Program))
def test_programs_are_written_read_and_hold(program):
    assert from_json(to_json(program)) == program
    result = play(program)
    assert result.violation is None, result.violation


@settings(max_examples=30)
@given(lines=st.lists(st.from_type(TraceRequest), max_size=4))
def test_lines_of_a_trace_are_written_and_read(lines, tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    write_trace(path, lines)
    assert read_trace(path) == lines
    assert len(scale_trace(lines, 1 / 64)) == len(lines)
