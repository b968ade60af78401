"""What is published: an sdist, and the wheel that is made of it.

The verbs that read a log are run from the unpacked wheel, where torch cannot be imported. With
``HISPARSE_WHEEL=verbs`` the wheel is installed into a bare virtual environment, and its console
script does the same; with ``HISPARSE_WHEEL=demo`` with its extra `torch` too, for the main job.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.version import Version

import hisparse

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden" / "format-1"
WHEEL = os.environ.get("HISPARSE_WHEEL", "")
VERBS = [
    "log info LOG",
    "log cat LOG --seq 1..20",
    "log tail LOG",
    "log recover LOG",
    "log recover LOG --salvage OUT/salvaged",
    "log compact LOG",
    "check LOG",
    "replay LOG",
    "replay LOG --at 100",
    "replay LOG --watch block=3",
    "why LOG block 3",
    "diff LOG@100 LOG@200",
    "what-if LOG",
    "shrink LOG",
    "export LOG --to jsonl -o OUT/log.jsonl",
    "export LOG --to html -o OUT/log.html",
    "trace generate OUT/chat.jsonl",
    "config --help",
    "fuzz --seed 3 --steps 20",
    "explore --requests 1 --ranks 1",
    "completion bash",
]
IN_PROCESS = """
import importlib.abc, json, sys
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "cupy", "cuda", "pyarrow", "perfetto", "hypothesis"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocker())
from click.testing import CliRunner
import hisparse
from hisparse.cli import cli
codes = {}
for words in json.loads(sys.argv[1]):
    result = CliRunner().invoke(cli, words.split(), prog_name="hisparse")
    codes[words] = (result.exit_code, result.output[-300:] if result.exit_code else "")
print(json.dumps({"file": hisparse.__file__, "codes": codes}))
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """Paths of an sdist of this tree, and of the wheel made of the sdist."""
    tree = tmp_path_factory.mktemp("package") / "tree"
    left_out = (".[!c]*", "runs", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*left_out))
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", tree / "out", tree],
        check=True,
        capture_output=True,
    )
    (sdist,) = (tree / "out").glob("*.tar.gz")
    (wheel,) = (tree / "out").glob("*.whl")
    return sdist, wheel


@pytest.fixture
def verbs(tmp_path):
    """The commands, on a copy of the golden log."""
    shutil.copytree(GOLDEN, tmp_path / "log")
    names = {"LOG": f"{tmp_path}/log", "OUT": str(tmp_path)}
    return [re.sub("LOG|OUT", lambda found: names[found[0]], verb) for verb in VERBS]


def test_the_wheel_holds_every_module_its_data_and_no_test(dist):
    names = set(zipfile.ZipFile(dist[1]).namelist())
    inside = {name for name in names if ".dist-info/" not in name}
    here = (path for path in (ROOT / "hisparse").rglob("*") if path.is_file())
    kept = (path for path in here if "__pycache__" not in path.parts)
    assert inside == {path.relative_to(ROOT).as_posix() for path in kept}
    assert not any(re.search("conftest|/tests?[/_]", name) for name in inside)


def test_the_sdist_holds_what_its_wheel_and_its_tests_are_made_of(dist):
    with tarfile.open(dist[0]) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("pyproject.toml", "LICENSE", "CHANGELOG.md", "docs/concepts.md"):
        assert name in inside
    assert {"tests/conftest.py", "tests/golden/format-1/recorded.json"} <= inside
    for folder in (".ci", "docs", "examples", "schemas", "tests"):
        here = (path for path in (ROOT / folder).rglob("*") if path.is_file())
        kept = {p.relative_to(ROOT).as_posix() for p in here if "__pycache__" not in p.parts}
        assert kept and kept <= inside, kept - inside


def test_name_version_and_entry_points(dist):
    archive = zipfile.ZipFile(dist[1])
    (info,) = {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name}
    told = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
    assert told["Name"] == "hisparse" and told["Version"] == hisparse.__version__
    assert str(Version(hisparse.__version__)) == hisparse.__version__, "PEP 440, in canonical form"
    assert {"torch", "cuda12", "parquet", "perfetto"} <= set(told.get_all("Provides-Extra"))
    assert not any(re.match("torch|pytest", need) for need in needed(told))
    points = archive.read(f"{info}/entry_points.txt").decode()
    assert "hisparse = hisparse.cli:main" in points and "[pytest11]" in points


def needed(told):
    """What is installed without any extra."""
    return [need for need in told.get_all("Requires-Dist") if "extra ==" not in need]


def test_the_changelog_speaks_of_this_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    (first, *_) = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    version = Version(hisparse.__version__)
    assert first == ("Unreleased" if version.is_devrelease else str(version))


def test_the_verbs_of_a_log_run_from_the_wheel_without_torch(dist, verbs, tmp_path):
    zipfile.ZipFile(dist[1]).extractall(tmp_path / "wheel")
    done = subprocess.run(
        [sys.executable, "-c", IN_PROCESS, json.dumps(verbs)],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "wheel")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert Path(report["file"]).is_relative_to(tmp_path / "wheel")
    assert {code for code, _ in report["codes"].values()} == {0}, report["codes"]


@pytest.mark.skipif(WHEEL not in ("verbs", "demo"), reason="HISPARSE_WHEEL=verbs or demo runs it")
def test_the_wheel_in_a_bare_environment(dist, verbs, tmp_path):
    """Needs a package index; with `demo`, a gigabyte."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def run(*words, code=0):
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == code, (words, done.stdout[-500:], done.stderr[-500:])
        return done.stdout + done.stderr

    script, pip = venv / "bin" / "hisparse", (venv / "bin" / "python", "-m", "pip", "-q")
    run(*pip, "install", dist[1])
    assert "torch" not in run(*pip, "list")
    for verb in verbs:
        run(script, *verb.split())
    assert "install 'hisparse[torch]'" in run(script, "run", code=2)
    for extra in ("parquet", "perfetto"):
        words = ("export", tmp_path / "log", "--to", extra, "-o", tmp_path / extra)
        assert f"hisparse[{extra}]" in run(script, *words, code=2)
    if WHEEL == "demo":
        run(*pip, "install", f"{dist[1]}[torch]")
        log = tmp_path / "demo"
        told = run(script, "run", "--requests", "64", "--log", log)
        assert re.search(r"tokens_identical +yes", told) and re.search(r"violations +0", told)
        (live,) = re.findall(r"state_digest +(\w+)", told)
        assert live in run(script, "replay", log)
