"""Residency policies: who is asked, what an answer may be, and whose answer the log names."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import numpy as np
import pytest
from kv_rig import SchedulerRig, make_config

from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError, PolicyError
from hisparse.fsm import events as ev
from hisparse.fsm.fold import fold
from hisparse.fsm.state import digest
from hisparse.kv import policies
from hisparse.kv.policies import Hybrid, PolicyView
from hisparse.kv.policies.registry import name_of, resolve


class Oldest(Hybrid):
    """Somebody's own: the request that came first loses first."""

    choice = "spill_oldest_request"

    def victims(self, view, need):
        order = np.argsort(view.arrived_seq, kind="stable").tolist()
        return [(row, int(view.excess[row])) for row in order if view.excess[row]]


class Greedy(Hybrid):
    def victims(self, view, need):
        return [(row, int(view.excess[row]) + 1) for row in np.flatnonzero(view.excess).tolist()]


class Fickle(Hybrid):
    asked = 0

    def victims(self, view, need):
        Fickle.asked += 1
        return super().victims(view, need)[: Fickle.asked % 2]


class Vandal(Hybrid):
    def victims(self, view, need):
        view.excess[:] = 99
        return []


class Misspelt(Hybrid):
    def victims(self, view, need):
        return [(row, 1) for row in view.residnet]


class Stops(Hybrid):
    def victims(self, view, need):
        yield np.argsort(view.excess, axis=7)


class Short(Hybrid):
    def victims(self, view):
        return []


class Nothing(Hybrid):
    def victims(self, view, need):
        return None


class Halved(Hybrid):
    def victims(self, view, need):
        return [(0, view.excess[0] / 2)]


class Rows(Hybrid):
    def victims(self, view, need):
        return np.flatnonzero(view.excess)


class Asks(Hybrid):
    def __init__(self, weight):
        self.weight = weight


class Mute(Hybrid):
    choice = None


OWN = f"{__name__}:Oldest"


def squeezed(name: str, **changes):
    """Three requests that together outgrow the pool, decoded under pressure; then the rig."""
    rig = SchedulerRig(make_config(blocks=26, longest=48, name=name, **changes))
    keys = [rig.arrive(f"q{i}", list(range(100 * i, 100 * i + 8 + 4 * i)), 20) for i in range(3)]
    for _ in range(20):
        rig.step()
    return rig, keys


def lost(rig) -> list[int]:
    return [e.row for e in rig.events(ev.PagesSpilled)]


@pytest.mark.parametrize("name", ["hybrid", "lru", "even", "host_first", OWN])
def test_every_policy_serves_under_pressure_and_its_choice_causes_the_spills(name):
    rig, keys = squeezed(name)
    chosen = [(s, e) for s, e in rig.log.read(1) if isinstance(e, ev.PolicyChosen)]
    spills = rig.events(ev.PagesSpilled)
    assert spills and all(e.policy == name for _, e in chosen)
    if name != "host_first":  # its pages leave as they are sealed, whether or not anything is short
        asked = [e for _, e in chosen if e.resource != "promotion"]
        assert asked and {e.choice for e in asked} == {resolve(name).choice}
        causes = {s for s, _ in chosen}
        assert any(e.cause in causes for e in spills)
    for key in keys:
        rig.coordinator.abort(*key)
    for _ in range(3):
        rig.step()
    assert rig.drained()


def view(excess, last_step=(0, 0, 0), on_host=(0, 0, 0), arrived=(1, 2, 3)):
    made = PolicyView(SchedulerRig().state, "growth")
    made.__dict__.update(
        excess=np.array(excess), last_step=np.array(last_step),
        on_host=np.array(on_host), arrived_seq=np.array(arrived),
    )  # fmt: skip
    return made


def test_the_builtin_rankings():
    assert resolve("hybrid").victims(view([2, 5, 0]), 4) == [(1, 5), (0, 2)]
    assert resolve("lru").victims(view([2, 5, 3], last_step=[9, 9, 4]), 4) == [
        (2, 3), (1, 5), (0, 2),
    ]  # fmt: skip
    shares = resolve("even").victims(view([4, 8, 0]), 6)
    assert shares == [(0, 2), (1, 4), (0, 2), (1, 4)]
    assert resolve("hybrid").promotions(view([0, 0, 0], on_host=[3, 1, 3])) == [1, 0, 2]
    assert resolve("host_first").promotions(view([0, 0, 0], on_host=[3, 1, 3])) == ()


