"""On a terminal long output is paged; in a pipe, when short, or on request it is not."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from cli_case import call
from damaged_logs import TINY

ROOT = Path(__file__).resolve().parents[2]
ROWS = 24


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pager") / "log"
    assert call("run", *TINY, "--log", directory).exit_code == 0
    return directory


def on_a_terminal(*args, **environment):
    """(stdout, stderr, exit code) of the command, whose stdout alone is a terminal of 24 rows."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, 80, 0, 0))
    env = {k: v for k, v in os.environ.items() if k not in ("LINES", "COLUMNS", "NO_PAGER")}
    env |= {"PYTHONPATH": str(ROOT), "TERM": "xterm", "PAGER": "sed s/^/paged:/", **environment}
    process = subprocess.Popen(
        [sys.executable, "-m", "hisparse", *map(str, args)],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env=env,
    )
    os.close(theirs)
    shown = b""
    try:
        while True:
            try:
                some = os.read(ours, 65536)
            except OSError:  # the last one that had the terminal open is gone
                break
            if not some:
                break
            shown += some
        stderr = process.stderr.read().decode()
        return shown.decode().replace("\r\n", "\n"), stderr, process.wait(timeout=60)
    finally:
        process.kill()
        process.stderr.close()
        os.close(ours)


def test_long_output_is_paged_whole(log):
    shown, stderr, code = on_a_terminal("log", "cat", log)
    piped = call("log", "cat", log).stdout
    assert (stderr, code) == ("", 0)
    assert [line.removeprefix("paged:") for line in shown.splitlines()] == [*piped.splitlines(), ""]
    assert all(line.startswith("paged:") for line in shown.splitlines())


@pytest.mark.parametrize("verb", ["check", "replay"])
def test_so_is_json(log, verb):
    shown, _, code = on_a_terminal(verb, log, "--json")
    assert code == 0 and shown.startswith("paged:{")


@pytest.mark.parametrize(
    ("args", "environment"),
    [
        (("log", "cat", "LOG", "--seq", "1..5"), {}),
        (("--no-pager", "log", "cat", "LOG"), {}),
        (("log", "cat", "LOG"), {"NO_PAGER": "1"}),
        (("log", "cat", "LOG"), {"PAGER": ""}),
        (("log", "cat", "LOG"), {"PAGER": "cat"}),
    ],
    ids=["short", "--no-pager", "NO_PAGER", "empty PAGER", "PAGER=cat"],
)
def test_it_is_not_where_that_was_not_wanted(log, args, environment):
    args = [log if arg == "LOG" else arg for arg in args]
    shown, _, code = on_a_terminal(*args, **environment)
    assert code == 0 and "paged:" not in shown and shown.splitlines()[0].split()[0] == "1"


def test_a_pager_that_is_left_early_is_no_error_and_the_loss_is_still_told(log):
    segment = log / "scheduler" / "00000001.seg"
    segment.write_bytes(segment.read_bytes()[:-3])
    shown, stderr, code = on_a_terminal("log", "cat", log, PAGER="head -n 2")
    assert len(shown.splitlines()) == 2
    assert code == 3 and stderr.startswith("hisparse: recovered with loss: torn tail")
