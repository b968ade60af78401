"""Decode steps of fixed shape: the same work whatever the batch, so that a graph can hold it.

A step has room for `requests` requests of `span` lines each: one for the newest token, one a draft
to verify. What a batch leaves over is padding (request row -1). Tokens, rows, positions and top-k
lie in buffers that stay where they are; which drafts stand is found on the device, and the next
ones are proposed there, in the same step.

    tokens   q0 q0 q0 | q1 q1 .. | .. .. ..      span 3: q1 has one draft, the third request is none
    rows      7  7  7 |  2  2 -1 | -1 -1 -1

`FixedDecode` keeps one `FixedStep` a shape, made when a batch first needs it: between steps, in a
dummy step of padding rows. On a GPU it is captured there, once, and every later step is a replay:
the step's command (tables, step number) is queued before it, outside of the graph, and no Python of
a step's forward pass runs again. Elsewhere a step is computed anew each time, to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from hisparse.config import HiSparseConfig
from hisparse.device.cuda.group import KEPT_CALLS_MAX
from hisparse.device.rows import StepRows
from hisparse.engine.accelerator import Fetch
from hisparse.engine.reference import FixedModel
from hisparse.engine.tiered import Gathered, TieredCache
from hisparse.errors import ConfigError

Answered = tuple[np.ndarray, np.ndarray, dict[int, list[int]]]
"""A step's chosen tokens, their logits, and drafts of what follows by request row."""
Answer = Callable[[], Answered]  # waits for it

TOKENS, ROWS, POSITIONS = range(3)


class FixedStep:
    """One shape.

    Args:
        drafts: tokens to propose for each request; 0: none.
        logits: bring logits to the host too.
    """

    def __init__(
        self,
        model: FixedModel,
        cache: TieredCache,
        requests: int,
        span: int,
        *,
        drafts: int = 0,
        logits: bool = True,
    ) -> None:
        self.requests, self.span = requests, span
        self.gathered: list[Gathered] = []
        self._model, self._cache, self._drafts, self._logits = model, cache, drafts, logits
        shape, on_gpu = (3, requests * span), model.device.type == "cuda"
        self._sent = torch.zeros(shape, dtype=torch.int64, pin_memory=on_gpu)
        self._inputs = torch.zeros(shape, dtype=torch.int64, device=model.device)
        self._inputs[ROWS] = -1
        self._out = (self._inputs, self._inputs)
        self.replay: Callable[[], None] = self.compute

    @torch.inference_mode()
    def compute(self) -> None:
        """The work of the step, from its inputs."""
        tokens, lines, positions = self._inputs
        rows = StepRows(lines.int(), positions, self.span)
        self._cache.gathered.clear()
        self._cache.begin(rows)
        logits = self._model.forward_fixed(tokens, rows, self._cache)
        chosen = self._model.choose(logits)
        out = [chosen]
        if self._drafts:
            newest, places = newest_fixed(tokens, rows, chosen, self._model.eos)
            found = self._model.propose_fixed(newest, places, self._cache, self._drafts)
            out += [places.rows.long(), found.flatten()]
        self._out = (torch.cat(out), logits if self._logits else logits[:, :0])
        self.gathered = list(self._cache.gathered)

    def run(self, tokens: np.ndarray, rows: StepRows) -> Answer:
        """Queue the step for `tokens` int64 [n] at `rows`, which fit its shape."""
        lines = self._lines(rows)
        sent = self._sent.numpy()
        sent[TOKENS], sent[ROWS], sent[POSITIONS] = 0, -1, 0
        sent[:, lines] = tokens, rows.rows, rows.positions
        self._inputs.copy_(self._sent, non_blocking=True)
        self.replay()
        self._cache.gathered[:] = self.gathered
        fetch = Fetch(*self._out)

        def answer() -> Answered:
            out, logits = fetch.result()
            n, m = self.requests * self.span, self.requests
            owners, found = out[n : n + m], out[n + m :].reshape(m, -1) if self._drafts else out[:0]
            drafts = {int(owners[i]): found[i].tolist() for i in np.flatnonzero(owners >= 0)}
            return out[lines], logits[lines], drafts

        return answer

    def _lines(self, rows: StepRows) -> np.ndarray:
        """Where each line of a batch goes: request i has the lines from ``i * span`` on."""
        first = np.flatnonzero(np.r_[True, np.diff(rows.rows) != 0])
        counts = np.diff(np.r_[first, len(rows.rows)])
        assert len(counts) <= self.requests and counts.max() <= self.span, (counts, self.span)
        at: np.ndarray = np.repeat(np.arange(len(counts)) * self.span - first, counts)
        return at + np.arange(len(rows.rows))