def test_a_policy_of_ones_own_decides_by_module_and_class():
    rig, _ = squeezed(OWN)
    assert lost(rig)[0] == 0, "the request that came first"
    assert {e.choice for e in rig.events(ev.PolicyChosen)} >= {"spill_oldest_request"}


def test_a_registered_name_is_as_good_and_cannot_be_taken_twice():
    policies.register("oldest", Oldest)
    policies.register("oldest", Oldest)
    assert "oldest" in policies.names() and isinstance(resolve("oldest"), Oldest)
    with pytest.raises(ConfigError, match="'hybrid' is Hybrid: use another name"):
        policies.register("hybrid", Oldest)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("hybird", "unknown: use one of hybrid, lru, even, host_first"),
        ("no.such.module:Policy", "cannot be imported"),
        (f"{__name__}:Missing", "cannot be imported"),
        (f"{__name__}:squeezed", "must be a class like"),
        (f"{__name__}:Asks", r"cannot be made \(TypeError: .*'weight'.*made without arguments"),
        (f"{__name__}:Mute", "has choice=None and host_first=False"),
        ("collections:Counter", "without choice, host_first, victims, promotions"),
    ],
)
def test_a_policy_that_is_none_is_refused_at_the_start(name, says):
    with pytest.raises(ConfigError, match=says):
        SchedulerRig(make_config(name=name))


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (Greedy, "stay within view.excess"),
        (Fickle, "decides from its view alone"),
        (Vandal, r"raised ValueError: .*read-only \(HERE"),
        (Nothing, r"returned None, which is no sequence \(HERE.*\): return \(row, pages\) pairs"),
        (Halved, r"returned \(0, .*\) among its answers \(HERE.*\): return \(row, pages\) pairs"),
        (Rows, r"returned .* among its answers \(HERE"),
        (Misspelt, r"raised AttributeError: .*'residnet' \(HERE"),
        (Stops, r"raised AxisError: .* \(HERE"),
        (Short, r"raised TypeError: .*takes 2 positional arguments but 3 were given \(HERE"),
    ],
)
def test_what_a_policy_raises_or_answers_amiss_names_it_and_its_line(policy, says):
    here = re.escape(f"{Path(__file__).name}:")
    with pytest.raises(PolicyError, match=says.replace("HERE", here)) as caught:
        squeezed(f"{__name__}:{policy.__name__}")
    assert policy.__name__ in str(caught.value)
    assert "raised" not in says or caught.value.__cause__ is not None


def test_a_policy_that_raises_changes_nothing_and_its_line_is_that_of_the_fault():
    rig = SchedulerRig(make_config(blocks=26, longest=48, name=f"{__name__}:Misspelt"))
    for i in range(3):
        rig.arrive(f"q{i}", list(range(100 * i, 100 * i + 8 + 4 * i)), 20)
    line = inspect.getsourcelines(Misspelt.victims)[1] + 1
    with pytest.raises(PolicyError, match=rf"test_policies\.py:{line}\)"):
        for _ in range(20):
            rig.step()
    assert digest(fold(rig.config, rig.log.read(1))) == rig.coordinator.digest()
    assert not rig.events(ev.PolicyChosen)


def test_a_log_replays_where_the_policy_is_not_installed():
    rig, _ = squeezed(OWN)
    header = rig.config.model_dump_json().replace(OWN, "gone.module:Oldest")
    config = HiSparseConfig.model_validate_json(header)
    assert digest(fold(config, rig.log.read(1))) == rig.coordinator.digest()


def test_host_first_reads_from_the_host_before_anything_is_short():
    rig = SchedulerRig(make_config(blocks=200, host_pages=200, name="host_first"))
    key = rig.arrive("q", list(range(40)), 16)
    for _ in range(8):
        rig.step()
    assert rig.events(ev.HotLeased) and not rig.events(ev.PolicyChosen)
    resident = len(rig.blocks(key)) - rig.blocks(key).count(0)
    assert resident <= rig.state.window_pages + 1 < len(rig.blocks(key))


def test_a_class_has_the_name_that_resolves_to_it():
    class Hidden(Oldest):
        """Not to be found by module and name."""

    named = ((Hybrid, "hybrid"), (Fickle, f"{__name__}:Fickle"), (Hidden, "Hidden"))
    for policy, name in named:
        assert name_of(policy) == name and type(resolve(name)) is policy
    other = type("Hidden", (Oldest,), {})
    with pytest.raises(ConfigError, match="use another name"):
        name_of(other)
    with pytest.raises(ConfigError, match="it must be a class like"):
        name_of(dict)
