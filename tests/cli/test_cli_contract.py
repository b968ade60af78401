"""What all verbs have in common: help with an example that runs, `--json`, and the keys in it that
docs/debugging.md promises."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import click
import pytest
from cli_case import call
from damaged_logs import TINY, make_logs

from hisparse.bench.measure import Case
from hisparse.cli import cli

ROOT = Path(__file__).resolve().parents[2]
DOCS = (ROOT / "docs" / "debugging.md").read_text(encoding="utf-8")
SCRIPT = ("completion",)  # what it prints is a script
LONG = ("run", "bench", "what-if", "log tail")  # long, or endless; they have tests of their own


def tree(command=cli, path=()):
    """(path, command) of every group and verb."""
    yield " ".join(path), command
    if isinstance(command, click.Group):
        for name, child in sorted(command.commands.items()):
            yield from tree(child, (*path, name))


COMMANDS = dict(tree())
VERBS = {path: one for path, one in COMMANDS.items() if not isinstance(one, click.Group)}


def example_of(path):
    """The words of the example in the help, without `hisparse` and without a redirection."""
    text = call(*path.split(), "--help").stdout
    found = re.search(r"^ *Example: hisparse (.+(?:\n {2,}\S.*)*)$", text, re.MULTILINE)
    assert found, f"{path or 'hisparse'} --help has no example"
    words = shlex.split(" ".join(found[1].split()))
    return words[: words.index(">")] if ">" in words else words


@pytest.mark.parametrize("path", COMMANDS)
def test_help_has_an_example_of_the_verb_with_options_that_it_knows(path):
    words = example_of(path)
    assert path == "" or words[: len(path.split())] == path.split()
    context, command = None, cli
    while True:
        context = command.make_context(words[0] if context else "hisparse", words, parent=context)
        if not isinstance(command, click.Group):
            break
        words = [*context._protected_args, *context.args]
        _, command, words = command.resolve_command(context, words)
        assert command is not None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two runs, as the examples name them, and the same log in every state."""
    folder = tmp_path_factory.mktemp("contract")
    assert call("run", *TINY, "--log", folder / "runs" / "one").exit_code == 0
    shutil.copytree(folder / "runs" / "one", folder / "runs" / "two")
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    (folder / "hisparse.toml").write_text(re.search(r"```toml\n(.*?)```", page, re.S)[1])
    (folder / "logs").mkdir()
    return folder, make_logs(folder / "logs")


@pytest.mark.parametrize("path", [path for path in VERBS if not path.startswith(LONG)])
def test_the_example_runs(folder, monkeypatch, path):
    monkeypatch.chdir(folder[0])
    result = call(*example_of(path))
    assert result.exit_code == 0, (result.output, result.exception)


@pytest.mark.parametrize("path", [path for path in VERBS if not path.startswith(SCRIPT)])
def test_every_verb_has_json(path):
    assert any("--json" in option.opts for option in VERBS[path].params)


@pytest.mark.parametrize(
    "call_of",
    [
        "log info D",
        "log recover D",
        "log compact D",
        "check D",
        "replay D",
        "replay D --watch block=3",
        "why D block 3",
        "diff D D",
        "shrink D",
        "export D --to jsonl -o OUT",
    ],
)
@pytest.mark.parametrize("state", ["good", "torn", "gap and snapshot"])
def test_json_is_all_that_stdout_holds(folder, tmp_path, call_of, state):
    shutil.copytree(folder[1][state], tmp_path / "log")
    named = {"D": str(tmp_path / "log"), "OUT": str(tmp_path / "out")}
    result = call(*(named.get(word, word) for word in call_of.split()), "--json")
    assert isinstance(json.loads(result.stdout), dict)


@pytest.mark.parametrize("verb", ["cat", "tail"])
def test_events_are_one_json_object_a_line(folder, verb):
    lines = call("log", verb, folder[1]["good"], "--json").stdout.splitlines()
    assert lines and all({"seq", "event", "cause"} <= set(json.loads(line)) for line in lines)


def promised(verb):
    """The keys of `hisparse VERB --json` in the documented table."""
    _, _, after = DOCS.partition(f"`hisparse {verb} --json`:\n")
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| ", after.partition("\n\n`")[0], re.MULTILINE)
    return {key for row in rows for key in re.findall(r"`(\w+)`", row)}


CHECK = {"events", "segments", "lost", "gaps", "violations", "unordered"}
REPLAY = {"seq", "state_digest", "pools", "requests", "transfers", "lost", "gaps"}


@pytest.mark.parametrize(("verb", "least"), [("check", CHECK), ("replay", REPLAY)])
def test_the_stable_keys_are_there_and_documented(folder, verb, least):
    report = json.loads(call(verb, folder[1]["good"], "--json").stdout)
    assert least <= promised(verb) <= set(report)


def test_the_keys_of_a_benchmark_are_documented_where_they_are_declared():
    assert promised("bench …") == {"cases"}
    (row,) = [line for line in DOCS.splitlines() if line.startswith("| `cases` |")]
    assert set(re.findall(r"`(\w+)`", row)) - {"cases"} == set(Case.__struct_fields__)
