"""The pytest plugin: the documented example finds its broken policy and prints a witness; options;
nothing heavy is loaded before a test asks, and torch never."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest_plugins = "pytester"
ROOT = Path(__file__).resolve().parents[2]
DOCS = (ROOT / "docs" / "fuzzing.md").read_text(encoding="utf-8")
PLUGIN = "hisparse.testing.pytest_plugin"


@pytest.fixture
def project(pytester, monkeypatch):
    """A project of somebody's own; `run` runs its tests with the plugin and no other."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{pytester.path}")

    def run(*arguments):
        return pytester.runpytest_subprocess("-p", PLUGIN, *arguments)

    pytester.run_tests = run
    return pytester


def documented(name):
    """The code block of docs/fuzzing.md that begins with the comment ``# name``."""
    return re.search(rf"```python\n(# {re.escape(name)}\n.*?)```", DOCS, re.S).group(1)


@pytest.mark.parametrize("name", ["test_policies.py", "test_policies_machine.py"])
def test_the_documented_example_finds_the_broken_policy(project, name):
    for file in ("policies.py", name):
        # Hypothesis looks for the shortest for most of a minute: `test_machine.py` sees it do so.
        text = documented(file).replace("Phase.generate, Phase.shrink", "Phase.generate")
        (project.path / file).write_text(text)
    result = project.run_tests("--hisparse-steps", "60", name)
    result.assert_outcomes(failed=1)
    text = result.stdout.str()
    assert "policy Halves: victims() takes" in text
    kept = re.search(r"replay: hisparse replay (\S+) --at (\d+)", text)
    assert kept and f"again: python -m hisparse fuzz --program {kept[1]}/program.json" in text

    def hisparse(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "hisparse", *arguments],
            cwd=project.path,
            capture_output=True,
            text=True,
        )

    assert hisparse("replay", kept[1], "--at", kept[2]).returncode == 0
    again = hisparse("fuzz", "--program", f"{kept[1]}/program.json")
    assert again.returncode == 1 and "policy Halves" in again.stderr


def test_with_the_documented_repair_nothing_is_found(project):
    (project.path / "test_policies.py").write_text(documented("test_policies.py"))
    broken = documented("policies.py")
    repair = "min(view.resident[row] // 2, view.excess[row])"
    assert f"`{repair}` repairs it" in DOCS
    repaired = broken.replace("view.resident[row] // 2", repair)
    assert broken != repaired
    (project.path / "policies.py").write_text(repaired)
    few = ("--hisparse-seeds", "0..6", "--hisparse-steps", "60")
    project.run_tests(*few).assert_outcomes(passed=1)


def test_a_failure_shows_seed_witness_and_how_to_see_it_again(project):
    project.makepyfile(
        policies=documented("policies.py"),
        test_it="""
        from policies import Halves

        def test_it(hisparse_sim):
            hisparse_sim(policy=Halves, steps=30, seeds=range(3), ranks=1)
        """,
    )
    result = project.run_tests("--hisparse-keep-logs", "kept", "--hisparse-faults", "requests")
    text = result.stdout.str()
    seed = re.search(r"seed (\d+): PolicyError", text)[1]
    assert f"seed: pytest test_it.py::test_it --hisparse-seed {seed}" in text
    assert "kept/test-it-py--test-it-1" in text and re.search(r"\n  submit q\d+: \d+ tokens", text)
    once = project.run_tests("--hisparse-seed", seed, "--hisparse-faults", "requests")
    assert f"seed {seed}: PolicyError" in once.stdout.str()


def test_what_a_policy_raises_is_told_with_its_line(project):
    project.makepyfile(
        policies=documented("policies.py").replace("view.live[row]]", "view.lives[row]]"),
        test_it="""
        from policies import Halves

        def test_it(hisparse_sim):
            hisparse_sim(policy=Halves, steps=30, seeds=range(3), ranks=1, faults="requests")
        """,
    )
    text = project.run_tests().stdout.str()
    assert re.search(
        r"seed \d+: PolicyError at seq \d+: policy Halves: victims\(\) raised AttributeError: .*"
        r"'lives' \(policies\.py:\d+\)\n",
        text,
    )


def test_options_say_which_worlds(project):
    project.makepyfile(
        test_it="""
        def test_it(hisparse_sim):
            campaign = hisparse_sim(seeds=[70, 71], steps=500)
            print(campaign.seeds, campaign.kinds, campaign.steps < 600)
            assert 0
        """
    )
    given = project.run_tests("--hisparse-steps", "30").stdout.str()
    assert "[70, 71] ('ack_lost'," in given and ") True" in given
    told = project.run_tests(
        *("--hisparse-seeds", "3..5", "--hisparse-steps", "30", "--hisparse-faults", "ack_cut")
    )
    assert "[3, 4] ('ack_cut',) True" in told.stdout.str()
    wrong = project.run_tests("--hisparse-faults", "gremlins").stdout.str()
    assert "'gremlins' is no kind of fault" in wrong


BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "cupy", "cuda"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocker())
import hisparse.testing.pytest_plugin
assert {m for m in sys.modules if m.startswith("hisparse")} == {
    "hisparse", "hisparse.testing", "hisparse.testing.pytest_plugin"
}
import pytest
sys.exit(pytest.main(["-q", "-p", "hisparse.testing.pytest_plugin", *sys.argv[1:]]))
"""


def test_it_works_without_torch_and_loads_nothing_before_it_is_asked(project):
    project.makepyfile(test_it="def test_it(hisparse_sim): hisparse_sim(seeds=[0, 1], steps=20)")
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED], cwd=project.path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_distribution_announces_it():
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert points["pytest11"] == {"hisparse": PLUGIN}
