"""`hisparse export`: every event in another format, and how the verb exits."""

from __future__ import annotations

import json

import pytest
from cli_case import call, call_process, error_of
from log_case import clean_events, write_log

from hisparse.export import parquet
from hisparse.export.record import records
from hisparse.fsm import events as ev
from hisparse.fsm.codec import UnknownEvent

NO_TORCH = "import sys; sys.modules['torch'] = None"


@pytest.fixture(scope="module")
def clean():
    return clean_events(write_back="on_pressure")


@pytest.fixture
def directory(tmp_path, clean):
    return write_log(tmp_path / "log", *clean)


def as_events(events):
    return list(enumerate(events, 1))


def test_jsonl_has_every_event_with_its_fields_by_name(directory, clean):
    result = call("export", directory, "--to", "jsonl")
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["seq"] for line in lines] == [*range(1, len(clean[1]) + 1)]
    step = 0
    for line, event in zip(lines, clean[1], strict=True):
        step = event.step if isinstance(event, ev.StepPlanned) else step
        assert (line["kind"], line["cause"]) == (type(event).__name__, event.cause)
        assert line["step"] == step
        assert ["cause", *line["fields"]] == list(event.__struct_fields__)
    arrived = next(line for line in lines if line["kind"] == "RequestArrived")
    event = clean[1][arrived["seq"] - 1]
    assert arrived["fields"]["page_hashes"] == [h.hex() for h in event.page_hashes]
    pinned = next(line for line in lines if line["kind"] == "TransferPinned")
    assert pinned["fields"]["kind"] in ("SPILL", "WRITE_BACK")


def test_jsonl_to_a_file_reports_what_it_wrote(directory, clean, tmp_path):
    out = tmp_path / "one.jsonl"
    result = call("export", directory, "--to", "jsonl", "-o", out, "--json")
    report = json.loads(result.stdout)
    assert report["events"] == len(clean[1]) == len(out.read_text().splitlines())
    assert report["lost"] is None and out.stat().st_mode & 0o077 == 0


def test_parquet_gives_back_every_event(directory, clean, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / "one.parquet"
    assert call("export", directory, "--to", "parquet", "-o", out).exit_code == 0
    rows = pq.read_table(out).to_pylist()
    assert len(rows) == len(clean[1])
    for row, record in zip(rows, records(as_events(clean[1])), strict=True):
        back = json.loads(row["fields"])
        for name in ("row", "request", "blocks", "pages", "transfers"):
            if name in record.fields:
                assert name not in back
                back[name] = row[name]
        assert back == record.fields
        assert (row["seq"], row["step"], row["cause"]) == (*record[:2], record.cause)
        assert row["request"] == record.request
    released = next(row for row in rows if row["kind"] == "BlocksReleased")
    assert released["request"].startswith("req-")  # of the row that it names


def test_parquet_is_written_in_row_groups(clean, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / "one.parquet"
    with out.open("wb") as file:
        assert parquet.write(as_events(clean[1]), file, rows_a_group=100) == len(clean[1])
    assert pq.ParquetFile(out).num_row_groups == -(-len(clean[1]) // 100)


def test_numbers_beyond_a_column_stay_in_the_rest(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    big = (1 << 64) - 1
    events = [
        ev.TransferFailed(big, 0, (big,)),
        ev.HotWanted(0, 1 << 40),
        ev.MemoryAccessed(0, "d2h", "gpu", False, (4, 5), 9),
        ev.AcknowledgementsTaken(0, 0, 1, 1, 2, (7,), (1,), (8,), (1,), (), (), 3),
        UnknownEvent(77, b"\x01"),
    ]
    out = tmp_path / "one.parquet"
    with out.open("wb") as file:
        parquet.write(as_events(events), file)
    failed, hot, access, taken, unknown = pq.read_table(out).to_pylist()
    assert failed["transfers"] is failed["cause"] is None
    rest = {"rank": 0, "cause": big, "transfers": [big], "last": True}
    assert json.loads(failed["fields"]) == rest
    assert hot["row"] is None and json.loads(hot["fields"])["row"] == 1 << 40
    assert (access["blocks"], access["pages"], access["transfers"]) == ([4, 5], None, [9])
    assert taken["transfers"] == [7, 8]
    assert (unknown["kind"], json.loads(unknown["fields"])["body"]) == ("kind-77", "01")


def test_a_rank_stream_is_exported_by_name(directory, tmp_path):
    config, _ = clean_events()
    events = [ev.WorkerOpened(0, 0, 1, 0), ev.CommandApplied(0, 4, 1, 9), ev.AckSent(0, 1, 3, 4, 0)]
    write_log(directory, config, events, stream="rank-0")
    lines = call("export", directory, "--to", "jsonl", "--stream", "rank-0").stdout.splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 4, 4]
    refused = call("export", directory, "--to", "jsonl", "--stream", "../log")
    assert "holds no stream" in error_of(refused)


@pytest.mark.parametrize(("form", "library"), [("parquet", "pyarrow"), ("perfetto", "perfetto")])
def test_a_library_that_is_not_there_is_named_with_its_extra(directory, tmp_path, form, library):
    code = f"import sys; sys.modules['{library}'] = None"
    out = tmp_path / "out"
    done = call_process("export", directory, "--to", form, "-o", out, code=code)
    assert (done.returncode, done.stdout) == (2, "") and not out.exists()
    (line,) = done.stderr.splitlines()
    assert library in line and f"hisparse[{form}]" in line


def test_a_binary_format_needs_a_file_that_can_be_written(directory, tmp_path):
    assert "give -o OUT" in error_of(call("export", directory, "--to", "parquet"))
    assert "give -o OUT" in error_of(call("export", directory, "--to", "jsonl", "--json"))
    where = tmp_path / "nowhere" / "x"
    assert "cannot write" in error_of(call("export", directory, "--to", "jsonl", "-o", where))
    assert "no such directory" in error_of(call("export", tmp_path / "none", "--to", "jsonl"))


def test_a_torn_tail_and_damage_are_said_after_what_was_readable(directory, clean):
    segment = directory / "scheduler" / "00000001.seg"
    data = segment.read_bytes()
    segment.write_bytes(data[:-3])
    result = call("export", directory, "--to", "jsonl")
    assert result.exit_code == 3 and "recovered with loss" in result.stderr
    assert len(result.stdout.splitlines()) == len(clean[1]) - 1
    damaged = bytearray(data)
    damaged[len(data) // 2] ^= 1
    segment.write_bytes(damaged)
    result = call("export", directory, "--to", "jsonl")
    assert result.exit_code == 1 and "loss found: " in result.stderr
    assert 0 < len(result.stdout.splitlines()) < len(clean[1])


def test_export_needs_no_torch(directory):
    done = call_process("export", directory, "--to", "jsonl", code=NO_TORCH)
    assert done.returncode == 0 and done.stdout


def test_help_has_an_example():
    assert "Example: hisparse export" in call("export", "--help").stdout
