"""Programs: what a simulation did is written, read and done again, to the same digest."""

from __future__ import annotations

import pytest

from hisparse.errors import ConfigError
from hisparse.testing.program import Player, Program, from_json, to_json
from hisparse.testing.simulator import play, simulate
from hisparse.testing.worlds import World


@pytest.mark.parametrize("seed", [2, 13])
def test_what_a_seed_did_is_done_again(seed):
    first = simulate(seed)
    again = play(from_json(to_json(first.program)))
    assert first.fired and first.fired == again.fired and first.sometimes == again.sometimes
    assert (first.digest, first.events, first.rows_checked) == (
        again.digest,
        again.events,
        again.rows_checked,
    )
    assert again.program == first.program


def test_any_operation_can_be_left_out():
    program = simulate(2).program
    kept = tuple(done for done in program.operations if done[0] in ("abort", "step", "arm"))
    none_asked = play(Program(program.config, program.seed, operations=kept))
    assert none_asked.violation is None and none_asked.log.last_seq < none_asked.steps * 4


def test_a_fault_strikes_when_it_is_armed_and_not_before():
    player = Player(Program(World().config(), "armed", faults={"ack_lost": 0.0}))
    player.do("submit", request="a", prompt=[1, 2, 3, 4, 5], max_new=8)
    player.do("step")
    assert not player.replica.fired
    assert player.do("arm", kind="ack_lost") and not player.do("arm", kind="ack_cut")
    for _ in range(3):
        player.do("step")
    assert player.replica.fired == {"ack_lost": 1}
    player.replica.settle()
    assert player.replica.sometimes == {"ack_lost": 1}


def test_an_id_in_use_is_refused_and_the_request_goes_on():
    player = Player(Program(World().config(), "twice"))
    first, second = (
        player.do("submit", request="a", prompt=prompt, max_new=3) for prompt in ([1], [2, 3])
    )
    assert (first, second) == (True, False)
    player.replica.settle()
    assert [served.outcome for served in player.replica.engine.done] == ["finished"]


@pytest.mark.parametrize(
    ("spoilt", "named"),
    [
        (lambda text: text[:-9], "not a program"),
        (lambda text: text.replace('"gpu_blocks"', '"gpu_bricks"'), "gpu_bricks"),
        (lambda text: text.replace('"step"', '"leap"'), "leap"),
        (lambda text: text.replace('"max_new"', '"max_old"'), "max_old"),
        (lambda text: text.replace("ack_lost", "ack_found"), "ack_found"),
        (lambda text: text.replace('"tides"', '"waves"'), "waves"),
    ],
)
def test_a_file_that_is_no_program_is_refused_by_name(spoilt, named):
    operations = (("submit", {"request": "a", "prompt": [1], "max_new": 1}), ("step", {}))
    operations += (("arm", {"kind": "ack_lost"}),)
    text = to_json(Program(World().config(), "x", operations=operations))
    assert from_json(text).operations == operations
    with pytest.raises(ConfigError, match=named):
        from_json(spoilt(text), "here.json")
