"""`hisparse what-if`: a recorded run beside itself, and beside what would have been."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
from cli_case import SMALL, call, call_process, error_of, report_of
from log_case import clean_events, write_log

from hisparse.fsm import events as ev
from hisparse.kv import managers
from hisparse.kv.block_pool import block_epochs

NO_TORCH = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "cupy"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocker())
"""


@pytest.fixture(scope="module")
def clean():
    return clean_events()


@pytest.fixture(scope="module")
def log(tmp_path_factory, clean):
    return write_log(tmp_path_factory.mktemp("what-if") / "log", *clean)


def figures(*args):
    """The report's variants by name."""
    return {row["name"]: row for row in report_of(call("what-if", *args, "--json"))["variants"]}


def seq_of(events, kind):
    return next(seq for seq, event in enumerate(events, 1) if isinstance(event, kind))


# -- the recorded run -----------------------------------------------------------------------------


def test_a_served_run_comes_out_with_the_figures_that_it_reported(tmp_path):
    log = tmp_path / "log"
    ran = report_of(call("run", *SMALL, "--abort-rate", "0.4", "--log", log, "--json"))
    report = report_of(call("what-if", log, "--json"))
    assert report["baseline"]["reproduced"] and report["baseline"]["figures_differ"] == []
    assert report["events"] == ran["events"] and report["assumed"] == []
    same = {
        "steps": "steps",
        "finished": "requests_finished",
        "aborted": "requests_aborted",
        "rows_computed": "rows_computed",
        "prefix_hit_tokens": "prefix_hit_tokens",
        "spills": "spills",
        "write_backs": "write_backs",
        "restores": "restores",
        "preemptions": "preemptions",
        "peak_gpu_blocks": "peak_gpu_blocks_hisparse",
        "peak_concurrent_requests": "concurrent_requests_hisparse",
    }
    for row in report["variants"]:
        assert {name: row[name] for name in same} == {n: ran[of] for n, of in same.items()}
    assert ran["requests_aborted"] > 0 and ran["spills"] > 0


def test_drafts_are_verified_and_rejected_as_they_were(tmp_path):
    log = tmp_path / "log"
    run = ("run", *SMALL, "--spec", "3", "--no-verify", "--log", log, "--json")
    ran = report_of(call(*run))
    report = report_of(call("what-if", log, "--json"))
    assert report["baseline"]["reproduced"] and ran["drafts_accepted"] > 0


def test_it_needs_no_torch(log):
    done = call_process("what-if", log, "--gpu-blocks", "30", code=NO_TORCH)
    assert done.returncode == 0 and "their replay equals the log" in done.stdout, done.stderr


# -- variants -------------------------------------------------------------------------------------


def test_lists_and_ranges_make_one_variant_a_combination(log):
    rows = figures(log, "--gpu-blocks", "20:40:10", "--write-back", "eager,on_pressure")
    assert [*rows][:2] == ["recorded", "replayed"] and len(rows) == 8
    assert rows["gpu-blocks 30, write-back on_pressure"]["changes"] == {
        "pools.gpu_blocks": 30,
        "policy.write_back": "on_pressure",
    }
    assert all(row["violations"] == [] for row in rows.values())
    text = call("what-if", log, "--gpu-blocks", "20:40:10", "--write-back", "eager,on_pressure")
    assert len(text.stdout.splitlines()) == 2 + 8 and "peak reqs" in text.stdout


def test_a_pool_that_is_too_small_says_what_would_do(log):
    result = call("what-if", log, "--host-pool-gib", "0.000007", "--json")
    row = json.loads(result.stdout)["variants"][-1]
    assert result.exit_code == 0 and row["refused"]["host_pages"] > 0
    assert "an engine would not start" in result.stderr and "use at least" in result.stderr


