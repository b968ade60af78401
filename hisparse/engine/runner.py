"""Runners: what turns a planned step into tokens.

`TieredRunner` runs a model over the tiers: decode steps in one of the fixed shapes, if it is given
any, all others as they come. `RecordedRunner` replays tokens that an earlier run produced, with no
forward pass: what it serves to find out is how many requests a *scheduler* holds at once, which
depends on lengths alone.

Between a step's command and the read of its tokens nothing waits for the device: all its work is
queued by then, and torch raises where something would wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from hisparse.connector.base import KVConnectorBase_V1, KVConnectorOutput
from hisparse.device.rows import StepRows
from hisparse.engine.accelerator import Fetch, forbid_waiting, upload
from hisparse.engine.fixed import Answer, Answered, FixedDecode
from hisparse.engine.reference import FixedModel, Model
from hisparse.engine.speculate import newest_tokens
from hisparse.engine.tiered import Gathered, TieredCache


class TieredRunner:
    """Runs `model` over the tiers; the connector is the worker's.

    Args:
        on_begin: called after the step's command was handed over, before its first access.
        spec: drafts that `model`, which then has a draft head, proposes for each sampling request.
        fixed: runs the decode steps that have one of its shapes.
        watch: called with what was gathered, when the step's device work is done; the cache has to
            `keep` it.
        logits: bring logits to the host; without, they come back as [n, 0].
    """

    def __init__(
        self,
        model: Model,
        cache: TieredCache,
        connector: KVConnectorBase_V1,
        on_begin: Callable[[], None] | None = None,
        spec: int = 0,
        *,
        fixed: FixedDecode | None = None,
        watch: Callable[[Sequence[Gathered]], None] | None = None,
        logits: bool = True,
    ) -> None:
        self.spec = spec
        self._drafts: dict[int, list[int]] = {}
        self.model = model
        self.cache = cache
        self.connector = connector
        self.on_begin = on_begin
        self.fixed = fixed
        self.watch = watch
        self.logits = logits
        self.steps = {"eager": 0, "fixed": 0}  # that computed rows

    def execute(
        self, meta: Any, tokens: np.ndarray, rows: StepRows, sampled: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, KVConnectorOutput]:
        at = np.array(sampled, dtype=np.int64)
        with self.cache.worker.device.on_compute():
            chosen, logits, self._drafts = self._run(meta, tokens, rows, at)
            if self.watch is not None:
                self.watch(self.cache.gathered)
            self.connector.wait_for_save()
        return chosen, logits, self.connector.get_output()

    def _run(self, meta: Any, tokens: np.ndarray, rows: StepRows, sampled: np.ndarray) -> Answered:
        """Queue all of the step, and wait for its answer."""
        step = self.fixed.prepare(rows, sampled) if self.fixed is not None else None
        self.cache.gathered.clear()
        if len(tokens):
            self.steps["eager" if step is None else "fixed"] += 1
        with forbid_waiting(self.model.device):
            self.connector.start_load_kv(meta)
            if self.on_begin is not None:
                self.on_begin()
            run = partial(self._eager, sampled=sampled) if step is None else step.run
            answer = run(tokens, rows)
        return answer()

    def drafts(self) -> dict[int, list[int]]:
        """What the draft head proposed in the last step, by request row."""
        return self._drafts

    def _eager(self, tokens: np.ndarray, rows: StepRows, sampled: np.ndarray) -> Answer:
        """Queue the forward pass; drafts are proposed once its tokens are known."""
        device = self.model.device
        logits = torch.zeros(0, self.model.vocab_size)
        chosen = torch.zeros(0, dtype=torch.int64)
        if len(tokens):
            self.cache.begin(rows)
            logits = self.model.forward(tokens, rows, self.cache)[upload(sampled, device)]
            chosen = self.model.choose(logits)
        fetch = Fetch(chosen, logits if self.logits else logits[:, :0])

        def answer() -> Answered:
            chosen, logits = fetch.result()
            return chosen, logits, self._propose(tokens, rows, sampled, chosen)

        return answer

    def _propose(
        self, tokens: np.ndarray, rows: StepRows, sampled: np.ndarray, chosen: np.ndarray
    ) -> dict[int, list[int]]:
        """Drafts behind each request's newest token, which is not EOS."""
        newest, places = newest_tokens(tokens, rows, sampled, chosen, self.model.eos)
        if not self.spec or not len(newest):
            return {}
        model = cast(FixedModel, self.model)  # it has a draft head, as there are drafts
        with forbid_waiting(self.model.device):
            fetch = Fetch(model.propose(newest, places, self.cache, self.spec))
        return dict(zip(places.rows.tolist(), fetch.result()[0].tolist(), strict=True))


class RecordedRunner:
    """Answers with recorded tokens.

    Args:
        next_token: (request row, position of the token just computed) -> next token.
    """

    def __init__(self, next_token: Callable[[int, int], int]) -> None:
        self.next_token = next_token

    def execute(
        self, meta: Any, tokens: np.ndarray, rows: StepRows, sampled: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, KVConnectorOutput]:
        assert meta is None, "a recorded run has no worker: its scheduler must have nothing to send"
        chosen = [self.next_token(int(rows.rows[i]), int(rows.positions[i])) for i in sampled]
        empty = np.zeros((len(chosen), 0), dtype=np.float32)
        return np.array(chosen, dtype=np.int64), empty, KVConnectorOutput()
