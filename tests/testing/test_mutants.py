"""How mutants are hunted. That each is found, CI asks by `hisparse fuzz --mutants`."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from mutants import MUTANTS
from mutants.pools import freed_block_kept_in_no_queue, reuse_an_epoch

from hisparse.errors import ConfigError
from hisparse.kv.coordinator import HiSparseCoordinator
from hisparse.testing import mutation
from hisparse.testing.simulator import simulate

PACKAGE = Path(mutation.__file__).resolve().parents[1]


def test_a_mutant_is_found_and_its_witness_is_events_where_a_log_shows_it():
    caught = mutation.hunt("one", reuse_an_epoch, range(3), steps=40)
    row = caught.report()
    assert row["found"] and row["invariant"] == "one_content" and row["witness_of"] == "events"
    assert row["witness"] <= 12 and row["seeds"] == 1 and row["events"] > 0
    assert simulate(0).violation is None  # the code is whole again


def test_where_no_log_shows_it_the_witness_is_what_has_to_be_done():
    caught = mutation.hunt("one", freed_block_kept_in_no_queue, range(3), steps=40)
    assert caught.invariant == "conservation" and caught.report()["witness_of"] == "operations"


def test_one_that_is_only_found_has_no_witness():
    row = mutation.hunt("one", reuse_an_epoch, range(3), steps=40, shrink=False).report()
    assert row["found"] and row["seeds"] == 1 and (row["witness"], row["witness_of"]) == (0, "")


def test_what_is_not_there_is_not_found():
    def whole():
        """Nothing is broken."""
        return nullcontext()

    row = mutation.hunt("none", whole, range(2), steps=20).report()
    assert not row["found"] and row["seeds"] == 2 and row["witness"] == 0 and row["invariant"] == ""


def test_one_that_does_not_fit_the_code_is_not_taken_for_found(monkeypatch):
    @contextmanager
    def outdated():
        """What is admitted is decided by a function of no arguments."""
        with monkeypatch.context() as patch:
            patch.setattr(HiSparseCoordinator, "plan_step", lambda self: None)
            yield

    with pytest.raises(ConfigError, match=r"outdated does not fit the code: TypeError"):
        mutation.hunt("outdated", outdated, range(2), steps=20)


def test_mutants_are_loaded_from_a_checkout_and_chosen_by_name_or_part():
    loaded = mutation.load()
    assert list(loaded) == list(MUTANTS) and len(loaded) >= 40
    parts = [mutation.select(loaded, f"{i}/3") for i in range(3)]
    assert sorted(name for part in parts for name in part) == sorted(loaded)
    assert list(mutation.select(loaded, "reuse_an_epoch")) == ["reuse_an_epoch"]
    with pytest.raises(ConfigError, match="'gremlin' is no mutant: use I/N, or of "):
        mutation.select(loaded, "gremlin")


def test_an_installed_package_says_where_the_mutants_are(tmp_path, monkeypatch):
    monkeypatch.setattr(mutation, "WHERE", tmp_path)
    monkeypatch.delitem(mutation.sys.modules, "hisparse_mutants", raising=False)
    with pytest.raises(ConfigError, match="call it in a checkout of its repository"):
        mutation.load()


def test_nothing_in_the_package_knows_a_mutant():
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not [name for name in MUTANTS if name in text], path
