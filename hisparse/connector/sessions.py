"""The requests that an engine has, as it names them, and what is known of their tokens.

Owns, of each request that waits or lives, the tokens from position 0 on, for the hashes of its
pages; makes no events, and asks nothing of the state. Raises UsageError for a name that is nobody's
or in use, and StaleEpoch for one that is another's by now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hisparse.connector.plan import Admitted, Waiting
from hisparse.errors import StaleEpoch, UsageError
from hisparse.fsm.state import Key
from hisparse.kv.prefix import PageHasher
from hisparse.kv.validate import INT_MAX, count, text

SALT_BYTES_MAX = 64
TOKEN_MAX = (1 << 63) - 1

RequestRef = str | Admitted | Waiting


@dataclass
class Session:
    """A request that waits or lives. `tokens` are those known, from position 0 on, with no gap."""

    request: str
    epoch: int
    prompt: int
    hasher: PageHasher
    tokens: list[int]
    step_tokens: list[int] = field(default_factory=list)  # told for the step that is planned

    @property
    def key(self) -> Key:
        return (self.request, self.epoch)

    def learn(self, start: int, accepted: int, hashed: Sequence[bytes]) -> list[bytes]:
        """Take over the tokens of rows ``[start, start + accepted)``, if they were told; returns
        the hashes of the pages that they complete, behind those that are `hashed`."""
        told, known = self.step_tokens[:accepted], self.tokens
        self.step_tokens = []
        if start <= len(known) < start + len(told):
            known += told[len(known) - start :]
        size = self.hasher.page_size
        whole = min(start + accepted, len(known)) // size
        if whole <= len(hashed):
            return []
        parent = hashed[-1] if hashed else b""
        return self.hasher.extend(parent, known[len(hashed) * size : whole * size])

    def rewind(self, certain: int) -> int:
        """Forget tokens that were sampled behind row `certain`; those of the prompt always stand.
        Returns the row from which the last token stands."""
        certain = max(certain, self.prompt - 1)
        del self.tokens[certain + 1 :]
        return certain


class Sessions(dict[str, Session]):
    """Sessions by id, in order of arrival."""

    def check_arrival(
        self, request: str, prompt: Sequence[int] | Any, max_new: int, salt: bytes
    ) -> tuple[str, np.ndarray, int]:
        """Id, the prompt's tokens, int64 [n], and `max_new`. Raises UsageError for what cannot
        arrive."""
        if not (request := text(request, "admit: request")):
            raise UsageError(f"admit: request={request!r} must be a string that is not empty")
        if held := self.get(request):
            raise UsageError(
                f"admit: request {request!r} (epoch {held.epoch}) has not ended: finish, abort or "
                "preempt it first, or choose another id"
            )
        tokens = token_ids(prompt, f"admit({request!r}): prompt")
        if not len(tokens):
            raise UsageError(f"admit({request!r}): the prompt is empty: pass at least 1 token")
        most = INT_MAX - len(tokens)
        max_new = count(max_new, f"admit({request!r}): max_new", least=1, most=most)
        if not isinstance(salt, bytes):
            raise UsageError(f"admit({request!r}): salt={salt!r} must be bytes")
        if len(salt) > SALT_BYTES_MAX:
            raise UsageError(
                f"admit({request!r}): salt has {len(salt)} bytes, must be at most {SALT_BYTES_MAX}"
            )
        return request, tokens, max_new

    def find(self, ref: RequestRef, verb: str) -> Session:
        """Who `ref` names. Raises UsageError, or StaleEpoch where its id is another's by now."""
        request = ref if isinstance(ref, str) else getattr(ref, "request", None)
        if not isinstance(request, str):
            raise UsageError(
                f"{verb}: {ref!r} names no request: pass its id, a string, or what admit() answered"
            )
        session = self.get(request)
        if session is None:
            raise UsageError(
                f"{verb}: request {request!r} is not here: it was never admitted, or has ended; "
                f"those here are {list(self)}"
            )
        if not isinstance(ref, str) and ref.epoch != session.epoch:
            raise StaleEpoch(
                f"{verb}: request {request!r} of epoch {ref.epoch} has ended, epoch "
                f"{session.epoch} has its id: pass what its own admit() answered"
            )
        return session

    def held(self, key: Key) -> Session | None:
        """The session of exactly this request, if its engine has not ended it."""
        session = self.get(key[0])
        return session if session is not None and session.epoch == key[1] else None


def token_ids(values: Any, what: str) -> np.ndarray:
    """int64 [n]. Raises UsageError, beginning with `what`."""
    try:
        made = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{what} must be integers [n]: {error}") from error
    if made.ndim != 1 or not (made.size == 0 or np.issubdtype(made.dtype, np.integer)):
        raise UsageError(f"{what} is {made.dtype}{list(made.shape)}, must be integers [n]")
    wrong = np.flatnonzero((made < 0) | (made > TOKEN_MAX))
    if wrong.size:
        raise UsageError(
            f"{what}[{wrong[0]}] is {made[wrong[0]]}: ids of tokens must be in 0..{TOKEN_MAX}"
        )
    return made.astype(np.int64)
