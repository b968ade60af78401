"""What a verb refuses it names as its caller said it: by option, or by the file's path; and what it
tells to use instead is taken."""

from __future__ import annotations

import json
import re

import pytest
from cli_case import SMALL, call, error_of

from hisparse.cli.errors import spoken

BARE = re.compile(r"(?<![\w-])[a-z_]+(?:\.[a-z_]+)*=")  # a field before its value, not an option
SMALL_EXPLORE = ("explore", "--requests", 1, "--ranks", 1, "--max-states", 1)
COORDINATOR = ("bench", "coordinator", "--requests", 2, "--tokens", 64, "--steps", 2, "--runs", 1)
REFUSED = [
    (("explore", "--blocks", 1), ["--blocks=1", "--pages=1", "use at least 2"]),
    (("explore", "--pages", 3, "--host-pages", 2, "--blocks", 2),
     ["--blocks=2", "--host-pages=2", "--pages=3"]),
    (("explore", "--policy", "nope"), ["--policy='nope'", "use one of hybrid"]),
    (("explore", "--policy", "a b"), ["--policy='a b'"]),
    (("fuzz", "--seeds", "4"), ["--seeds='4'", "use 0..500"]),
    (("fuzz", "--faults", "nope"), ["--faults='nope'", "use one of ack_lost"]),
    ((*COORDINATOR, "--gpu-blocks", 2), ["--gpu-blocks=2", "--requests=2", "use at least"]),
    (("bench", "coordinator", "--steps", 5000), ["--steps=5000", "--runs=5", "3968"]),
    (("bench", "log", "--requests", 1, "--tokens", 64, "--steps", 9000), ["--steps=9000", "4032"]),
    (("bench", "backend", "--tokens", 600, "--top-k", 600, "--steps", 1, "--runs", 1),
     ["--requests=8", "--tokens=600", "--top-k=600"]),
    (("run", "--gpu-blocks", 2), ["--gpu-blocks=2", "use at least"]),
    (("run", "--host-pool-gib", "0.000001"), ["--host-pool-gib=1e-06", "use at least"]),
    (("run", "--suffix", "cpu", "--suffix-gib", "1e-9"), ["--suffix-gib=1e-09", "use at least"]),
    (("run", "--top-k", 64), ["--hot-rows=32", "--top-k=64"]),
    (("run", "--requests", 0, "--seed", -1), ["--requests=0", "--seed=-1"]),
    (("run", "--policy", "resident"), ["--policy='resident'", "use one of hybrid"]),
    (("run", "--device", "tpu"), ["--device='tpu'", "use one of cpu, cuda"]),
    (("run", "--graph"), ["--graph: --device='cpu'"]),
    (("run", "--model", "glm_moe_dsa", "--spec", 2), ["--spec=2", "--model='glm_moe_dsa'"]),
    (("run", "--record-selections"), ["--record-selections=1"]),
    (("trace", "generate", "out.jsonl", "--requests", -1, "--max-tokens", 3),
     ["--requests=-1: use at least 0", "--max-tokens=3: use more than"]),
]  # fmt: skip


@pytest.mark.parametrize(("args", "says"), REFUSED)
def test_a_refusal_names_the_options_that_were_typed(tmp_path, monkeypatch, args, says):
    monkeypatch.chdir(tmp_path)
    line = error_of(call(*args)).removeprefix("hisparse: error: ")
    assert [text for text in says if text not in line] == [], line
    assert BARE.findall(line) == [], line


@pytest.mark.parametrize(
    ("args", "refused"),
    [
        (SMALL_EXPLORE, {"--blocks": 1}),
        (SMALL_EXPLORE, {"--pages": 4, "--blocks": 1, "--host-pages": 1}),
        ((*COORDINATOR, "--no-tenfold"), {"--gpu-blocks": 2}),
        (("run", *SMALL, "--no-verify"), {"--gpu-blocks": 2, "--host-pool-gib": 1e-6}),
    ],
)
def test_what_a_refusal_tells_to_use_is_taken(args, refused):
    given = [text for pair in refused.items() for text in pair]
    line = error_of(call(*args, *given))
    told = dict(
        re.findall(r"(--[\w-]+)=(?:(?!--[\w-]+=\S+ (?:can|hold)).)*?use at least ([\d.]+)", line)
    )
    assert set(told) == set(refused) - {"--pages"}, line
    result = call(*args, *given, *(text for pair in told.items() for text in pair))
    assert result.exit_code == 0, result.output


def test_what_a_file_says_is_named_by_its_path_there_and_what_an_option_says_by_that(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"pools": {"gpu_blocks": 2}, "run": {"graph": True, "spec": -1}}))
    line = error_of(call("run", "--config", path, "--top-k", -1, "--spec", -2))
    for text in ("--top-k=-1: Input", "--spec=-2: Input", "run.graph=True: --device='cpu'"):
        assert text in line
    path.write_text(json.dumps({"pools": {"gpu_blocks": 2}}))
    assert "pools.gpu_blocks=2 cannot hold" in error_of(call("run", "--config", path))


def test_only_fields_are_renamed_and_no_text_that_looks_like_one():
    names = {"policy": "--policy", "pools.gpu_blocks": "--gpu-blocks", "graph": "--graph"}
    for text in (
        "policy Halves: victims() returned None",
        "/var/pools.gpu_blocks/x: No such file",
        "my_policy=1, pools.gpu_blocks_max, pools.gpu_blocks.x, 'policy=4'",
    ):
        assert spoken(text, names) == text
    assert spoken("raise pools.gpu_blocks: graph=True.", names) == "raise --gpu-blocks: --graph."
