"""The exit code of every verb that reads a log, on a log in every state: docs/debugging.md's table.

0 fine, 1 a violation or loss was found, 2 the call cannot be used, 3 recovered with loss. Whatever
the state of the log, what could be read is on stdout, and talk is lines of "hisparse: " on stderr.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from cli_case import call
from damaged_logs import EARLY, make_logs

NO_LOG = ("empty", "gone", "a file", "a stream")
STATES = ("good", "torn", "damage", "early damage", "salvaged", "gap", "gap and snapshot")
WHOLE, FOLD = (0, 3, 1, 1, 3, 3, 3), (0, 3, 1, 1, 1, 1, 1)
CODES = {
    "log info D": WHOLE,
    "log cat D": WHOLE,
    "log cat D --seq ..20": (0,) * 7,
    "log tail D": (0, 3, 1, 0, 0, 0, 0),
    "log recover D": (0, 3, 1, 1, 0, 0, 0),
    "log compact D": (0, 0, 0, 1, 0, 0, 0),
    "check D": (0, 3, 1, 1, 1, 1, 3),
    "replay D": (0, 3, 1, 1, 1, 1, 3),
    "replay D --at 20": (0,) * 7,
    "replay D --at 200": (0, 0, 1, 1, 1, 1, 3),
    "replay D --watch request=r0": FOLD,
    "why D block 3": WHOLE,
    "why D block 3 --at 20": (0,) * 7,
    "diff D@20 D@10": (0,) * 7,
    "diff D GOOD": (0, 3, 1, 1, 1, 1, 3),
    "what-if D": FOLD,
    "shrink D": FOLD,
    "export D --to jsonl": WHOLE,
    "export D --to perfetto -o OUT": FOLD,
    "export D --to html -o OUT": WHOLE,
    "log info D --stream rank-9": (2,) * 7,
    "export D --to jsonl --stream rank-9": (2,) * 7,
}
# Who took the events that a log lacks by its own account, as every verb tells it.
GAPS = {"salvaged": "were lost to damage, and a salvage read past them"} | dict.fromkeys(
    ("gap", "gap and snapshot"), "the writer dropped seqs 51 to 70"
)
# Their data goes to a file, or there is none.
SILENT = ("shrink", "export D --to perfetto", "export D --to html")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return make_logs(tmp_path_factory.mktemp("states"))


def asked(verb, directory, good, out):
    places = {"D": directory, "GOOD": good, "OUT": out / "trace"}
    parts = [part.partition("@") for part in verb.split()]
    return call(*(f"{places.get(name, name)}{at}{place}" for name, at, place in parts))


@pytest.mark.parametrize("verb", CODES)
def test_the_exit_code_says_what_was_lacking(logs, tmp_path, verb):
    for state, code in zip(STATES, CODES[verb], strict=True):
        shutil.copytree(logs[state], tmp_path / state)  # some verbs change it
        result = asked(verb, tmp_path / state, logs["good"], tmp_path)
        said = (state, result.exit_code, result.stderr)
        assert result.exit_code == code, said
        assert isinstance(result.exception, SystemExit | None), said
        assert all(line.startswith("hisparse: ") for line in result.stderr.splitlines()), said
        if code != 2 and not verb.startswith(SILENT) and "error: " not in result.stderr:
            assert result.stdout != "", said
        if code in (1, 3):
            assert re.search(r"torn tail|damage|dropped seqs", result.stderr), said
        if code in (1, 3) and state in GAPS:
            assert [text in result.stderr for text in GAPS.values()] == [
                one == state or text == GAPS[state] for one, text in GAPS.items()
            ], said


@pytest.mark.parametrize("verb", CODES)
def test_where_there_is_no_log_it_is_exit_2_in_one_line(logs, tmp_path, verb):
    for state in NO_LOG:
        result = asked(verb, logs[state], logs["good"], tmp_path)
        assert (result.exit_code, result.stdout) == (2, ""), (state, result.output)
        assert len(result.stderr.splitlines()) == 1 and "error: " in result.stderr


@pytest.mark.parametrize(
    "verb",
    ["replay D", "replay D --watch block=3", "why D block 3", "check D", "log info D", "what-if D"],
)
@pytest.mark.parametrize("state", ["torn", "damage", "early damage", "gap"])
def test_what_is_lacking_is_in_the_json_too(logs, tmp_path, verb, state):
    report = json.loads(asked(f"{verb} --json", logs[state], logs["good"], tmp_path).stdout)
    lost, gaps = report["lost"], report["gaps"]
    if state == "gap":
        assert lost is None and [(gap["first_seq"], gap["last_seq"]) for gap in gaps] == [(51, 70)]
    else:
        assert gaps == [] and lost["torn"] is (state == "torn")
        assert {"segment", "offset", "expected_seq", "lost_bytes", "reason"} < set(lost)


@pytest.mark.parametrize("verb", ["replay D --at 20", "why D block 3 --at 20", "diff D@20 D@10"])
def test_a_verb_that_stops_before_a_loss_notes_it(logs, tmp_path, verb):
    for state in ("torn", "damage", "gap"):
        result = asked(verb, logs[state], logs["good"], tmp_path)
        assert "note: " in result.stderr and f"behind seq {EARLY}" in result.stderr


def test_the_last_state_is_the_one_before_damage_in_whatever_segment(logs, tmp_path):
    for state in ("damage", "early damage"):
        report = json.loads(asked("replay D --json", logs[state], logs["good"], tmp_path).stdout)
        seq = report["lost"]["expected_seq"] - 1
        assert report["seq"] == seq > EARLY
        good = json.loads(call("replay", logs["good"], "--at", seq, "--json").stdout)
        assert good["state_digest"] == report["state_digest"]


def test_the_documented_table_is_this_one():
    text = (ROOT / "docs" / "debugging.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)`((?: \| \d){7}) \|$", text, re.MULTILINE)
    told = {verb: tuple(int(code) for code in codes.split(" | ")[1:]) for verb, codes in rows}
    assert told == {verb.replace(" D", " DIR"): codes for verb, codes in CODES.items()}
