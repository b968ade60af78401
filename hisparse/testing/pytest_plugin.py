"""The pytest plugin: fixture `hisparse_sim`, and what a failure shows. Installed, it is just there.

    def test_my_policy(hisparse_sim):
        hisparse_sim(policy=MyPolicy)

runs the simulated worlds of `--hisparse-seeds` with that policy, and fails at the first whose
invariants do not hold: with the seed, the least that has to be done to see it, and the command that
replays its log. State machines (`hisparse.testing.HiSparseMachine`) keep theirs in the same place.

This module is imported by every pytest run where hisparse is installed: nothing of hisparse but
this is loaded before a test asks for it, and never torch.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from hisparse.kv.policies import ResidencyPolicy
    from hisparse.testing.campaign import Campaign, Found
    from hisparse.testing.program import MakeReplica

SEEDS = "0..20"
KEEP = Path("runs") / "hisparse"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hisparse", "simulated replicas (hisparse_sim, HiSparseMachine)")
    add = group.addoption
    add("--hisparse-seeds", metavar="A..B", help=f"Seeds from A up to, not with, B ({SEEDS}).")
    add("--hisparse-seed", type=int, metavar="S", help="One seed again.")
    add("--hisparse-steps", type=int, metavar="N", help="Steps with faults, a seed (200).")
    add("--hisparse-faults", default="", metavar="A,B,-C", help="Kinds or families; -C leaves out.")
    add("--hisparse-minutes", type=float, metavar="M", help="Of each test: stop after so long.")
    add(
        "--hisparse-keep-logs",
        type=Path,
        default=KEEP,
        metavar="DIR",
        help=f"Where logs of failures are kept ({KEEP}).",
    )


class HiSparseSim:
    """What the fixture `hisparse_sim` is: a call runs a campaign."""

    def __init__(self, config: pytest.Config, nodeid: str) -> None:
        self._config = config
        self._nodeid = nodeid
        self._calls = 0

    def __call__(
        self,
        *,
        policy: type[ResidencyPolicy] | str | None = None,
        replica: MakeReplica | None = None,
        seeds: Sequence[int] | None = None,
        faults: str = "",
        steps: int | None = None,
        ranks: int | None = None,
    ) -> Campaign:
        """Run simulated worlds and return their tallies; the test fails at the first violation.

        Args:
            policy: decides in all of them, a class or a name; None: each of the built-in ones.
            replica: makes the replica; a subclass of `hisparse.testing.replica.SimReplica`.
            seeds: which worlds, where no option says (default: 0 to 19).
            faults: kinds or families that may strike, as of ``hisparse fuzz --faults``, where no
                option says (default: all).
            steps: scheduler steps with faults of each world, where no option says (default: 200).
            ranks: worker ranks; None: 1 to 3, drawn.
        """
        from hisparse.testing.atlas import select
        from hisparse.testing.campaign import run_campaign
        from hisparse.testing.own import Own
        from hisparse.testing.swarm import STEPS

        own = Own(policy, replica)
        campaign = run_campaign(
            self._seeds(seeds),
            kinds=select(self._option("faults") or faults),
            ranks=ranks,
            steps=self._option("steps") or steps or STEPS,
            minutes=self._option("minutes"),
            run=own.run,
            play=own.play,
        )
        self._calls += 1
        if campaign.found:
            self._fail(campaign.found[0])
        return campaign

    def _option(self, name: str) -> Any:
        return self._config.getoption(f"hisparse_{name}")

    def _seeds(self, given: Sequence[int] | None) -> Any:
        from hisparse.cli.fuzz import chosen_seeds

        seed, seeds, minutes = (self._option(name) for name in ("seed", "seeds", "minutes"))
        if given is not None and seed is None and seeds is None and minutes is None:
            return given
        if seed is None and seeds is None and minutes is None:
            seeds = SEEDS
        return chosen_seeds(seeds, seed, minutes if seed is None else None)[0]

    def _fail(self, found: Found) -> NoReturn:
        __tracebackhide__ = True
        from hisparse.testing.logs import PROGRAM, keep_again

        result, violation = found.result, found.result.violation
        assert violation is not None
        name = "".join(c if c.isalnum() else "-" for c in self._nodeid.rpartition("/")[2])
        directory = self._option("keep_logs") / f"{name}-{self._calls}"
        keep_again(result, directory)
        where = shlex.quote(str(directory))
        lines = [f"seed {result.seed}: {found.told()[0]}", *found.told()[1:]]
        lines += [
            f"seed: pytest {shlex.quote(self._nodeid)} --hisparse-seed {result.seed}",
            f"replay: hisparse replay {where} --at {max(violation.seq - 1, 0)}",
            f"again: python -m hisparse fuzz --program {shlex.quote(str(directory / PROGRAM))}",
        ]
        pytest.fail("\n".join(lines), pytrace=False)


@pytest.fixture
def hisparse_sim(request: pytest.FixtureRequest) -> HiSparseSim:
    """Runs simulated worlds in which faults strike: `hisparse_sim(policy=MyPolicy)`."""
    return HiSparseSim(request.config, request.node.nodeid)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """State machines keep what they find where the option says."""
    import sys

    machine = sys.modules.get("hisparse.testing.machine")
    if machine is not None and machine.HiSparseMachine.keep_logs is None:
        machine.HiSparseMachine.keep_logs = item.config.getoption("hisparse_keep_logs")