@pytest.mark.parametrize(
    "name,text",
    [("p.json", '{"watermark_blocks": 3}'), ("p.toml", "[policy]\nwatermark_blocks = 3")],
)
def test_a_policy_file_changes_the_fields_that_it_names(log, tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    rows = figures(log, "--policy", path, "--policy", "hybrid")
    assert rows[f"policy {path}"]["changes"] == {"policy.watermark_blocks": 3}
    assert rows[f"policy {path}"]["first_difference_seq"] is not None
    assert rows["policy hybrid"]["first_difference_seq"] is None, "it was that all along"


def test_a_class_of_ones_own_is_tried_and_one_that_the_log_names_is_not_imported(
    tmp_path, clean, log
):
    own = "hisparse.kv.policies:LeastRecentlyUsed"
    assert figures(log, "--policy", own)[f"policy {own}"]["changes"] == {"policy.name": own}
    config, events = clean
    policy = config.policy.model_copy(update={"name": "this:Poem"})
    foreign = write_log(tmp_path / "log", config.model_copy(update={"policy": policy}), events)
    result = call("what-if", foreign)
    assert result.exit_code == 2 and "say --policy this:Poem too" in result.stderr
    assert "this" not in sys.modules


def test_a_dropped_input_is_left_out_from_there_on(log, clean):
    seq = seq_of(clean[1], ev.RequestAborted)
    rows = figures(log, "--drop", seq)
    assert rows[f"drop {seq}"]["first_difference_seq"] == seq
    assert (rows["recorded"]["aborted"], rows[f"drop {seq}"]["aborted"]) == (1, 0)


def test_a_variant_that_breaks_a_rule_is_exit_code_1(log, monkeypatch):
    monkeypatch.setattr(managers, "next_block_epochs", block_epochs)  # reuses an epoch
    result = call("what-if", log, "--gpu-blocks", "22", "--json")
    assert result.exit_code == 1 and "violated: one_content" in result.stderr
    rows = json.loads(result.stdout)["variants"]
    assert rows[0]["violations"] == [] and rows[1]["violations"] != []
    assert "baseline differs" in result.stderr


# -- hot rows -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def selected(tmp_path_factory):
    """(log with selections, the run's report)."""
    log = tmp_path_factory.mktemp("selected") / "log"
    return log, report_of(call("run", *SMALL, "--record-selections", "--log", log, "--json"))


def test_recorded_selections_hit_again_what_they_hit(selected):
    log, ran = selected
    rows = figures(log, "--hot-rows", "32")
    assert ran["hot_hits"] > 0 < ran["hot_misses"]
    for row in rows.values():  # 32 is what was recorded
        for name in ("hot_hits", "hot_misses", "hot_hit_rate", "host_rows_read"):
            assert row[name] == ran[name], name
        assert row["selections_unknown"] == 0
    assert rows["recorded"]["selected_resident"] == rows["replayed"]["selected_resident"] > 0


def test_more_hot_rows_hit_more_and_read_less_from_the_host(selected):
    rows = figures(selected[0], "--hot-rows", "16,64")
    small, large = (rows[f"hot-rows {n}"] for n in (16, 64))
    assert small["hot_hit_rate"] < rows["recorded"]["hot_hit_rate"] < large["hot_hit_rate"]
    assert small["host_rows_read"] > large["host_rows_read"] > 0
    assert small["violations"] == large["violations"] == []


def test_a_pool_that_holds_everything_looks_nothing_up(selected):
    rows = figures(selected[0], "--hot-rows", "16,256", "--gpu-blocks", "600")
    rates = [row["hot_hits"] + row["hot_misses"] for row in [*rows.values()][2:]]
    assert rows["recorded"]["spills"] > 0 and rates == [0, 0]


def test_a_cut_log_counts_the_selections_of_its_steps(selected, tmp_path):
    torn = shutil.copytree(selected[0], tmp_path / "torn")
    segment = next(torn.glob("scheduler/*.seg"))
    segment.write_bytes(segment.read_bytes()[:-4000])
    result = call("what-if", torn, "--json")
    recorded, replayed = json.loads(result.stdout)["variants"]
    assert result.exit_code == 3 and 0 < recorded["hot_hits"] < selected[1]["hot_hits"]
    assert replayed["hot_hits"] == recorded["hot_hits"]
    assert replayed["hot_misses"] == recorded["hot_misses"]


def test_a_torn_sidecar_is_told_and_its_missing_rows_are_counted(selected, tmp_path):
    torn = shutil.copytree(selected[0], tmp_path / "torn")
    segment = next(torn.glob("selections/*.seg"))
    segment.write_bytes(segment.read_bytes()[:-30000])
    result = call("what-if", torn, "--json")
    assert result.exit_code == 3 and "selections: recovered with loss" in result.stderr
    rows = json.loads(result.stdout)["variants"]
    assert rows[1]["selections_unknown"] > 0


def test_one_request_in_n_is_recorded_whole(tmp_path, selected):
    log = tmp_path / "log"
    report_of(
        call("run", *SMALL, "--no-verify", "--record-selections", "2", "--log", log, "--json")
    )
    result = call("what-if", log, "--json")
    recorded, replayed = json.loads(result.stdout)["variants"]
    assert "requests are recorded: hot rows are theirs alone" in result.stderr
    assert 0 < recorded["hot_hits"] < selected[1]["hot_hits"]
    assert replayed["hot_hits"] == recorded["hot_hits"]
    assert replayed["hot_misses"] == recorded["hot_misses"]


def test_other_verbs_pass_over_the_sidecar(selected):
    for verb in ("check", "replay", "what-if"):
        assert call(verb, selected[0]).exit_code == 0, verb


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args,text",
    [
        (("--gpu-blocks", "many"), "--gpu-blocks 'many': give an integer"),
        (("--gpu-blocks", "5:1:1"), "from:to:step"),
        (("--gpu-blocks", "1:1000000:1"), "from:to:step"),
        (("--gpu-blocks", "0"), "--gpu-blocks=0"),
        (("--gpu-blocks", str(10**20)), f"--gpu-blocks={10**20} must be at most"),
        (("--max-requests", str(1 << 31)), f"--max-requests={1 << 31} must be at most"),
        (("--write-back", "later"), "--write-back='later'"),
        (("--host-pool-gib", "nan"), "--host-pool-gib=nan"),
        (("--gpu-blocks", "2:400", "--drop", "1"), "from:to:step"),
        (("--gpu-blocks", "20:60:1", "--step-rows", "10:30:1"), "at most 500"),
        (("--drop", "99999"), "seq 99999 is not in the log"),
        (("--policy", "fastest"), "one of hybrid"),
        (("--hot-rows", "16"), "hisparse run --record-selections"),
    ],
)
def test_what_cannot_be_tried_is_refused_in_one_line(log, args, text):
    assert text in error_of(call("what-if", log, *args))


