"""`HiSparseCache`: what `generate` takes for a cache, over the tiers of a `HiSparseBackend`.

Each line of a batch is a request, each pass of the model a step. The rows and the indexer's keys
lie in the backend alone; the layers here hold nothing. A cache serves one batch, over as many calls
of `generate` as that has turns; `close` ends it, and what is durable of its prefixes outlives it.

Needs that the model is attached (`attention.attach`): its passes call `begin`, and `end` or
`abandon`. Errors leave the rows as they were before the pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from transformers.cache_utils import Cache

from hisparse.backend import HiSparseBackend
from hisparse.connector.plan import Admitted, Changes, Refused, StepPlan, Waiting
from hisparse.errors import CapacityError, DeviceError, UsageError
from hisparse.integrations.transformers.layer import HiSparseLayer
from hisparse.integrations.transformers.layout import layout_of, row_format
from hisparse.integrations.transformers.lines import Line, Step, make_step, paddings


class HiSparseCache(Cache):  # type: ignore[misc]
    """A batch of requests of `backend`, for ``model.generate(..., past_key_values=cache)``.

    Args:
        model: one of the supported kinds; it is attached, if it was not (see `attach`).
        backend: its layout is the model's (`config_of`), its device that of the model.
        name: of the batch; its requests are ``name-0``, ``name-1``, …, which nobody else has now.
        max_tokens: most tokens of a request (default: ``schedule.max_model_len``); places are
            promised for so many.
        salt: see `HiSparseBackend.admit`: separates models and adapters that share no prefix.
        eos_token_id, pad_token_id: by which a line is seen to have ended before the others
            (default: those of ``model.generation_config``).

    Raises UsageError where backend and model do not fit.
    """

    def __init__(
        self,
        model: Any,
        backend: HiSparseBackend,
        *,
        name: str = "generate",
        max_tokens: int | None = None,
        salt: bytes = b"",
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
    ) -> None:
        from hisparse.integrations.transformers.attention import attach  # which needs these classes

        layout = layout_of(model)
        if layout != backend.config.layout:
            raise UsageError(
                f"the backend is made for {backend.config.layout!r}, this model is {layout!r}: "
                "configure it by config_of(model, ...)"
            )
        attach(model)
        self.backend = backend
        self.format = row_format(model)
        self.columns = 0
        self.step: Step | None = None
        self.lines: list[Line] = []
        self._name, self._salt = name, salt
        self._max_tokens = max_tokens or backend.config.schedule.max_model_len
        self._width = 0  # of the pass that runs
        self._plan: StepPlan | None = None
        self._group = {layer: g for g, ls in enumerate(layout.index_groups) for layer in ls}
        self._leaders = set(layout.leaders)
        self._chosen = torch.zeros(0)  # the last leader's selection
        self._streams: tuple[Any, Any] | None = None
        given = model.generation_config
        eos = given.eos_token_id if eos_token_id is None else eos_token_id
        self._eos = frozenset([eos] if isinstance(eos, int) else eos or ())
        pad = given.pad_token_id if pad_token_id is None else pad_token_id
        self._pads = self._eos if pad is None else frozenset([pad])
        super().__init__(layers=[HiSparseLayer(self, i) for i in range(layout.layers)])

    # -- a pass of the model ----------------------------------------------------------------------
    def begin(self, input_ids: torch.Tensor, attention_mask: Any) -> None:
        """The model is about to compute `input_ids`, int64 [lines, width].

        Raises UsageError for a batch that cannot be served, CapacityError where there is no place
        for it, DeviceError if a copy failed that tokens depend on; no row was changed.
        """
        width = input_ids.shape[1]
        tokens = self._tokens_of(input_ids.tolist(), attention_mask)
        try:
            wanted = self._admit(tokens)
            plan = self._planned(wanted) if wanted else None
        except Exception:
            self._forget_new()
            raise
        self._width = width
        if plan is None:
            return
        before = torch.cuda.current_stream() if input_ids.is_cuda else None
        self.backend.begin_step(plan)
        self._plan = plan
        at = {line.request: i for i, line in enumerate(self.lines)}
        granted = {at[request]: n for request, n in plan.granted.items()}
        if before is not None:  # the pass is queued on the backend's stream
            self._streams = before, torch.cuda.current_stream()
            self._streams[1].wait_stream(before)
        self.step = make_step(self.lines, granted, width, input_ids.device)

    def end(self) -> None:
        """The pass is queued: its rows count."""
        if self._plan is not None:
            self.backend.end_step()
            for request, n in self._plan.granted.items():
                line = next(line for line in self.lines if line.request == request)
                line.rows += n
                line.fresh = False
        self.columns += self._width
        self._close_step()

    def abandon(self) -> None:
        """The pass failed: none of its rows count."""
        if self._plan is not None:
            self.backend.abandon_step()
            self._forget_new()
        self._close_step()

    def _close_step(self) -> None:
        if self._streams is not None:
            self._streams[0].wait_stream(self._streams[1])
        self._streams = self._plan = self.step = None
        self._width = 0

    def _tokens_of(self, ids: list[list[int]], mask: Any) -> dict[int, list[int]]:
        """By line that goes on, its tokens of this pass; padding is left out. Ends lines that are
        seen to have ended. Raises UsageError, and nothing was changed."""
        if self.lines and len(ids) != len(self.lines):
            raise UsageError(f"a batch of {len(ids)} on a cache of {len(self.lines)}: make another")
        lines = self.lines or [Line(f"{self._name}-{i}") for i in range(len(ids))]
        width = len(ids[0])
        before = paddings(mask, len(ids), self.columns + width)
        tokens: dict[int, list[int]] = {}
        ended: list[int] = []
        for i, (line, held) in enumerate(zip(lines, before, strict=True)):
            if line.ended and width > 1:
                raise UsageError(f"line {i} has ended: begin a batch without it, with a new cache")
            if line.admitted and held != line.padding:
                raise UsageError(
                    f"attention_mask says {held} columns of padding in line {i}, it has "
                    f"{line.padding}: pass the mask of all columns, also of those in the cache"
                )
            came = ids[i][max(held - self.columns, 0) :]
            if width == 1 and line.last in self._eos and came and came[0] in self._pads:
                ended.append(i)
            elif came and not line.ended:
                tokens[i] = came
        for i in ended if len(lines) > 1 else ():
            if not lines[i].ended:
                self.finish(i)
        for line, held in zip(lines, before, strict=True):
            line.padding = held
        self.lines = lines
        return tokens

    def _admit(self, tokens: dict[int, list[int]]) -> dict[str, list[int]]:
        """Tokens that have to be computed, by request; lines that begin are admitted."""
        wanted: dict[str, list[int]] = {}
        for i, came in tokens.items():
            line = self.lines[i]
            first = max(self.columns - line.padding, 0)  # position of the first that came
            if not line.admitted:
                most = max(self._max_tokens - len(came), 1)
                answer = self.backend.admit(line.request, came, most, salt=self._salt)
                admitted = answer if isinstance(answer, Admitted) else self._await(answer)
                line.admitted = line.fresh = True
                line.rows = admitted.cached_rows
            wanted[line.request] = came[line.rows - first :]
            line.last = came[-1]
        return wanted

    def _await(self, answer: Waiting | Refused) -> Admitted:
        """Let ended requests and copies go on until `answer` is admitted."""
        while isinstance(answer, Waiting):
            moving = self._moving
            for admitted in self._empty_step().admitted:
                if (admitted.request, admitted.epoch) == (answer.request, answer.epoch):
                    return admitted
            if not moving:
                self.backend.abort(answer.request, "no room")
                break
        raise CapacityError(
            f"no place for {answer.request}: {answer} with {self._max_tokens} tokens promised to "
            "each line; make the pool that is named larger, max_tokens or the batch smaller"
        )

    @property
    def _moving(self) -> bool:
        """Whether steps without rows may still make room."""
        now = self.backend.coordinator.statistics()
        return bool(now["transfers_in_flight"] or now["requests_draining"])

    def _empty_step(self) -> Changes:
        plan = self.backend.plan_step({})
        self.backend.begin_step(plan)
        self.backend.end_step()
        self._check(plan.changes)
        return plan.changes

    def _planned(self, wanted: dict[str, list[int]]) -> StepPlan:
        """A plan that has a place for every row: a pass cannot compute a part of them."""
        total, most = sum(map(len, wanted.values())), self.backend.config.schedule.step_rows
        if total > most:
            raise UsageError(
                f"a pass of {total} tokens, schedule.step_rows is {most}: pass generate("
                f"prefill_chunk_size={max(1, most // len(wanted))}), or raise step_rows"
            )
        while True:
            plan = self.backend.plan_step(wanted)
            if not plan.changes and dict(plan.granted) == {r: len(t) for r, t in wanted.items()}:
                return plan
            moving = bool(plan.changes) or self._moving
            self.backend.begin_step(plan)
            self.backend.abandon_step()  # copies go on meanwhile
            self._check(plan.changes)
            if not moving:
                raise CapacityError(
                    f"no places for the {total} rows of a pass: enlarge pools.gpu_blocks, or pass "
                    "a smaller prefill_chunk_size"
                )

    def _check(self, changes: Changes) -> None:
        """Raise DeviceError if rows of this batch were lost: tokens may have come of them."""
        ours = {line.request for line in self.lines}
        lost = [r.request for r in changes.rewound] + [*changes.preempted, *changes.failed]
        if hit := sorted(ours.intersection(lost)):
            here = set(self.backend.requests)
            for line in self.lines:
                if line.request in hit:
                    line.ended = True
                    if line.request in here:
                        self.backend.abort(line.request, "copy failed")
            raise DeviceError(
                f"a copy failed under {', '.join(hit)}: the newest tokens may be wrong, and it "
                "ends here; close this cache and generate again"
            )

    def _forget_new(self) -> None:
        """Lines that the pass that failed began were never there."""
        here = set(self.backend.requests)
        for line in self.lines:
            if line.fresh:
                if line.request in here:
                    self.backend.abort(line.request, "failed")
                line.admitted = line.fresh = False

    # -- what layers and attention ask for --------------------------------------------------------
    def write(self, layer: int, latents: torch.Tensor, rotated: torch.Tensor) -> None:
        """New rows: see `HiSparseLayer.update`."""
        if self.step is not None:
            rows = torch.cat([latents, rotated], -1).flatten(0, 2)
            self.backend.write(layer, _as_bytes(rows.index_select(0, self.step.at)))

    def write_index(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """New indexer rows: see `HiSparseLayer.update_indexer`."""
        lines, width, size = keys.shape
        out = keys.new_zeros(lines, self.columns + width, size)
        if self.step is not None:
            group = self._group[layer]
            new = keys.flatten(0, 1).index_select(0, self.step.at)
            self.backend.write_index(group, _as_bytes(new))
            for i, request in zip(self.step.lines, self.step.requests, strict=True):
                held = self.backend.index_keys(group, request)
                out[i, self.lines[i].padding :] = held.view(keys.dtype)
        return out

    def resolve(self, layer: int, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows that the n tokens of the pass selected: of the model's dtype [n, k, values], and
        their positions, int32 [n, k], -1 where there is none."""
        assert self.step is not None, "nothing is computed in this pass"
        if layer in self._leaders:
            self._chosen = self.step.selected(indices)
            rows = self.backend.resolve(layer, self._chosen)
        else:
            rows = self.backend.resolve(layer)
        return rows.view(self.format.dtype), self._chosen

    def statistics(self) -> dict[str, int]:
        """Of this batch: `lines`, and those that `ended`; `columns` of the rectangle, and in its
        lines columns of `padding` and `rows` that are cached. The tiers' are the backend's."""
        return {
            "lines": len(self.lines),
            "ended": sum(line.ended for line in self.lines),
            "columns": self.columns,
            "padding": sum(line.padding for line in self.lines),
            "rows": sum(line.rows for line in self.lines),
        }

    # -- requests ---------------------------------------------------------------------------------
    def finish(self, line: int) -> None:
        """Line `line` generated its last token: its memory is given back, and what is asked of it
        later means nothing. `generate` goes on with the others."""
        held = self.lines[line]
        if held.admitted and not held.ended:
            self.backend.finish(held.request)
        held.ended = True

    def settle(self) -> None:
        """Wait until no copy can take back anything that was generated.

        Raises DeviceError if one failed: tokens returned by then may be wrong.
        """
        while any(
            self.backend.confirmed(line.request) < line.rows
            for line in self.lines
            if line.admitted and not line.ended
        ):
            self._empty_step()

    def close(self) -> None:
        """End every line; the cache is as new. What other requests share with these prefixes, or
        come to share, is found in the backend."""
        here = set(self.backend.requests)
        for i, line in enumerate(self.lines):
            if line.request in here and not line.ended:
                self.finish(i)
        self.lines, self.columns = [], 0

    def __enter__(self) -> HiSparseCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """[n, values] as uint8 [n, bytes]; no copy."""
    return rows.contiguous().view(torch.uint8)
