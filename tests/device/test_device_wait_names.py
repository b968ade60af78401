"""The list of waits that tests knock out is the list of waits that production code makes.

By running: the names that a worker logs are those that `mutants` and `test_device_waits` take away.
By reading: there is one way to a wait, so that knocking out a name there leaves none behind.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import test_device_waits
from mutants.streams import WAITS

from hisparse.fsm.events import StreamWaited
from hisparse.testing.calm import CalmSimulation

SEEDS = range(12)
ROOT = Path(__file__).resolve().parents[2]
DEVICE = ROOT / "hisparse" / "device"
KNOCKED_OUT = set(test_device_waits.SCENARIOS)


def waits_made(seed: int) -> set[str]:
    """Names of the waits that the worker of the simulated world `seed` logs."""
    simulation, logged = CalmSimulation(seed), []
    simulation.worker.calls.sink = logged.append
    assert simulation.run().violation is None
    return {event.why for event in logged if isinstance(event, StreamWaited)}


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def uses(tree: ast.AST, name: str, inside: str) -> Iterator[tuple[str, str]]:
    """(where, what) of each attribute `name` below `tree`: ("worker.Cls.method", "a.b.name")."""
    for node in ast.iter_child_nodes(tree):
        named = isinstance(node, ast.ClassDef | ast.FunctionDef)
        if isinstance(node, ast.Attribute) and node.attr == name:
            yield inside, ast.unparse(node)
        yield from uses(node, name, f"{inside}.{node.name}" if named else inside)


def test_the_waits_that_a_run_makes_are_those_that_are_knocked_out():
    assert set().union(*map(waits_made, SEEDS)) == KNOCKED_OUT


def test_the_mutants_knock_out_the_same_waits():
    assert set(WAITS) == KNOCKED_OUT


def test_a_wait_is_made_in_one_place():
    """`DeviceCalls` logs each wait, and what tests replace, `_wait`, is its only caller."""
    found = [
        use
        for path in sorted(DEVICE.rglob("*.py"))
        if not {DEVICE / "cpu", DEVICE / "cuda"} & {*path.parents}  # a backend implements `wait`
        for use in uses(parsed(path), "wait", path.stem)
    ]
    assert found == [
        ("backend.DeviceCalls.wait", "stream.wait"),
        ("transfers.TransferQueue._wait", "self._calls.wait"),
    ]


def test_every_wait_in_the_worker_has_a_name_that_is_knocked_out():
    calls = [
        node for node in ast.walk(parsed(DEVICE / "transfers.py")) if isinstance(node, ast.Call)
    ]
    names = [call.args[2] for call in calls if ast.unparse(call.func) == "self._wait"]
    assert {ast.literal_eval(name) for name in names} == KNOCKED_OUT