def test_a_decision_is_no_input_and_is_named(log, clean):
    seq = seq_of(clean[1], ev.BlocksReserved)
    assert "BlocksReserved" in error_of(call("what-if", log, "--drop", seq))
    error = error_of(call("what-if", log, "--swap", 1, seq))
    assert "RequestArrived, RequestAborted and RequestPreempted" in error


@pytest.mark.parametrize(
    "text,said",
    [
        ('{"watermark": 3}', "watermark=3: no such key: did you mean watermark_blocks?"),
        ('{"write_back": "never"}', "write_back='never'"),
        ("[]", "holds no policy"),
        ("{", "give JSON"),
    ],
)
def test_a_policy_file_that_is_wrong_names_field_and_value(log, tmp_path, text, said):
    path = tmp_path / "policy.json"
    path.write_text(text)
    assert said in error_of(call("what-if", log, "--policy", path))


# -- damage ---------------------------------------------------------------------------------------


def test_a_torn_log_is_replayed_up_to_its_last_step(log, tmp_path):
    torn = shutil.copytree(log, tmp_path / "torn")
    segment = next(torn.glob("scheduler/*.seg"))
    segment.write_bytes(segment.read_bytes()[:-4000])
    result = call("what-if", torn, "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 3 and "recovered with loss" in result.stderr
    assert report["baseline"]["reproduced"] and report["until_step"] == report["steps"]
    assert report["variants"][0]["events"] == report["events"] > 100


def test_damage_in_the_middle_hides_what_follows_it(log, tmp_path):
    damaged = shutil.copytree(log, tmp_path / "damaged")
    segment = next(damaged.glob("scheduler/*.seg"))
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    result = call("what-if", damaged, "--json")
    assert result.exit_code == 1 and "loss found: damage in" in result.stderr
    assert json.loads(result.stdout)["baseline"]["reproduced"]


def test_no_log_is_a_usage_error(tmp_path):
    assert "no such directory" in error_of(call("what-if", tmp_path / "none"))
