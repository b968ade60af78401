"""Simulated worlds with somebody's own policy, or on a replica of their own."""

from __future__ import annotations

from dataclasses import replace

from hisparse.config import HiSparseConfig
from hisparse.kv.policies import ResidencyPolicy, name_of
from hisparse.testing.program import MakeReplica, Program
from hisparse.testing.replica import SimReplica
from hisparse.testing.simulator import Simulation, SimulationResult, play
from hisparse.testing.swarm import Swarm


def with_policy(
    config: HiSparseConfig, policy: type[ResidencyPolicy] | str | None
) -> HiSparseConfig:
    """The same configuration, decided by `policy`. Raises ConfigError for what is none."""
    if policy is None:
        return config
    name = policy if isinstance(policy, str) else name_of(policy)
    changed = config.policy.model_copy(update={"name": name})
    return config.model_copy(update={"policy": changed})


class Own:
    """`run` and `play`, as `run_campaign` takes them."""

    def __init__(
        self, policy: type[ResidencyPolicy] | str | None, replica: MakeReplica | None
    ) -> None:
        self.policy = policy
        self.replica = replica or SimReplica

    def run(self, seed: int, swarm: Swarm) -> SimulationResult:
        own = replace(swarm, config=with_policy(swarm.config, self.policy))
        return Simulation(seed, own, replica=self.replica).run()

    def play(self, program: Program) -> SimulationResult:
        return play(program, self.replica)
