"""Calls that the contract forbids: each raises, says the fix and changes nothing, and the engine
that made it goes on, to the right bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from embedding_rig import INDEX_ROW, LONGEST, ROW
from misuse_world import PROMPT, World

from hisparse import StepPlan
from hisparse.errors import StaleEpoch, UsageError

OWN = "own admit"  # errors of a stale epoch; the rest are UsageError
BEGIN, PLAN, LAST, END = (
    "begin_step come first",
    "plan_step comes",
    "returned last",
    "end_step.*abandon_step",
)
INDEX = "write_index comes first"

MISUSE = {
    # requests
    "admit an id that lives": ("idle", lambda w: w.backend.admit("a", PROMPT, 5), "finish, abort"),
    "admit an id that waits": ("idle", lambda w: w.backend.admit("w", PROMPT, 5), "another id"),
    "admit nothing": ("idle", lambda w: w.backend.admit("n", [], 5), "at least 1 token"),
    "admit no id": ("idle", lambda w: w.backend.admit("", PROMPT, 5), "string"),
    "admit floats": ("idle", lambda w: w.backend.admit("n", [0.5], 5), "must be integers"),
    "admit a batch": ("idle", lambda w: w.backend.admit("n", [[1], [2]], 5), r"integers \[n\]"),
    "admit a ragged batch": ("idle", lambda w: w.backend.admit("n", [[1], [2, 3]], 5), "integers"),
    "admit no new token": ("idle", lambda w: w.backend.admit("n", PROMPT, 0), r"an int of 1\.\."),
    "a long salt": ("idle", lambda w: w.backend.admit("n", [1], 1, salt=b"s" * 65), "most 64"),
    "admit a token below 0": (
        "idle",
        lambda w: w.backend.admit("n", [3, -1], 5),
        r"prompt\[1\] is -1",
    ),
    "admit a token of 64 bits": (
        "idle",
        lambda w: w.backend.admit("n", np.array([1 << 63], np.uint64), 5),
        "is 9223372036854775808",
    ),
    "admit True new tokens": ("idle", lambda w: w.backend.admit("n", [1], True), "max_new=True"),
    "a salt of no bytes": ("idle", lambda w: w.backend.admit("n", [1], 1, salt=5), "salt=5 must"),
    "abort a number": ("idle", lambda w: w.backend.abort(3), "abort: 3 names no request"),
    "confirm a list": ("idle", lambda w: w.backend.confirmed(["a"]), r"\['a'\] names no request"),
    "finish a stranger": ("idle", lambda w: w.backend.finish("x"), r"those here are \['a', 'w'\]"),
    "finish who waits": ("idle", lambda w: w.backend.finish("w"), "must be DECODE"),
    "preempt who waits": ("idle", lambda w: w.backend.preempt("w"), "must be ADMITTED"),
    "abort a stranger": ("idle", lambda w: w.backend.abort("x"), "never admitted, or has ended"),
    "preempt a stranger": ("idle", lambda w: w.backend.preempt("x"), "never admitted"),
    "confirm a stranger": ("idle", lambda w: w.backend.confirmed("x"), "never admitted"),
    "finish None": ("idle", lambda w: w.backend.finish(None), "None names no request"),
    "finish a stale epoch": ("idle", lambda w: w.backend.finish(w.stale), OWN),
    "abort a stale epoch": ("written", lambda w: w.backend.abort(w.stale), OWN),
    "plan a stale epoch": ("idle", lambda w: w.backend.plan_step({w.stale: 1}), OWN),
    # planning
    "plan a stranger": ("idle", lambda w: w.backend.plan_step({"x": 1}), "never admitted"),
    "plan who waits": ("idle", lambda w: w.backend.plan_step({"a": 1, "w": 1}), "leave it out"),
    "plan no row": ("idle", lambda w: w.backend.plan_step({"a": 0}), r"1\.\.28 would do"),
    "plan too many rows": ("idle", lambda w: w.backend.plan_step({"a": 29}), r"1\.\.28 would do"),
    "plan a long step": ("idle", lambda w: w.backend.plan_step({"a": LONGEST}), "would do"),
    "plan a number": ("idle", lambda w: w.backend.plan_step({5: 1}), "5 names no request"),
    "plan a list": ("idle", lambda w: w.backend.plan_step(["a"]), r"wanted=\['a'\] must be"),
    "plan None": ("idle", lambda w: w.backend.plan_step(None), "must be a mapping"),
    "plan True rows": ("idle", lambda w: w.backend.plan_step({"a": True}), "wants True"),
    "plan a token below 0": ("idle", lambda w: w.backend.plan_step({"a": [-7]}), r"\[0\] is -7"),
    "plan other tokens": ("idle", lambda w: w.backend.plan_step({"a": [[1, 2]]}), "integers"),
    "plan twice": ("planned", lambda w: w.backend.plan_step({"a": 1}), END),
    "plan within": ("written", lambda w: w.backend.plan_step({}), END),
    "acknowledge within": ("written", lambda w: w.backend.acknowledge(), END),
    "drain within": ("written", lambda w: w.backend.drain(), END),
    "sleep within": ("planned", lambda w: w.backend.sleep(), END),
    "reset within": ("planned", lambda w: w.backend.reset_prefix_cache(), END),
    "sleep too deep": ("idle", lambda w: w.backend.sleep(3), "use 1"),
    # order of a step
    "begin nothing": ("idle", lambda w: w.backend.begin_step(w.stale_plan), PLAN),
    "begin a stale plan": ("planned", lambda w: w.backend.begin_step(w.stale_plan), LAST),
    "begin a copy": (
        "planned",
        lambda w: w.backend.begin_step(StepPlan.from_bytes(w.plan.to_bytes())),
        LAST,
    ),
    "begin twice": ("begun", lambda w: w.backend.begin_step(w.plan), END),
    "end unbegun": ("planned", lambda w: w.backend.end_step(), "begin_step comes.*abandon_step"),
    "end nothing": ("idle", lambda w: w.backend.end_step(), BEGIN),
    "abandon nothing": ("idle", lambda w: w.backend.abandon_step(), PLAN),
    "end without rows": ("begun", lambda w: w.backend.end_step(), r"layers \[0, 1, 2\]"),
    "end with some rows": ("written", lambda w: w.backend.end_step(), r"groups \[1\].*abandon"),
    "accept more": ("computed", lambda w: w.backend.end_step({"a": 2}), r"use 0\.\.1"),
    "accept less than none": ("computed", lambda w: w.backend.end_step({"a": -1}), r"use 0\.\.1"),
    "accept True": ("computed", lambda w: w.backend.end_step({"a": True}), "accepts True rows"),
    "accept a list": ("computed", lambda w: w.backend.end_step(["a"]), "must be a mapping"),
    "accept a stranger": ("computed", lambda w: w.backend.end_step({"w": 1}), r"\['a'\]"),
    "accept a stale one": ("computed", lambda w: w.backend.end_step({w.stale: 1}), OWN),
    # rows
    "write outside": ("idle", lambda w: w.backend.write(0, w.zeros(ROW)), BEGIN),
    "write before": ("planned", lambda w: w.backend.write(0, w.zeros(ROW)), BEGIN),
    "write no layer": ("begun", lambda w: w.backend.write(3, w.zeros(ROW)), r"0\.\.2"),
    "write layer -1": ("begun", lambda w: w.backend.write(-1, w.zeros(ROW)), r"0\.\.2"),
    "write layer '0'": ("begun", lambda w: w.backend.write("0", w.zeros(ROW)), "layer='0' must"),
    "write narrow": ("begun", lambda w: w.backend.write(0, w.zeros(ROW - 1)), rf"\[1, {ROW}\]"),
    "write more": ("begun", lambda w: w.backend.write(0, w.zeros(ROW, 2)), rf"\[1, {ROW}\]"),
    "write floats": (
        "begun",
        lambda w: w.backend.write(0, w.zeros(ROW, dtype=np.float32)),
        "must be uint8",
    ),
    "write bfloat16": (
        "begun",
        lambda w: w.backend.write(0, torch.zeros(1, ROW // 2, dtype=torch.bfloat16)),
        r"view\(torch.uint8\)",
    ),
    "write a list": ("begun", lambda w: w.backend.write(0, [[0] * ROW]), "numpy array or a torch"),
    "write with gaps": (
        "begun",
        lambda w: w.backend.write(0, w.zeros(2 * ROW)[:, ::2]),
        "ascontiguousarray",
    ),
    "write strided torch": (
        "begun",
        lambda w: w.backend.write(0, torch.zeros(1, 2 * ROW, dtype=torch.uint8)[:, ::2]),
        "contiguous",
    ),
    "write meta": (
        "begun",
        lambda w: w.backend.write(0, torch.zeros(1, ROW, dtype=torch.uint8, device="meta")),
        "move it",
    ),
    "write twice": (
        "written",
        lambda w: w.backend.write(0, w.zeros(ROW)),
        r"write\(layer=0\): the rows of request 'a' from position 22 on are written in step \d+",
    ),
    "index twice": (
        "written",
        lambda w: w.backend.write_index(0, w.zeros(INDEX_ROW)),
        r"write_index\(group=0\): the rows of request 'a' from position 22 on",
    ),
    "index no group": ("begun", lambda w: w.backend.write_index(2, w.zeros(INDEX_ROW)), r"0\.\.1"),
    "index wide": ("begun", lambda w: w.backend.write_index(0, w.zeros(ROW)), r"\[1, 8\]"),
    "index None": ("begun", lambda w: w.backend.write_index(None, w.zeros(8)), "group=None must"),
    "keys of a list": ("written", lambda w: w.backend.index_keys(0, ["a"]), "has no row in step"),
    "keys outside": ("idle", lambda w: w.backend.index_keys(0, "a"), BEGIN),
    "keys unwritten": ("written", lambda w: w.backend.index_keys(1, "a"), INDEX),
    "keys of nobody": ("written", lambda w: w.backend.index_keys(0, "w"), r"those of \['a'\]"),
    # selections
    "resolve outside": ("idle", lambda w: w.backend.resolve(0, w.top_k(0)), BEGIN),
    "resolve unwritten": ("begun", lambda w: w.backend.resolve(0, w.top_k(0)), "write comes first"),
    "resolve no layer": ("written", lambda w: w.backend.resolve(7, w.top_k(0)), r"0\.\.2"),
    "a leader without": ("written", lambda w: w.backend.resolve(0), "pass top_k"),
    "resolve wide": ("written", lambda w: w.backend.resolve(0, w.top_k(*range(7))), "policy.top_k"),
    "resolve floats": (
        "written",
        lambda w: w.backend.resolve(0, w.top_k(0, dtype=np.float32)),
        "int32 or int64",
    ),
    "resolve a vector": ("written", lambda w: w.backend.resolve(0, w.top_k(0)[0]), r"\[1, k\]"),
    "resolve two rows": (
        "written",
        lambda w: w.backend.resolve(0, np.zeros((2, 1), np.int32)),
        r"\[1, k\]",
    ),
    "resolve with gaps": (
        "written",
        lambda w: w.backend.resolve(0, w.top_k(0, 1, 2, 3)[:, ::2]),
        "ascontiguousarray",
    ),
    "select what is not written": (
        "written",
        lambda w: w.backend.resolve(0, w.top_k(0, 23)),
        r"may select 0\.\.22",
    ),
    "select -2": ("written", lambda w: w.backend.resolve(0, w.top_k(0, -2)), "or -1 for none"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_raises_with_the_fix_and_changes_nothing(name):
    place, call, fix = MISUSE[name]
    world = World(place)
    before = world.fingerprint()
    with pytest.raises(StaleEpoch if fix == OWN else UsageError, match=fix):
        call(world)
    assert world.fingerprint() == before
    world.go_on()
