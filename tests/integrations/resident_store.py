"""The oracle of `generate` over the tiers: a plain store with the verbs of a backend.

Everything stays where it was written, in a tensor a request and layer. No page, no table, no tier
and no log; it shares no code with the backend that it stands in for.
"""

from __future__ import annotations

import torch

from hisparse.connector.plan import Admitted, Changes, StepPlan


class ResidentStore:
    """Rows of each request by layer, indexer rows by group, in the order of their positions."""

    def __init__(self, config, device="cpu"):
        self.config = config
        self.device = device
        self.rows = {}
        self.index = {}
        self.plan = None
        self.chosen = None

    @property
    def requests(self):
        return tuple(self.rows)

    def admit(self, request, prompt, max_new, *, salt=b""):
        layout = self.config.layout
        assert request not in self.rows
        self.rows[request] = [self._nothing(layout.row_bytes)] * layout.layers
        groups = len(layout.index_groups)
        self.index[request] = [self._nothing(layout.index_row_bytes)] * groups
        return Admitted(request, 1, len(self.rows), 0)

    def _nothing(self, row_bytes):
        return torch.empty(0, row_bytes, dtype=torch.uint8, device=self.device)

    def plan_step(self, wanted):
        counts = tuple(len(tokens) for tokens in wanted.values())
        starts = tuple(len(self.rows[request][0]) for request in wanted)
        return StepPlan(
            0, tuple(wanted), (0,) * len(counts), starts, counts, b"", changes=Changes()
        )

    def begin_step(self, plan):
        self.plan = plan

    def _append(self, held, at, data):
        for request, new in zip(self.plan.requests, data.split(self.plan.counts), strict=True):
            held[request][at] = torch.cat([held[request][at], new])

    def write(self, layer, data):
        self._append(self.rows, layer, data)

    def write_index(self, group, data):
        self._append(self.index, group, data)

    def index_keys(self, group, request):
        return self.index[request][group]

    def resolve(self, layer, top_k=None):
        if top_k is not None:
            self.chosen = top_k.long()
        made = []
        for request, chosen in zip(
            self.plan.requests, self.chosen.split(self.plan.counts), strict=True
        ):
            found = self.rows[request][layer][chosen.clamp(min=0)]
            made.append(found.masked_fill((chosen < 0)[..., None], 0))
        return torch.cat(made)

    def end_step(self):
        self.plan = None

    def finish(self, request):
        del self.rows[request], self.index[request]
