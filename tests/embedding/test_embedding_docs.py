"""docs/embedding.md keeps its word: its programs run as they stand, and print what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
from embedding_rig import Engine, settings

from hisparse import Changes, HiSparseBackend, checked_config
from hisparse.fsm.wire import IndexTransfer

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "embedding.md").read_text()
ENGINE_LINES_MAX = 80


def titled(language):
    """What each fenced block of `language` holds, by its title."""
    found = re.findall(rf'^```{language} title="(.*?)"\n(.*?)^```$', DOC, re.MULTILINE | re.DOTALL)
    return dict(found)


def run(folder, command):
    for name, text in titled("python").items():
        (folder / name).write_text(text)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, *command.split()[1:]],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("command", ["python engine.py", "python two_processes.py"])
def test_a_program_prints_what_the_page_says(tmp_path, command):
    said = titled("text")[command]
    assert sorted(run(tmp_path, command).splitlines()) == sorted(said.splitlines())
    assert re.search(r"rows read from the host: [1-9]", said)


@pytest.mark.gpu
def test_the_engine_runs_on_a_gpu(tmp_path):
    printed = run(tmp_path, "python engine.py cuda")
    assert "same tokens in a pool where everything fits: True" in printed
    assert re.search(r"rows read from the host: [1-9]", printed)


def test_a_gpu_takes_the_shapes_of_the_example():
    from hisparse.device.cuda.kernels import ResolveSizes

    names: dict[str, object] = {}
    exec(titled("python")["model.py"], names)
    ResolveSizes.of(checked_config(names["CONFIG"]))


def programs(monkeypatch):
    """The page's modules, in this process."""
    made = []
    for name in ("model", "engine"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        exec(titled("python")[f"{name}.py"], sys.modules[name].__dict__)
        made.append(sys.modules[name])
    return made


def test_the_engine_serves_the_same_tokens_where_indexer_pages_cannot_be_loaded(monkeypatch):
    """A request that read what was not loaded is preempted: what was sampled since is worthless."""
    model, engine = programs(monkeypatch)
    config = model.CONFIG | {"suffix": {"name": "cpu", "gib": 0.001}}
    config["policy"] = model.CONFIG["policy"] | {"on_copy_failure": "fail"}
    loads, left = [], []  # how many tokens those had that came back, and now have again

    class Watched(engine.Engine):
        def take(self, changes):
            had = {name: len(self.live[name].tokens) for name in changes.preempted}
            super().take(changes)
            left.extend((n, len(self.live[name].tokens)) for name, n in had.items())

    def fails(transfer):
        if not isinstance(transfer, IndexTransfer) or not transfer.load:
            return False
        loads.append(transfer)
        return len(loads) % 17 == 0

    done = {}
    for fault in (None, fails):
        with HiSparseBackend(config, copy_fault=fault) as backend:
            serving = Watched(backend, model.Model())
            for again in range(3):
                for i in range(5):
                    prompt = [(7 * i + 13 * t) % 512 for t in range(330)]
                    serving.submit(f"r{i}.{again}", prompt, max_new=20)
                while serving.live:
                    serving.step()
            done[fault] = serving.done
    assert done[fails] == done[None]
    assert any(had > now for had, now in left)


def test_the_engine_takes_up_a_request_whose_last_token_was_sampled(monkeypatch):
    model, engine = programs(monkeypatch)
    prompt, done = [(13 * t) % 512 for t in range(330)], []
    for preempted in (False, True):
        with HiSparseBackend(model.CONFIG) as backend:
            serving = engine.Engine(backend, model.Model())
            serving.submit("r", prompt, max_new=20)
            if preempted:  # before it is certain
                monkeypatch.setattr(backend, "confirmed", lambda name: 0)
                while len(serving.live["r"].tokens) < 350:
                    serving.step()
                monkeypatch.undo()
                backend.preempt("r")
                serving.take(Changes(preempted=("r",)))
            while serving.live:
                serving.step()
            done.append(serving.done["r"])
    assert done[0] == done[1]


def test_the_engine_is_short():
    lines = [line for line in titled("python")["engine.py"].splitlines() if line.strip()]
    assert len(lines) <= ENGINE_LINES_MAX


def test_every_number_of_every_part_is_on_the_page(tmp_path):
    with HiSparseBackend(settings(suffix={"name": "cpu", "gib": 1e-5}), log=tmp_path) as backend:
        engine = Engine(backend)
        engine.admit("a", range(30), 9)
        engine.prefill("a")
        statistics = backend.statistics()
        rows = {part: row for row in table_rows() for part in re.findall(r"`(\w+)`", row[0])}
        assert statistics.keys() == rows.keys()
        for part, numbers in statistics.items():
            for counted in numbers if isinstance(numbers, list) else [numbers]:
                for name, value in counted.items():
                    assert isinstance(value, int) or (part, name) in NAMED, (part, name)
                    listed = part == "events" or f"`{name}`" in "".join(rows[part])
                    assert listed or (part == "worker" and f"`{name}`" in rows["groups"][2]), name
    closed = backend.statistics()
    assert closed.keys() == statistics.keys() and closed["worker"] == {} and not closed["layers"]


NAMED = {("log", "mode"), ("rank_log", "mode")}


def table_rows():
    section = DOC.partition("## Statistics")[2]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
