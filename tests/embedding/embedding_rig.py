"""An engine around `HiSparseBackend` whose rows are a function of the tokens: every byte that it
reads has one right value, known without any cache."""

from __future__ import annotations

import hashlib

import numpy as np

from hisparse.backend import HiSparseBackend
from hisparse.config import GIB

PAGE, LAYERS, ROW, INDEX_ROW, TOP_K = 4, 3, 32, 8, 6
LONGEST = 64


def settings(gpu_blocks=26, host_pages=200, **sections):
    """A configuration as a user writes it: layers 0 and 1 in a group, layer 2 in its own."""
    made = {
        "layout": {"row_bytes": ROW, "index_row_bytes": INDEX_ROW, "index_groups": [[0, 1], [2]]},
        "pools": {
            "page_size": PAGE,
            "gpu_blocks": gpu_blocks,
            "host_pool_gib": host_pages * 512 / GIB,
        },
        "policy": {"top_k": TOP_K, "hot_rows": 2 * TOP_K},
        "schedule": {"max_model_len": LONGEST, "max_requests": 8, "step_rows": 32},
        "checks": "on",
    }
    for name, part in sections.items():
        made[name] = made[name] | part if isinstance(part, dict) and name in made else part
    return made


def rows_of(tokens, layer, width=ROW):
    """What a model would compute: uint8 [n, width], of each token and all before it."""
    chain, made = hashlib.blake2b(b"%d" % layer, digest_size=32), []
    for token in tokens:
        chain.update(b"%d," % token)
        made.append(np.frombuffer(chain.digest(), np.uint8)[:width])
    return np.array(made, dtype=np.uint8).reshape(-1, width)


class Engine:
    """Serves requests step by step, and looks at everything that it reads."""

    def __init__(self, backend, seed=0, kind=np.asarray):
        self.backend, self.kind = backend, kind
        self.rng = np.random.default_rng(seed)
        self.tokens: dict[str, list[int]] = {}
        self.rows_read = 0

    def admit(self, name, prompt, max_new, **how):
        answer = self.backend.admit(name, prompt, max_new, **how)
        self.tokens[name] = list(prompt)
        return answer

    def compute(self, plan, tell=True):
        """All of a step but its end: the rows of each layer written, selections read."""
        kind, parts = self.kind, [(name, plan.starts[name], n) for name, n in plan.granted.items()]

        def fresh(layer, width=ROW):
            made = [rows_of(self.tokens[name], layer, width)[s : s + n] for name, s, n in parts]
            return kind(np.concatenate([np.zeros((0, width), np.uint8), *made]))

        for group, layers in enumerate(self.backend.config.layout.index_groups):
            self.backend.write_index(group, fresh(100 + group, INDEX_ROW))
            for name, start, n in parts:
                keys = self.backend.index_keys(group, name)
                expected = rows_of(self.tokens[name][: start + n], 100 + group, INDEX_ROW)
                assert np.array_equal(np.asarray(keys), expected)
            top_k = self.select(plan)
            for layer in layers:
                self.backend.write(layer, fresh(layer))
                read = self.backend.resolve(layer, kind(top_k) if layer == layers[0] else None)
                self.check(plan, layer, top_k, np.asarray(read))

    def select(self, plan):
        """int32 [n, k]: distinct positions up to each token's own, -1 where there are too few."""
        top_k = np.full((len(plan), TOP_K), -1, dtype=np.int32)
        for i, position in enumerate(plan.rows.positions):
            chosen = self.rng.permutation(position + 1)[:TOP_K]
            top_k[i, : len(chosen)] = chosen
        return top_k

    def check(self, plan, layer, top_k, read):
        at = 0
        for name, n in plan.granted.items():
            rows = rows_of(self.tokens[name], layer)
            for chosen, got in zip(top_k[at : at + n], read[at : at + n], strict=True):
                expected = np.where((chosen >= 0)[:, None], rows[chosen], 0)
                assert np.array_equal(got, expected), (name, layer)
                self.rows_read += int((chosen >= 0).sum())
            at += n

    def step(self, wanted):
        """One step in which `wanted` rows of each request are computed; returns its plan."""
        plan = self.backend.plan_step(wanted)
        self.backend.begin_step(plan)
        self.compute(plan)
        self.backend.end_step()
        return plan

    def prefill(self, name, chunk=8):
        """Compute the rest of its prompt; then it has a next token."""
        computed = 0
        while computed < len(self.tokens[name]):
            want = min(chunk, len(self.tokens[name]) - computed)
            plan = self.step({name: want})
            computed = plan.starts.get(name, computed) + plan.granted.get(name, 0)

    def decode(self, *names):
        """One new token of each, chosen from the rows that it read: whose rows come next."""
        for name in names:
            self.tokens[name].append(int(rows_of(self.tokens[name], 9)[-1, 0]))
        return self.step({name: self.tokens[name][-1:] for name in names})


def opened(**how):
    return HiSparseBackend(settings(**how))
