"""Tab completion, asked as a shell asks: by environment, and in a bash that sourced the script."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_case import call
from damaged_logs import TINY

from hisparse.cli.completion import SHELLS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a log, a folder without, and the command itself in ``bin``."""
    folder = tmp_path_factory.mktemp("completion")
    assert call("run", *TINY, "--log", folder / "one").exit_code == 0
    (folder / "other").mkdir()
    (folder / "a_file").write_text("")
    (folder / "bin").mkdir()
    command = folder / "bin" / "hisparse"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m hisparse "$@"\n')
    command.chmod(0o755)
    return folder


def environment(folder, **more):
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)} | more


def offered(folder, *words):
    """What bash's side of click would be told: the values alone."""
    asked = {"_HISPARSE_COMPLETE": "bash_complete", "COMP_CWORD": str(len(words))}
    done = subprocess.run(
        [folder / "bin" / "hisparse"],
        env=environment(folder, COMP_WORDS=" ".join(["hisparse", *words]), **asked),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == "", done.stderr
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


def test_verbs_and_their_options(folder):
    assert offered(folder, "re") == ["replay"]
    assert offered(folder, "log", "c") == ["cat", "compact"]
    assert "--watch" in offered(folder, "replay", "--")
    assert offered(folder, "why", "one", "h") == ["host-page"]
    assert offered(folder, "export", "one", "--to", "p") == ["parquet", "perfetto"]


def test_kinds_of_events_and_ids_of_the_log(folder):
    assert offered(folder, "log", "cat", "one", "--kind", "Step") == ["StepPlanned"]
    assert offered(folder, "why", "one", "request", "r") == ["r0", "r1", "r2", "r3"]
    assert offered(folder, "why", "one", "block", "1")[:3] == ["1", "10", "11"]
    assert "1" in offered(folder, "why", "one", "transfer", "")
    assert offered(folder, "why", "gone", "request", "") == []
    assert offered(folder, "why", "other", "block", "") == []


def test_places_of_a_diff(folder):
    assert offered(folder, "diff", "o") == ["one", "other/"]
    assert offered(folder, "diff", "one@") == ["one@last", "one@step:"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_with_the_script(folder):
    script = """eval "$(hisparse completion bash)"
complete -p hisparse
COMP_WORDS=(hisparse che) COMP_CWORD=1 && _hisparse_completion hisparse && echo "${COMPREPLY[@]}"
"""
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        env=environment(folder),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    registered, reply = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert "-F _hisparse_completion hisparse" in registered and reply == "check"


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_has_a_script(shell):
    if shell == "bash" and shutil.which("bash") is None:
        pytest.skip("no bash")
    result = call("completion", shell)
    assert result.exit_code == 0 and f"_HISPARSE_COMPLETE={shell}_complete" in result.stdout
    assert call("completion", "tcsh").exit_code == 2
