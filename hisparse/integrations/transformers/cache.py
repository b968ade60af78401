"""`HiSparseCache`: what `generate` takes for a cache, over the tiers of a `HiSparseBackend`.

Each line of a batch is a request, each pass of the model a step. The rows and the indexer's keys
lie in the backend alone; the layers here hold nothing. A cache serves one batch, over as many calls
of `generate` as that has turns; `close` ends it, and what is durable of its prefixes outlives it.
How requests get their places is `batch.Batch`'s; here each pass writes and reads rows.

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
from hisparse.connector.plan import StepPlan
from hisparse.errors import UsageError
from hisparse.integrations.transformers.batch import Batch
from hisparse.integrations.transformers.layer import HiSparseLayer
from hisparse.integrations.transformers.layout import layout_of, row_format
from hisparse.integrations.transformers.lines import Line, Step, make_step


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
        if not hasattr(backend, "plan_step"):
            raise UsageError(
                f"a {type(backend).__name__} is no HiSparseBackend: pass one, behind the model"
            )
        if layout != backend.config.layout:
            raise UsageError(
                f"the backend is made for {backend.config.layout!r}, this model is {layout!r}: "
                "configure it by config_of(model, ...)"
            )
        attach(model)
        self.backend = backend
        self.format = row_format(model)
        self.step: Step | None = None
        self._width = 0  # of the pass that runs
        self._plan: StepPlan | None = None
        self._group = {layer: g for g, ls in enumerate(layout.index_groups) for layer in ls}
        self._leaders = set(layout.leaders)
        self._chosen = torch.zeros(0)  # the last leader's selection
        self._streams: tuple[Any, Any] | None = None
        given = model.generation_config
        eos = given.eos_token_id if eos_token_id is None else eos_token_id
        ends = frozenset([eos] if isinstance(eos, int) else eos or ())
        pad = given.pad_token_id if pad_token_id is None else pad_token_id
        self._batch = Batch(
            backend,
            name,
            max_tokens=max_tokens or backend.config.schedule.max_model_len,
            salt=salt,
            eos=ends,
            pads=ends if pad is None else frozenset([pad]),
        )
        super().__init__(layers=[HiSparseLayer(self, i) for i in range(layout.layers)])

    # -- a pass of the model ----------------------------------------------------------------------
    def begin(self, input_ids: torch.Tensor, attention_mask: Any) -> None:
        """The model is about to compute `input_ids`, int64 [lines, width].

        Raises UsageError for a batch that cannot be served, CapacityError where there is no place
        for it, DeviceError if a copy failed that tokens depend on; no row was changed.
        """
        width = input_ids.shape[1]
        plan = self._batch.plan(self._batch.tokens_of(input_ids.tolist(), attention_mask))
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
        self._batch.computed(self._width, self._plan)
        self._close_step()

    def abandon(self) -> None:
        """The pass failed: none of its rows count."""
        if self._plan is not None:
            self.backend.abandon_step()
            self._batch.forget_new()
        self._close_step()

    def _close_step(self) -> None:
        if self._streams is not None:
            self._streams[0].wait_stream(self._streams[1])
        self._streams = self._plan = self.step = None
        self._width = 0

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

    # -- the batch --------------------------------------------------------------------------------
    @property
    def lines(self) -> list[Line]:
        """Which request each line of the batch is, and how far it is."""
        return self._batch.lines

    @property
    def columns(self) -> int:
        """Of the rectangle, before the pass that runs."""
        return self._batch.columns

    def finish(self, line: int) -> None:
        """Line `line` generated its last token: its memory is given back, and what is asked of it
        later means nothing. `generate` goes on with the others."""
        self._batch.finish(line)

    def settle(self) -> None:
        """Wait until no copy can take back anything that was generated.

        Raises DeviceError if one failed: tokens returned by then may be wrong.
        """
        self._batch.settle()

    def close(self) -> None:
        """End every line; the cache is as new. What other requests share with these prefixes, or
        come to share, is found in the backend."""
        self._batch.close()

    def statistics(self) -> dict[str, int]:
        """Of this batch: `lines`, and those that `ended`; `columns` of the rectangle, and in its
        lines columns of `padding` and `rows` that are cached. The tiers' are the backend's."""
        return self._batch.statistics()

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