def newest_fixed(
    tokens: torch.Tensor, rows: StepRows, chosen: torch.Tensor, eos: int
) -> tuple[torch.Tensor, StepRows]:
    """`runner.newest_tokens` on the device: int64 [requests], and its places; padding where a
    request ends in EOS."""
    assert rows.span is not None
    lines, given = rows.rows.view(-1, rows.span), tokens.view(-1, rows.span)
    taken, positions = chosen.view(-1, rows.span), rows.positions.view(-1, rows.span)
    stands = (given[:, 1:] == taken[:, :-1]) & (taken[:, :-1] != eos) & (lines[:, 1:] >= 0)
    last = stands.long().cumprod(1).sum(1, keepdim=True)
    newest = taken.gather(1, last)[:, 0]
    owners = lines[:, 0].masked_fill(newest == eos, -1)
    return newest, StepRows(owners, positions.gather(1, last)[:, 0] + 1, 1)


class FixedDecode:
    """The shapes of one replica's decode steps.

    Args:
        config: bounds the rows of a step.
        spec: drafts a request and step.
        logits: see `FixedStep`.
        capture: captures a step's `compute` in a graph and returns its replay; None: no graphs.
    """

    def __init__(
        self,
        config: HiSparseConfig,
        model: FixedModel,
        cache: TieredCache,
        *,
        spec: int = 0,
        logits: bool = True,
        capture: Callable[[Callable[[], None]], Callable[[], None]] | None = None,
    ) -> None:
        refuse_unfit(config, spec)
        self._config, self._model, self._cache = config, model, cache
        self._spec, self._logits, self._capture = spec, logits, capture
        self._steps: dict[tuple[int, int], FixedStep] = {}

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(requests, span) of each step made so far."""
        return list(self._steps)

    def prepare(self, rows: StepRows, sampled: np.ndarray) -> FixedStep | None:
        """The step that a batch fits; None if it holds prompt rows, or no padded shape of it fits
        a step. Call between steps: a shape that is new is made now."""
        n = len(rows.rows)
        if not n or len(sampled) != n:
            return None
        counts = np.diff(np.flatnonzero(np.r_[True, np.diff(rows.rows) != 0, True]))
        span = 1 if counts.max() == 1 else self._spec + 1
        most = min(self._config.schedule.step_rows // span, self._config.schedule.max_requests)
        if len(counts) > most:
            return None
        shape = (min(1 << (len(counts) - 1).bit_length(), most), span)
        if shape not in self._steps:
            self._steps[shape] = self._make(*shape)
        return self._steps[shape]

    def _make(self, requests: int, span: int) -> FixedStep:
        step = FixedStep(
            self._model, self._cache, requests, span, drafts=self._spec, logits=self._logits
        )
        if self._capture is not None:
            warm_up = partial(self._cache.worker.warm_up, requests * span)
            with warm_up():
                step.compute()  # makes whatever a capture must find made
            with warm_up():
                step.replay = self._capture(step.compute)
        return step


def refuse_unfit(config: HiSparseConfig, spec: int) -> None:
    """A request's verification rows are resolved in one call, so their selections have to fit its
    hot region together; proposals are calls of the same step. Raises ConfigError."""
    if spec >= KEPT_CALLS_MAX:
        raise ConfigError(
            f"spec={spec}: a step of fixed shape proposes at most {KEPT_CALLS_MAX - 1} drafts"
        )
    need = (spec + 1) * config.policy.top_k
    if config.offload and need > config.policy.hot_rows:
        raise ConfigError(
            f"hot_rows={config.policy.hot_rows}: a step of fixed shape verifies spec + 1 = "
            f"{spec + 1} rows of a request together, so use at least {need}, or no graph"
        )
