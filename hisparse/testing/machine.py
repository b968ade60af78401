"""HiSparseMachine: a replica as a state machine of Hypothesis.

Each rule is an operation of a `SimReplica`; after each, everything is checked. Request ids are a
bundle, so that operations meet requests that wait, run, drain or are over, and ids come again. At
the end faults cease and all must settle. What fails shrinks to a program of a few lines:

    state = HiSparseMachine()
    state.begin(lag=0.0, log_on_disk=False, world=World(ranks=2))
    request_0 = state.submit(max_new=1, shared=4, stem=0, tail=1)
    state.fault(kind='copy_failed', steps=3)
    state.abort(request=request_0)
    state.teardown()

A policy or a backend of one's own takes a subclass (docs/fuzzing.md); its `TestCase` is what pytest
and unittest run:

    class MyPolicyMachine(HiSparseMachine):
        policy = MyPolicy

    TestMyPolicy = MyPolicyMachine.TestCase

With `keep_logs` the log and the program of the last failing example lie below that directory, for
`hisparse replay`, `check`, `shrink`, and for `hisparse fuzz --program`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, precondition, rule

from hisparse.errors import InvariantViolation
from hisparse.kv.policies import ResidencyPolicy
from hisparse.testing.atlas import ATLAS
from hisparse.testing.logs import PROGRAM, keep_again
from hisparse.testing.own import with_policy
from hisparse.testing.program import MakeReplica, Player, Program, live
from hisparse.testing.replica import SimReplica
from hisparse.testing.simulator import result_of
from hisparse.testing.strategies import LAGS, RANKS_MAX, worlds
from hisparse.testing.worlds import EOS, World

TOKENS_MAX = 24  # of a prompt
STEMS = 2
DISK = {  # options of a `DiskLog` on the simulated disk
    "fsync": "commit",
    "segment_bytes": 3000,
    "on_error": "stop",
    "snapshot_events": 100,
}

tokens = st.integers(1, TOKENS_MAX - 2)
answer_tokens = st.integers(1, 12)
tail_tokens = st.integers(1, 3)


def _stem(number: int) -> list[int]:
    """The tokens that prompts of a stem begin with."""
    return [(number * 31 + i) % EOS for i in range(TOKENS_MAX)]


def _kinds(*families: str) -> st.SearchStrategy[str]:
    """Kinds of these families (none named: all) that the machine allows; if none, any of its."""

    def of(machine: HiSparseMachine) -> st.SearchStrategy[str]:
        found = [k for k in machine.kinds if not families or ATLAS[k].family in families]
        return st.sampled_from(found or list(machine.kinds))

    return st.runner().flatmap(of)


fault_steps = st.integers(1, 8)


class HiSparseMachine(RuleBasedStateMachine):
    """One replica. Subclasses say what is theirs:

    policy: a `ResidencyPolicy` class, or a name of one; None: each of the built-in ones.
    replica: makes the replica; a subclass of `SimReplica`, say with a `make_device` of its own.
    kinds: kinds of fault of the atlas that may strike.
    keep_logs: where a failing example's log and program are written; None: nowhere.
    """

    policy: ClassVar[type[ResidencyPolicy] | str | None] = None
    replica: ClassVar[MakeReplica] = SimReplica
    kinds: ClassVar[tuple[str, ...]] = tuple(ATLAS)
    keep_logs: ClassVar[Path | None] = None

    requests = Bundle("request")
    player: Player

    def __init__(self) -> None:
        super().__init__()
        self.submitted = 0
        self.error: Exception | None = None

    @initialize(world=worlds(), lag=st.sampled_from(LAGS), log_on_disk=st.booleans())
    def begin(self, world: World, lag: float, log_on_disk: bool) -> None:
        """The world, how far its streams hang back, and where its log is: the faults of a disk
        need one."""
        config = with_policy(world.config(), self.policy)
        faults = dict.fromkeys(self.kinds, 0.0)
        start = Program(config, "machine", (lag,), faults, disk=DISK if log_on_disk else None)
        self.player = Player(start, type(self).replica)

    @property
    def asleep(self) -> bool:
        return self.player.replica.coordinator.is_sleeping

    def do(self, verb: str, **arguments: Any) -> bool:
        """An operation, after which everything is checked; a failure is kept."""

        def act() -> bool:
            done = self.player.do(verb, **arguments)
            if verb != "step":  # which ends in a check
                self.player.replica.check()
            return done

        return bool(self._watched(act))

    def _watched(self, act: Callable[[], object]) -> object:
        """What `act` returns. A violation that a checker saw is raised as such, whatever the code
        under test raised over it, so that all that shows it is one fault to Hypothesis."""
        try:
            return act()
        except Exception as error:
            self.error = error
            checker = self.player.replica.coordinator.checker
            seen = checker.violations[:1] if checker is not None else []
            if isinstance(error, InvariantViolation) or not seen:
                self._keep(error)
                raise
            during = f"it showed as {type(error).__name__}: {error}"
        found = InvariantViolation(seen[0].invariant, seen[0].message, seq=seen[0].seq)
        found.add_note(during)
        self._keep(found)
        raise found  # out here, so that it has no context: Hypothesis tells faults apart by that

    def _keep(self, error: Exception) -> None:
        if self.keep_logs is None:
            return
        result = result_of(self.player, error)
        assert result.violation is not None
        directory = self.keep_logs / type(self).__name__
        keep_again(result, directory)
        at = max(result.violation.seq - 1, 0)
        error.add_note(f"replay: hisparse replay {directory} --at {at}")
        error.add_note(f"again: python -m hisparse fuzz --program {directory / PROGRAM}")

    # -- clients ----------------------------------------------------------------------------------
    @rule(
        target=requests,
        stem=st.integers(0, STEMS - 1),
        shared=tokens,
        tail=tail_tokens,
        max_new=answer_tokens,
    )
    def submit(self, stem: int, shared: int, tail: int, max_new: int) -> str:
        """A new id; its prompt begins with `shared` tokens of a stem, and ends in its own."""
        self.submitted += 1
        request = f"r{self.submitted}"
        self._submit(request, _stem(stem)[:shared], tail, max_new)
        return request

    @rule(request=requests, tail=tail_tokens, max_new=answer_tokens)
    def submit_again(self, request: str, tail: int, max_new: int) -> None:
        """An id that is there already: refused while it is open, another epoch afterwards. The
        prompt continues what the request had said by now, as a conversation does."""
        served = live(self.player.replica, request)
        done = self.player.replica.engine.done
        served = served or next((s for s in reversed(done) if s.request == request), None)
        before = served.tokens[: TOKENS_MAX - 3] if served is not None else []
        self._submit(request, before, tail, max_new)

    def _submit(self, request: str, begin: list[int], tail: int, max_new: int) -> None:
        first = 50 + 7 * len(self.player.program.operations)  # its own: no two tails alike
        end = [(first + i) % EOS for i in range(tail)]
        self.do("submit", request=request, prompt=[*begin, *end], max_new=max_new)

    @rule(request=requests)
    def abort(self, request: str) -> None:
        self.do("abort", request=request)

    @rule(request=requests)
    def finish(self, request: str) -> None:
        self.do("stop", request=request)

    # -- the engine -------------------------------------------------------------------------------
    @rule(times=st.integers(1, 10))
    def step(self, times: int) -> None:
        self.pass_steps(times)

    def pass_steps(self, times: int) -> None:
        for _ in range(times):
            self.do("step")

    @rule(request=requests)
    def preempt(self, request: str) -> None:
        self.do("preempt", request=request)

    @precondition(lambda self: self.player.replica.state.prefix)
    @rule()
    def reset(self) -> None:
        self.do("reset")

    @precondition(lambda self: not self.asleep)
    @rule(level=st.sampled_from([1, 2]))
    def sleep(self, level: int) -> None:
        self.do("sleep", level=level)

    @precondition(lambda self: self.asleep)
    @rule()
    def wake_up(self) -> None:
        self.do("wake_up")

    # -- faults -----------------------------------------------------------------------------------
    @rule(kind=_kinds(), steps=fault_steps)
    def fault(self, kind: str, steps: int) -> None:
        """It strikes at its next opportunity. Then so many steps pass."""
        self.do("arm", kind=kind)
        self.pass_steps(steps)

    @rule(kind=_kinds("acknowledgements"), steps=fault_steps)
    def spoil_acknowledgements(self, kind: str, steps: int) -> None:
        """Likewise; rules of their own, so that the search comes to these often."""
        self.fault(kind, steps)

    @rule(kind=_kinds("copies", "requests"), steps=fault_steps)
    def spoil_copies(self, kind: str, steps: int) -> None:
        self.fault(kind, steps)

    @rule(rank=st.integers(0, RANKS_MAX - 1), notice_steps=st.sampled_from([0, 1, 4]))
    def crash_rank(self, rank: int, notice_steps: int) -> None:
        self.do("crash_rank", rank=rank, notice_steps=notice_steps)

    @precondition(lambda self: self.player.replica.engine.live)
    @rule()
    def crash_scheduler(self) -> None:
        self.do("crash_scheduler")

    # -- its end ----------------------------------------------------------------------------------
    def teardown(self) -> None:
        """Faults cease; all has to settle, nothing may stay leased."""
        if self.error is None and hasattr(self, "player"):
            self._watched(self.player.replica.settle)
