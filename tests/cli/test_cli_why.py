"""`hisparse why`: the chain from a state back to who wanted it, and under what pressure."""

from __future__ import annotations

import json

import pytest
from cli_case import call, error_of
from log_case import clean_events, write_log

from hisparse.fsm import events as ev


@pytest.fixture(scope="module")
def clean():
    return clean_events(write_back="on_pressure")


@pytest.fixture(scope="module")
def directory(tmp_path_factory, clean):
    return write_log(tmp_path_factory.mktemp("why") / "log", *clean)


def chain_of(directory, kind, ident, at):
    result = call("why", directory, kind, ident, "--at", at, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["chain"]


@pytest.fixture(scope="module")
def spill(clean):
    """(seq, event) of the first page that lost its block to a copy."""
    return next(
        (seq, e)
        for seq, e in enumerate(clean[1], 1)
        if isinstance(e, ev.PagesSpilled) and any(e.transfers)
    )


def test_a_spilled_block_names_policy_pressure_and_who_waited(directory, spill):
    seq, event = spill
    chain = chain_of(directory, "block", event.blocks[0], seq)
    assert chain[0]["event"]["seq"] == seq and "read from the host" in chain[0]["text"]
    kinds = [link["event"]["kind"] for link in chain]
    pinned = kinds.index("TransferPinned")
    assert kinds[pinned : pinned + 4] == [
        "TransferPinned",
        "PolicyChosen",
        "AdmissionDeferred",
        "RequestArrived",
    ]
    texts = [link["text"] for link in chain[pinned : pinned + 4]]
    assert "policy hybrid chose spill_largest_head_first under pressure" in texts[1]
    assert "had to wait" in texts[2] and texts[3].split()[1] == texts[2].split()[1]
    assert "StepPlanned" in kinds[pinned:] and "BlocksReserved" in kinds[pinned:]


def test_every_cause_follows_what_it_led_to(directory, clean, spill):
    chain = chain_of(directory, "block", spill[1].blocks[0], spill[0])
    direct = [link["event"]["seq"] for link in chain if link["depth"] == 0]
    assert direct == sorted(direct, reverse=True)
    for at, link in enumerate(chain):
        if link["depth"] and link["event"]["kind"] != "AdmissionDeferred":
            above = [one["event"]["seq"] for one in chain[:at]]
            assert link["event"]["seq"] in {clean[1][seq - 1].cause for seq in above}


def test_only_the_current_epoch_of_a_block_is_told(directory, clean):
    seq = max(
        seq
        for seq, e in enumerate(clean[1], 1)
        if isinstance(e, ev.BlocksReserved) and 3 in e.blocks
    )
    chain = chain_of(directory, "block", 3, seq)
    assert [link["event"]["seq"] for link in chain if link["depth"] == 0] == [seq]


def test_a_host_page_tells_its_way_to_publication(directory, clean):
    seq, event = next(
        (seq, e)
        for seq, e in enumerate(clean[1], 1)
        if isinstance(e, ev.PagesPublished) and e.pages
    )
    kinds = [
        link["event"]["kind"]
        for link in chain_of(directory, "host-page", event.pages[0], seq)
        if link["depth"] == 0 and link["event"]["kind"] != "PagesSpilled"
    ]
    assert kinds == [
        "PagesPublished",
        "TransferCompleted",
        "TransferEnqueued",
        "TransferPinned",
        "HostPagesReserved",
    ]


def test_a_request_tells_why_it_waits(directory, clean):
    seq, event = next(
        (seq, e) for seq, e in enumerate(clean[1], 1) if isinstance(e, ev.AdmissionDeferred)
    )
    chain = chain_of(directory, "request", event.request, seq)
    assert [link["event"]["kind"] for link in chain] == ["AdmissionDeferred", "RequestArrived"]
    assert event.resource in chain[0]["text"]


def test_a_transfer_tells_who_planned_it(directory, spill):
    chain = chain_of(directory, "transfer", spill[1].transfers[0], spill[0])
    assert any(link["event"]["kind"] == "PolicyChosen" for link in chain)


def test_it_is_printed_a_line_a_link(directory, spill):
    lines = call(
        "why", directory, "block", spill[1].blocks[0], "--at", spill[0]
    ).stdout.splitlines()
    assert lines[0].split()[0] == str(spill[0]) and any("because policy" in line for line in lines)


def test_an_id_that_the_log_never_names_is_refused(directory):
    assert "no event" in error_of(call("why", directory, "block", 9999))
    assert "not a number" in error_of(call("why", directory, "transfer", "x"))
    assert "no event" in error_of(call("why", directory, "request", "nobody"))
