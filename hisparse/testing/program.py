"""A program: a world, and what is done to it, in order. It can be written, read and done again.

The simulator keeps the program of each of its runs, a state machine of a property test that of its
failing example; so what either of them found, the other side's tools do again, make smaller and
keep in a corpus. Requests go by their ids: an operation on an id that names nothing, or nothing
that it could be done to, does nothing, so that operations can be left out one by one.

What no operation says is drawn from `seed`: how streams lag, what is sampled, and how a fault does
its harm. So a program gives the same run as long as the code under test does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import msgspec
import numpy as np
from pydantic import ValidationError

from hisparse.config import HiSparseConfig
from hisparse.engine.served import Served
from hisparse.engine.trace import WorkloadRequest
from hisparse.errors import ConfigError, InvariantViolation, UsageError
from hisparse.testing.atlas import ATLAS
from hisparse.testing.replica import SimReplica

VERBS: dict[str, tuple[str, ...]] = {  # and their arguments
    "submit": ("request", "prompt", "max_new"),
    "step": (),
    "abort": ("request",),
    "preempt": ("request",),
    "stop": ("request",),
    "reset": (),
    "sleep": ("level",),
    "wake_up": (),
    "crash_rank": ("rank", "notice_steps"),
    "crash_scheduler": (),
    "arm": ("kind",),
}
Operation = tuple[str, dict[str, Any]]
MakeReplica = Callable[..., SimReplica]


@dataclass(frozen=True)
class Program:
    """A world (the arguments of `SimReplica`) and the operations, each a verb and its arguments."""

    config: HiSparseConfig
    seed: str
    lags: tuple[float, ...] = (0.5,)
    faults: Mapping[str, float] = field(default_factory=dict)
    tides: bool = False
    check_every: int = 1
    disk: Mapping[str, Any] | None = None
    operations: tuple[Operation, ...] = ()

    def lines(self) -> list[str]:
        """The operations for people; equal ones in a row are one line."""
        told = (_told(*operation) for operation in self.operations)
        counted = ((line, len(list(same))) for line, same in groupby(told))
        return [line if n == 1 else f"{line}, {n} times" for line, n in counted]


def _told(verb: str, arguments: Mapping[str, Any]) -> str:
    if verb == "submit":
        tokens = len(arguments["prompt"])
        return f"submit {arguments['request']}: {tokens} tokens, {arguments['max_new']} more"
    return " ".join([verb, *(str(value) for value in arguments.values())])


# -- on disk ---------------------------------------------------------------------------------------
def to_json(program: Program) -> str:
    """The program as JSON, an operation a line."""
    head = {
        "config": program.config.model_dump(mode="json", exclude_defaults=True),
        "seed": program.seed,
        "lags": program.lags,
        "faults": dict(program.faults),
        "tides": program.tides,
        "check_every": program.check_every,
        "disk": program.disk,
    }
    lines = [f"{_json(name)}: {_json(value)}" for name, value in head.items()]
    done = ",\n  ".join(_json(operation) for operation in program.operations)
    return "{" + ",\n ".join([*lines, f'"operations": [\n  {done}]']) + "}\n"


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def from_json(text: str | bytes, where: str = "program") -> Program:
    """The program that `to_json` wrote. Raises ConfigError, which names what cannot be used."""
    try:
        raw = msgspec.json.decode(text)
        config = HiSparseConfig.model_validate_json(_json(raw.pop("config")))
        operations = tuple((str(verb), dict(given)) for verb, given in raw.pop("operations"))
        lags = tuple(map(float, raw.pop("lags")))
        program = Program(config, lags=lags, operations=operations, **raw)
    except (msgspec.DecodeError, ValidationError, TypeError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{where}: not a program ({reason}): give a file of --keep-logs"
        ) from None
    for at, (verb, given) in enumerate(operations):
        if set(given) != set(VERBS.get(verb, ("no such verb",))):
            raise ConfigError(
                f"{where}: operations[{at}]={verb!r} with {', '.join(given) or 'nothing'}: use one "
                f"of {', '.join(VERBS)}, with its arguments"
            )
    kinds = {given["kind"] for verb, given in operations if verb == "arm"}
    for kind in kinds | set(program.faults):
        if kind not in ATLAS:
            raise ConfigError(f"{where}: {kind!r} is no kind of fault: use {', '.join(ATLAS)}")
    return program


# -- done --------------------------------------------------------------------------------------
class Player:
    """Does operations to a replica of its own, and keeps which.

    Args:
        world: the program whose world it is; its operations are not done by themselves.
        replica: makes the replica; raises what that raises.
    """

    def __init__(self, world: Program, replica: MakeReplica = SimReplica) -> None:
        self._world = world
        self._done: list[Operation] = []
        self.replica = replica(
            world.config,
            world.seed,
            lags=world.lags,
            faults=world.faults,
            check_every=world.check_every,
            tides=world.tides,
            disk=world.disk,
        )

    @property
    def program(self) -> Program:
        """What was done so far."""
        return replace(self._world, operations=tuple(self._done))

    def do(self, verb: str, **arguments: Any) -> bool:
        """Do it, and say whether there was anything to do. Raises InvariantViolation, or whatever
        the code under test raised."""
        self._done.append((verb, arguments))
        return _perform(self.replica, verb, arguments)


def _perform(replica: SimReplica, verb: str, arguments: Mapping[str, Any]) -> bool:
    if replica.down and verb not in ("step", "arm"):
        return False  # there is nobody to ask
    match verb:
        case "step":
            replica.step()
        case "submit":
            return _submit(replica, **arguments)
        case "abort" | "preempt" | "stop":
            served = live(replica, arguments["request"])
            return served is not None and getattr(replica, verb)(served) is not False
        case "arm":
            return replica.arm(**arguments)
        case "crash_rank":
            if arguments["rank"] >= len(replica.ranks):
                return False
            replica.crash_rank(arguments["rank"], arguments["notice_steps"])
        case "wake_up":
            replica.wake_up()
        case "crash_scheduler":
            replica.crash_scheduler()
        case _:
            return bool(getattr(replica, verb)(**arguments))
    return True


def live(replica: SimReplica, request: str) -> Served | None:
    """The open request of that id, if there is one."""
    return next((s for s in replica.engine.live.values() if s.request == request), None)


def _submit(replica: SimReplica, request: str, prompt: list[int], max_new: int) -> bool:
    """An id in use is to be refused, and nothing may change by it."""
    work = WorkloadRequest(request, replica.now * 10.0, np.array(prompt, dtype=np.int64), max_new)
    if live(replica, request) is None:
        replica.submit(work)
        return True
    before = replica.coordinator.digest()
    try:
        replica.submit(work)
    except UsageError:
        if replica.coordinator.digest() == before:
            return False
    text = f"request {request!r} is in use: another of that id was not refused as it was"
    raise InvariantViolation("survives", text, seq=replica.state.seq)
