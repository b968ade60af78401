"""Residency policies: who loses resident pages under pressure, and who gets them back, in order.

A policy is a small class behind one protocol, `ResidencyPolicy`, chosen by ``policy.name`` of the
config: one of the names here, a name given to `register`, or ``module:Class``. It is asked, never
obeyed blindly: it ranks, and `kv.residency` and `kv.promotion` carry out what the promises allow.
Its choice is logged as a PolicyChosen, which is the cause of everything that follows from it. A
fold never asks a policy, so a log replays where the policy's module is not installed.

    hybrid      resident while it fits; the request with most pages above its window loses first
    lru         like hybrid; the request whose last step is longest ago loses first
    even        like hybrid; every request loses in proportion to what it has above its window
    host_first  hot regions at once; sealed pages leave as soon as their copies are enqueued
    resident    no host tier at all
"""

from hisparse.kv.policies.base import PolicyView, ResidencyPolicy
from hisparse.kv.policies.builtin import Even, HostFirst, Hybrid, LeastRecentlyUsed, Resident
from hisparse.kv.policies.registry import name_of, names, policy_of, register, resolve

__all__ = [
    "Even",
    "HostFirst",
    "Hybrid",
    "LeastRecentlyUsed",
    "PolicyView",
    "ResidencyPolicy",
    "Resident",
    "name_of",
    "names",
    "policy_of",
    "register",
    "resolve",
]
