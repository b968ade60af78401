"""docs/debugging.md, command by command: each runs, in the page's order, ends with the exit code
that the page says, and prints lines like those shown (numbers may be others)."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from cli_case import call

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "debugging.md").read_text(encoding="utf-8")
SHELL = set("|&;<>$`")


def commands():
    """(what is typed, exit code, lines shown) in the page's order; a `sh` block is one command."""
    for language, block in re.findall(r"^```(sh|console)\n(.*?)^```$", PAGE, re.M | re.S):
        if language == "sh":
            yield block, 0, []
            continue
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            typed, *shown = part.splitlines()
            code = 0
            if shown and (ended := re.fullmatch(r"\[exit (\d+)\]", shown[-1])):
                code, shown = int(ended[1]), shown[:-1]
            yield typed, code, [line for line in shown if line.strip(" …")]


def shape(line):
    """The words of a line, whatever its numbers and the length of its lists."""
    return re.sub(r"#([,-]#)*", "#", re.sub(r"\d+", "#", line)).strip()


def ran(typed, environment):
    """Output and exit code. A plain `hisparse …` needs no process of its own."""
    if typed.startswith("hisparse ") and not SHELL & set(typed) and "\n" not in typed:
        result = call(*shlex.split(typed)[1:])
        return result.output, result.exit_code
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", typed],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.stdout, done.returncode


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """A folder in which nothing has run yet; `hisparse` and `python` are those of this run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    for name, words in (("hisparse", "-m hisparse"), ("python", "")):
        script = tmp_path / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
        script.chmod(0o755)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    return os.environ | {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT}/{re.search('PYTHONPATH=([^ ]+)$', PAGE, re.M)[1]}",
    }


def test_every_command_of_the_page_runs_and_prints_what_is_shown(environment):
    for typed, code, shown in commands():
        if typed.startswith("export PATH="):  # what `environment` is
            typed = typed.partition("\n")[2]
        output, ended = ran(typed, environment)
        assert ended == code, (typed, ended, output[-600:])
        printed = [shape(line) for line in output.splitlines()]
        for line in shown:
            begins = shape(line.rstrip("…")).rstrip("#,") if line.endswith("…") else shape(line)
            assert any(one.startswith(begins) for one in printed), (typed, line, output[:3000])
    left = {path.name for path in Path().iterdir()} - {"bin", "tests"}
    assert left == {"runs"}, "a checkout ignores runs/ alone"
