"""Hostile logs: no verb answers one with a traceback, without end, or by taking all memory.

`corpus/log` holds what `hostile_log.py` found; the search itself goes on for as long as it is let.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from cli_case import call, error_of
from damaged_logs import TINY
from hostile_log import VERBS, ask
from spoilt_log import Base, spoil

from hisparse.fsm.log_history import MAX_STATE_BYTES
from hisparse.fsm.state import state_bytes

CORPUS = sorted((Path(__file__).resolve().parents[1] / "corpus" / "log").iterdir())
SPOILT = 30


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hostile") / "base"
    assert call("run", *TINY, "--log", directory).exit_code == 0
    return Base(directory)


@pytest.mark.parametrize("found", CORPUS, ids=[path.name for path in CORPUS])
def test_what_was_found_once_is_answered_by_every_verb(base, tmp_path, found):
    for number, verb in enumerate(VERBS):
        shutil.copytree(found, tmp_path / str(number) / "log")  # some verbs change it
        assert ask(verb, tmp_path / str(number) / "log", base.directory) == "", verb


@pytest.mark.parametrize("seed", range(SPOILT))
def test_a_spoilt_log_is_answered(base, tmp_path, seed):
    pick = random.Random(seed).randrange
    spoil(base, pick, tmp_path / "log")
    verb = VERBS[seed % len(VERBS)]
    assert ask(verb, tmp_path / "log", base.directory) == "", verb


@pytest.mark.parametrize("found", [path for path in CORPUS if path.name.startswith("huge-")])
def test_a_configuration_cannot_ask_for_any_amount_of_memory(found):
    assert f"above {MAX_STATE_BYTES}" in error_of(call("replay", found))


def test_the_bound_is_no_less_than_what_a_state_takes(base):
    state = base.states[max(base.states)]
    arrays = [v for o in (state.blocks, state.pages, state.rows) for v in vars(o).values()]
    queues = [q for q in arrays if hasattr(q, "__slots__")]
    arrays += [getattr(q, name) for q in queues for name in q.__slots__]
    taken = sum(a.nbytes for a in [*arrays, *state.rows.tables] if hasattr(a, "nbytes"))
    assert 0 < taken <= state_bytes(state.config) <= 20 * taken
