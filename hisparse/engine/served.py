"""Served: a request as the serving loop sees it.

Tokens are kept from the prompt on; those sampled from rows that are not confirmed are provisional,
and may be withdrawn. Drafts are what may follow; nothing outside the loop ever sees them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Served:
    """A request as the engine sees it."""

    request: str
    epoch: int
    prompt_tokens: int
    max_new: int
    tokens: list[int]
    parent: bytes = b""  # chain hash of the last whole page hashed so far
    hashed: int = 0  # whole pages hashed so far
    logits: list[np.ndarray] = field(default_factory=list)
    outcome: str = "live"
    drafts: list[int] = field(default_factory=list)  # what may follow `tokens`
    confirmed_rows: int = 0  # rows whose tokens no copy's failure can take back

    @property
    def key(self) -> tuple[str, int]:
        return (self.request, self.epoch)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def certain(self) -> bool:
        """Whether every token so far was sampled from a confirmed row."""
        return self.confirmed_rows >= len(self.tokens) - 1

    def withdraw_provisional(self) -> None:
        """Forget the tokens that were sampled from rows that are not confirmed."""
        self.drafts.clear()
        kept = max(self.prompt_tokens, self.confirmed_rows + 1)
        del self.tokens[kept:]
        del self.logits[kept - self.prompt_tokens :]
