"""Calls of the command line, in this process and in one of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from hisparse.cli import cli
from hisparse.engine.trace import TraceRequest, write_trace

# Small enough for a second, large enough to spill: the pool holds the longest request alone.
SMALL = ("--requests", "6", "--scale", "0.02")


def call(*args: object) -> Result:
    return CliRunner().invoke(cli, [str(arg) for arg in args], prog_name="hisparse")


def call_process(*args: object, code: str = "") -> subprocess.CompletedProcess[str]:
    """`python -m hisparse` with `args`; `code` runs before it, in the same process."""
    start = f"{code}\nimport runpy; runpy.run_module('hisparse', run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-c", start, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def report_of(result: Result) -> dict[str, Any]:
    assert result.exit_code in (0, 3), (result.exit_code, result.stderr, result.exception)
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def error_of(result: Result, exit_code: int = 2) -> str:
    """The one line that a refused call says; nothing on stdout, no traceback."""
    assert result.exit_code == exit_code, (result.exit_code, result.output, result.exception)
    assert result.stdout == "" and isinstance(result.exception, SystemExit)
    (line,) = result.stderr.splitlines()
    assert line.startswith("hisparse: error: "), line
    return line


def small_trace(directory: Path, lengths: tuple[int, ...] = (3000, 1500)) -> Path:
    """A trace of one request a length, no prefix shared."""
    path, fresh = directory / "trace.jsonl", 0
    requests = []
    for at, length in enumerate(lengths):
        ids = tuple(range(fresh, fresh + -(-length // 512)))
        fresh += len(ids)
        requests.append(TraceRequest(at * 100, length, 100, ids))
    write_trace(path, requests)
    return path
