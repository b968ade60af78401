"""A campaign in which one kind of fault strikes code that breaks its rule."""

from __future__ import annotations

from hisparse.testing.campaign import run_campaign, simulate_one


def found_by(kind, *beside, seeds=40, steps=60, ranks=None):
    """The invariant that fails first; the least that it takes includes `kind`.

    A `run` of one's own, without a `play`, leaves out that a small program is looked for, which
    would take most of the time; `test_pytest_plugin.py` and `cli/test_cli_fuzz.py` see those.
    """

    def run(seed, swarm):
        return simulate_one(seed, swarm)

    kinds = [kind, *beside]
    campaign = run_campaign(range(seeds), kinds=kinds, ranks=ranks, steps=steps, run=run)
    assert campaign.found, campaign.report()
    assert kind in campaign.found[0].faults
    return campaign.found[0].result.violation.invariant
