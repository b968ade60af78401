"""`hisparse trace generate`: a file that the reader takes, equal for equal seeds."""

from __future__ import annotations

from statistics import median

from cli_case import call, error_of, report_of

from hisparse.engine.trace import read_trace


def test_generated_traces_are_read_back(tmp_path):
    result = call("trace", "generate", tmp_path / "a.jsonl", "--requests", 50, "--seed", 3)
    assert result.exit_code == 0 and result.stdout == "" and "50 requests" in result.stderr
    call("trace", "generate", tmp_path / "b.jsonl", "--requests", 50, "--seed", 3)
    call("trace", "generate", tmp_path / "c.jsonl", "--requests", 50, "--seed", 4)
    assert len(read_trace(tmp_path / "a.jsonl")) == 50
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert (tmp_path / "a.jsonl").read_bytes() != (tmp_path / "c.jsonl").read_bytes()


def test_sizes_are_as_asked(tmp_path):
    args = ("trace", "generate", tmp_path / "t.jsonl", "--requests", 200, "--followups", 0)
    call(*args, "--median-tokens", 2000, "--max-tokens", 9000, "--median-answer", 50)
    trace = read_trace(tmp_path / "t.jsonl")
    assert 1500 < median(r.input_length for r in trace) < 4000
    assert max(r.input_length for r in trace) == 9000
    assert 40 < median(r.output_length for r in trace) < 62


def test_a_generated_trace_runs(tmp_path):
    call("trace", "generate", tmp_path / "t.jsonl", "--requests", 4, "--median-tokens", 1000)
    report = report_of(call("run", "--trace", tmp_path / "t.jsonl", "--scale", "0.02", "--json"))
    assert report["requests_finished"] == 4 and report["tokens_identical"]


def test_refusals(tmp_path):
    assert "--requests=-1" in error_of(
        call("trace", "generate", tmp_path / "t.jsonl", "--requests", -1)
    )
    line = error_of(call("trace", "generate", tmp_path / "gone" / "t.jsonl"))
    assert "No such file or directory" in line
    assert "OUT" in error_of(call("trace", "generate"))
