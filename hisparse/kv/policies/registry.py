"""Policies by name. The config holds the name; whoever decides resolves it, a fold never does."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module

from hisparse.config import RESIDENT
from hisparse.errors import ConfigError
from hisparse.fsm.state import State
from hisparse.kv.policies.base import ResidencyPolicy
from hisparse.kv.policies.builtin import Even, HostFirst, Hybrid, LeastRecentlyUsed, Resident

_REGISTERED: dict[str, type[ResidencyPolicy]] = {
    "hybrid": Hybrid,
    "lru": LeastRecentlyUsed,
    "even": Even,
    "host_first": HostFirst,
    RESIDENT: Resident,
}


def names() -> tuple[str, ...]:
    """Names that ``policy.name`` may have, besides any ``module:Class``."""
    return tuple(_REGISTERED)


def register(name: str, policy: type[ResidencyPolicy]) -> None:
    """Make `policy` available as ``policy.name=name``. Raises ConfigError for a name in use."""
    if _REGISTERED.get(name, policy) is not policy:
        raise ConfigError(f"policy {name!r} is {_REGISTERED[name].__name__}: use another name")
    _check(name, policy)
    _REGISTERED[name] = policy


def name_of(policy: type[ResidencyPolicy]) -> str:
    """What ``policy.name`` has to say for this class: the name that it is registered by, its
    ``module:Class`` if that finds it, else its own name, which it is registered by from here on.

    Raises ConfigError for a class that is no policy, or whose name is in use.
    """
    known = next((name for name, found in _REGISTERED.items() if found is policy), None)
    if known is not None:
        return known
    _check(repr(policy), policy)
    place = f"{policy.__module__}:{policy.__name__}"
    module = sys.modules.get(policy.__module__)
    if getattr(module, policy.__name__, None) is policy and type(resolve(place)) is policy:
        return place
    register(policy.__name__, policy)
    return policy.__name__


@cache
def resolve(name: str) -> ResidencyPolicy:
    """The policy of that name, or of that ``module:Class``, which is imported.

    Raises ConfigError if there is none, or if it lacks what `ResidencyPolicy` asks for.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        if name not in _REGISTERED:
            raise ConfigError(
                f"policy={name!r} is unknown: use one of {', '.join(names())}, or module:Class"
            )
        return _made(name, _REGISTERED[name])
    try:
        policy = getattr(import_module(module), attribute)
    except Exception as error:  # whatever the module does when it is imported
        raise ConfigError(
            f"policy={name!r} cannot be imported ({type(error).__name__}: {error}): give "
            "module:Class of a class that Python finds"
        ) from error
    _check(name, policy)
    return _made(name, policy)


def _made(name: str, policy: type[ResidencyPolicy]) -> ResidencyPolicy:
    try:
        made = policy()
        choice, host_first = made.choice, made.host_first
    except Exception as error:
        raise ConfigError(
            f"policy={name!r} cannot be made ({type(error).__name__}: {error}): it is made without "
            "arguments"
        ) from error
    if not isinstance(choice, str) or not isinstance(host_first, bool):
        raise ConfigError(
            f"policy={name!r} has choice={choice!r} and host_first={host_first!r}: a choice is a "
            "word, host_first True or False"
        )
    return made


def policy_of(state: State) -> ResidencyPolicy:
    """The policy that decides for `state`."""
    return resolve(state.config.policy.name)


def _check(name: str, policy: object) -> None:
    wanted = ("choice", "host_first", "victims", "promotions")
    missing = [part for part in wanted if not hasattr(policy, part)]
    if not isinstance(policy, type) or missing:
        raise ConfigError(
            f"policy={name!r} is {policy!r}, without {', '.join(missing) or 'a class'}: it must be "
            "a class like hisparse.kv.policies.ResidencyPolicy"
        )
