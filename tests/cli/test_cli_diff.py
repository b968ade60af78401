"""`hisparse diff`: two logs, or one log at two places."""

from __future__ import annotations

import json

import msgspec
import pytest
from cli_case import call, error_of, report_of
from log_case import clean_events, write_log

from hisparse.fsm import events as ev
from hisparse.fsm.fold import fold
from hisparse.fsm.watch import facts, target


@pytest.fixture(scope="module")
def clean():
    return clean_events()


@pytest.fixture(scope="module")
def one(tmp_path_factory, clean):
    return write_log(tmp_path_factory.mktemp("diff") / "one", *clean)


def diffed(a, b):
    return report_of(call("diff", a, b, "--json"))


def test_equal_logs_are_equal(one, tmp_path, clean):
    report = diffed(one, write_log(tmp_path / "two", *clean))
    assert report["equal"] and report["divergence"] is None and report["differences"] == []


def test_the_first_event_that_differs_is_named(one, tmp_path, clean):
    config, events = clean
    at = max(i for i, e in enumerate(events) if isinstance(e, ev.Tick))
    changed = [*events]
    changed[at] = msgspec.structs.replace(events[at], now_us=events[at].now_us + 1)
    report = diffed(one, write_log(tmp_path / "two", config, changed))
    assert not report["equal"] and report["divergence"]["seq"] == at + 1
    fields = [report["divergence"][name]["fields"] for name in ("first", "second")]
    assert fields[1]["now_us"] == fields[0]["now_us"] + 1


def test_a_log_that_ends_earlier_parts_there(one, tmp_path, clean):
    config, events = clean
    report = diffed(one, write_log(tmp_path / "two", config, events[:200]))
    assert report["divergence"]["seq"] == 201 and report["divergence"]["second"] is None


def test_the_differences_of_two_places_are_those_of_their_states(one, clean):
    config, events = clean
    report = diffed(f"{one}@200", f"{one}@260")
    states = [fold(config, enumerate(events[:seq], 1)) for seq in (200, 260)]
    told = {(d["what"], d["ident"]): (d["first"], d["second"]) for d in report["differences"]}
    assert {what for what, _ in told} >= {"request", "block", "page"}
    for block in range(1, len(states[0].blocks.state)):
        a, b = (facts(state, target("block", str(block))) for state in states)
        expected = ({k: v for k, v in a.items() if b.get(k) != v},
                    {k: v for k, v in b.items() if a.get(k) != v})  # fmt: skip
        if a["state"] != b["state"] or a["epoch"] != b["epoch"]:
            assert told[("block", str(block))] == expected
    assert report["at"] == [200, 260] and report["divergence"]["seq"] == 201


def test_a_place_may_be_a_step(one):
    assert diffed(f"{one}@step:5", f"{one}@step:5")["equal"]


def test_another_configuration_is_named(one, tmp_path):
    other = write_log(tmp_path / "two", *clean_events(gpu_blocks=30))
    report = diffed(one, other)
    assert report["config"]["pools.gpu_blocks"] == [24, 30]


def test_it_is_printed_in_words(one):
    text = call("diff", f"{one}@200", f"{one}@260").stdout
    assert "the logs part at seq 201" in text and "(ends before it)" in text
    assert "state " in text and " / " in text


def test_a_place_that_is_not_there_is_refused(one, tmp_path):
    assert "is not in the log" in error_of(call("diff", f"{one}@99999", one))
    assert "no such directory" in error_of(call("diff", one, tmp_path / "gone"))
    assert json.loads(call("diff", one, one, "--json").stdout)["equal"]
