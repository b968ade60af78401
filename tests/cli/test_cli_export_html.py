"""`hisparse export --to html`: what goes into the page, how the verb exits. No browser needed."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from html.parser import HTMLParser

import pytest
from cli_case import call, call_process, error_of, report_of
from damaged_logs import GAP_TO, make_logs
from log_case import clean_events, write_log

from hisparse.cli.export import page_of
from hisparse.cli.opening import open_history
from hisparse.fsm import events as ev
from hisparse.fsm.codec import UnknownEvent
from hisparse.fsm.describe import fields
from hisparse.fsm.machines import BlockRole

HOSTILE = '</script><img src=x onerror="document.title=1"><!--'


@pytest.fixture(scope="module")
def clean():
    return clean_events(write_back="on_pressure")


@pytest.fixture
def directory(tmp_path, clean):
    return write_log(tmp_path / "log", *clean)


def export(directory, out, *more):
    return call("export", directory, "--to", "html", "-o", out, *more)


class Tags(HTMLParser):
    """Every element of a page with its attributes and, where it is a script or style, its text."""

    def __init__(self, text):
        super().__init__()
        self.found, self.text, self.inside = [], {}, False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self.inside = True

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            at = len(self.found) - 1
            self.text[at] = self.text.get(at, "") + data

    def of(self, tag):
        return [
            (attrs, self.text.get(i, "")) for i, (t, attrs) in enumerate(self.found) if t == tag
        ]


def unpacked(line):
    return zlib.decompress(base64.b64decode(line))


def meta_of(tags, name="a"):
    (text,) = [text for attrs, text in tags.of("script") if attrs.get("id") == f"{name}-columns"]
    data = unpacked(text)
    size = int.from_bytes(data[:4], "little")
    return json.loads(data[4 : 4 + size])["meta"]


def texts_of(tags, name="a"):
    (text,) = [text for attrs, text in tags.of("script") if attrs.get("id") == f"{name}-texts"]
    return [row for line in text.split() for row in json.loads(unpacked(line))]


def test_the_page_holds_every_event_and_asks_no_network(directory, clean, tmp_path):
    out = tmp_path / "one.html"
    report = report_of(export(directory, out, "--json"))
    assert report["logs"][0]["events"] == len(clean[1]) and report["divergence"] is None
    assert out.stat().st_mode & 0o077 == 0
    tags = Tags(out.read_text(encoding="utf-8"))
    meta, texts = meta_of(tags), texts_of(tags)
    assert meta["events"] == len(texts) == len(clean[1])
    assert [row[0] for row in texts] == [fields(event) for event in clean[1]]
    for _, attrs in tags.found:
        assert not {"src", "href", "action", "onclick", "onload", "onerror"} & set(attrs), attrs


def test_only_its_own_script_and_style_may_run(directory, tmp_path):
    out = tmp_path / "one.html"
    export(directory, out)
    tags = Tags(out.read_text(encoding="utf-8"))
    (policy,) = [a["content"] for a, _ in tags.of("meta") if a.get("http-equiv")]
    rules = dict(rule.split(maxsplit=1) for rule in policy.split("; "))
    (script,) = [text for attrs, text in tags.of("script") if "type" not in attrs]
    ((_, style),) = tags.of("style")
    for name, text in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[name] == f"'sha256-{digest}'"
    assert rules["default-src"] == "'none'" and "connect-src" not in rules


def test_no_byte_of_a_log_becomes_markup(tmp_path):
    config, events = clean_events()
    renamed = [
        ev.RequestArrived(e.cause, HOSTILE, *[getattr(e, n) for n in e.__struct_fields__[2:]])
        if isinstance(e, ev.RequestArrived)
        else e
        for e in events
    ]
    out = tmp_path / "page.html"
    report = page_of([write_log(tmp_path / "log", config, renamed)], out)
    text = out.read_text(encoding="utf-8")
    assert HOSTILE not in text and "onerror" not in text
    tags = Tags(text)
    assert not tags.of("img") and len(tags.of("script")) == 3
    assert HOSTILE in meta_of(tags)["requests"][0]["name"]
    assert report.records[0].error is not None  # nobody of that name was admitted


def test_two_logs_name_where_they_part(directory, tmp_path):
    other = write_log(tmp_path / "other", *clean_events(seed=2, write_back="on_pressure"))
    out = tmp_path / "two.html"
    report = report_of(export(directory, out, "--with", other, "--json"))
    parted = json.loads(call("diff", directory, other, "--json").stdout)["divergence"]
    assert report["divergence"] == parted["seq"]
    tags = Tags(out.read_text(encoding="utf-8"))
    for name in ("a", "b"):
        told = meta_of(tags, name)["divergence"]
        assert (told["first"], told["second"]) == (
            parted["first"]["line"],
            parted["second"]["line"],
        )


def test_a_torn_tail_and_damage_are_exported_up_to_there_and_said(directory, clean, tmp_path):
    segment, out = directory / "scheduler" / "00000001.seg", tmp_path / "one.html"
    data = segment.read_bytes()
    segment.write_bytes(data[:-3])
    torn = export(directory, out)
    assert torn.exit_code == 3 and "recovered with loss" in torn.stderr
    meta = meta_of(Tags(out.read_text(encoding="utf-8")))
    assert meta["events"] == len(clean[1]) - 1 and "torn tail" in meta["lost"]
    damaged = bytearray(data)
    damaged[len(data) // 2] ^= 1
    segment.write_bytes(damaged)
    result = export(directory, out)
    assert result.exit_code == 1 and "damage in 00000001.seg" in result.stderr
    meta = meta_of(Tags(out.read_text(encoding="utf-8")))
    assert 0 < meta["events"] < len(clean[1]) and "damage" in meta["lost"]


def test_an_event_that_cannot_follow_ends_the_states_and_not_the_page(tmp_path, clean):
    config, events = clean
    at = next(i for i, e in enumerate(events) if isinstance(e, ev.BlocksReserved))
    broken = [*events[: at + 1], events[at], *events[at + 1 :]]  # reserved twice
    out = tmp_path / "one.html"
    result = export(write_log(tmp_path / "log", config, broken), out)
    assert result.exit_code == 1 and "states end early" in result.stderr
    meta = meta_of(Tags(out.read_text(encoding="utf-8")))
    assert meta["events"] == len(broken)
    (gap,) = meta["gaps"]
    assert (gap["from"], gap["to"]) == (at + 1, None) and meta["error"] == gap["reason"]


def test_an_event_whose_columns_do_not_match_is_shown_as_far_as_it_goes(tmp_path, clean):
    config, events = clean
    pinned = next(e for e in events if isinstance(e, ev.TransferPinned))
    copies = [getattr(pinned, name) for name in pinned.__struct_fields__[1:-2]]
    odd = [
        ev.BlocksReserved(0, BlockRole.RESIDENT, -1, -1, (5, 1 << 40), (1,), (0, 0, 0), (1,)),
        ev.TransferPinned(0, *copies, rows=(1, 2, 3), request_epochs=()),
        UnknownEvent(77, b"\x01"),
    ]
    out = tmp_path / "one.html"
    result = export(write_log(tmp_path / "log", config, [*events[:20], *odd]), out)
    assert result.exit_code == 1, result.output
    texts = texts_of(Tags(out.read_text(encoding="utf-8")))
    assert "contradicts itself" in texts[20][1] and "contradicts itself" in texts[21][1]
    assert "kind that this version lacks" in texts[22][1]


def test_what_the_writer_dropped_is_a_gap(tmp_path, clean):
    config, events = clean
    out = tmp_path / "one.html"
    dropped = [*events[:100], ev.LogGap(0, 100, "the disk was full"), *events[101:]]
    assert export(write_log(tmp_path / "log", config, dropped), out).exit_code == 0
    (gap,) = meta_of(Tags(out.read_text(encoding="utf-8")))["gaps"]
    assert (gap["from"], gap["to"], gap["dropped"]) == (100, None, True)
    assert "the disk was full" in gap["reason"]


def test_a_snapshot_behind_a_gap_takes_the_states_up_again(tmp_path):
    logs, out = make_logs(tmp_path), tmp_path / "one.html"
    assert export(logs["gap and snapshot"], out).exit_code == 3
    meta = meta_of(Tags(out.read_text(encoding="utf-8")))
    (gap,) = meta["gaps"]
    (lost,) = open_history(logs["gap and snapshot"]).gaps
    at = lost.first_seq - 1  # the place of the LogGap, and of the snapshot, in the log
    taken_up = at + GAP_TO + 30 - lost.last_seq
    assert meta["seqs"] == [[0, 1], [at, lost.last_seq]]
    assert (gap["from"], gap["to"]) == (at, taken_up) and meta["error"] is None


def test_calls_that_cannot_be_meant_are_refused(directory, tmp_path):
    assert "give -o OUT" in error_of(call("export", directory, "--to", "html"))
    out = tmp_path / "x"
    jsonl = call("export", directory, "--to", "jsonl", "-o", out, "--with", directory)
    assert "needs --to html" in error_of(jsonl)
    assert "no such directory" in error_of(export(directory, out, "--with", tmp_path / "none"))
    write_log(directory, clean_events()[0], [ev.WorkerOpened(0, 0, 1, 0)], stream="rank-0")
    assert "leave --stream out" in error_of(export(directory, out, "--stream", "rank-0"))
    assert not out.exists()


def test_it_needs_no_torch_and_no_browser(directory, tmp_path):
    code = "import sys; sys.modules['torch'] = sys.modules['selenium'] = None"
    out = tmp_path / "one.html"
    done = call_process("export", directory, "--to", "html", "-o", out, code=code)
    assert done.returncode == 0 and re.match("<!doctype html>", out.read_text(encoding="utf-8"))
