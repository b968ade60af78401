"""`hisparse bench backend`: a decode step through `HiSparseBackend` on `cpu`: its time, its memory.

Requests decode with their context on the host for the most part; each token selects anew a share of
its top-k at random. What the model would do is left out: its rows are made beforehand. Times are of
this process's CPU. Memory is what Python and numpy allocate (`tracemalloc`) in one `resolve`:
``kept`` is still there when it returns (a leader's plan, until the next step, for its followers),
``at most`` is the most beyond what was there before at any moment of it.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from typing import Any

import numpy as np

from hisparse.backend import HiSparseBackend
from hisparse.bench.measure import Case, summarise
from hisparse.config import GIB, ceil_div
from hisparse.errors import UsageError

LAYERS = 4  # in index groups of two
ROW, INDEX_ROW, PAGE = 656, 132, 64
VERBS = ("plan_step", "begin_step", "write_index", "write", "resolve", "end_step")
WARM_UP_STEPS = 16


class DecodeLoop:
    """Requests of `tokens` tokens that decode in step, most of their pages on the host."""

    def __init__(self, requests: int, tokens: int, top_k: int, steps: int) -> None:
        pages = ceil_div(tokens + steps, PAGE)
        steady = 2 + ceil_div(pages, 9) + ceil_div(2 * top_k, PAGE)  # window, index and hot blocks
        resident = requests * (steady + pages // 4) + 9  # and what a step of prompt rows fills
        self.backend = HiSparseBackend(
            {
                "layout": {
                    "row_bytes": ROW,
                    "index_row_bytes": INDEX_ROW,
                    "index_groups": [[i, i + 1] for i in range(0, LAYERS, 2)],
                },
                "pools": {
                    "page_size": PAGE,
                    "gpu_blocks": resident,
                    "host_pool_gib": 2 * requests * pages * PAGE * LAYERS * ROW / GIB,
                },
                "policy": {"top_k": top_k, "hot_rows": 2 * top_k},
                "schedule": {
                    "max_model_len": tokens + steps,
                    "max_requests": requests,
                    "step_rows": 512,
                },
            }
        )
        self.rng = np.random.default_rng(0)
        self.names = [f"r{i}" for i in range(requests)]
        self.rows = np.zeros((512, ROW), np.uint8)
        self.index_rows = np.zeros((512, INDEX_ROW), np.uint8)
        self.seconds: dict[str, float] = {}
        self.memory: dict[str, list[tuple[int, int]]] = {"leader": [], "follower": []}
        for i, name in enumerate(self.names):
            self.backend.admit(name, np.arange(i, tokens + i), steps)
        none = np.full((512, 1), -1, np.int32)
        computed = dict.fromkeys(self.names, 0)
        for name in self.names:
            while computed[name] < tokens:
                granted = self.step({name: min(512, tokens - computed[name])}, none)
                computed[name] += granted.get(name, 0)
        self.top_k = np.sort(self._positions((requests, top_k), tokens)).astype(np.int32)
        self.tokens = tokens

    def _positions(self, shape: tuple[int, ...], below: int) -> np.ndarray:
        return self.rng.integers(0, below, shape)

    def decode(self, traced: bool = False) -> None:
        """One token of each; a tenth of each selection is drawn anew."""
        drawn = self.rng.random(self.top_k.shape) < 0.1
        self.top_k[drawn] = self._positions((int(drawn.sum()),), self.tokens)
        self.step(dict.fromkeys(self.names, 1), self.top_k, traced)

    def step(
        self, wanted: dict[str, int], top_k: np.ndarray, traced: bool = False
    ) -> dict[str, int]:
        backend, spent = self.backend, dict.fromkeys(VERBS, 0.0)

        def timed(verb: str, *given: Any) -> Any:
            start = time.process_time()
            made = getattr(backend, verb)(*given)
            spent[verb] += time.process_time() - start
            return made

        plan = timed("plan_step", wanted)
        timed("begin_step", plan)
        n = len(plan)
        for layer in range(LAYERS):
            leads = layer % 2 == 0
            if leads:
                timed("write_index", layer // 2, self.index_rows[:n])
            timed("write", layer, self.rows[:n])
            backend.device.synchronize(backend.device.compute)  # what is queued is not resolve's
            chosen = top_k[:n] if leads else None
            if traced:
                self._traced(layer, chosen)
            else:
                timed("resolve", layer, chosen)
        timed("end_step")
        self.seconds = spent
        return dict(plan.granted)

    def _traced(self, layer: int, top_k: np.ndarray | None) -> None:
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        answer = self.backend.resolve(layer, top_k)
        after, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        self.answer_bytes = answer.nbytes
        self.memory["follower" if top_k is None else "leader"].append(
            (after - before, most - before)
        )


def bench_backend(*, requests: int, tokens: int, top_k: int, steps: int, runs: int) -> list[Case]:
    """Decode steps of `requests` requests of `tokens` tokens, in `runs` runs of `steps` steps."""
    samples: dict[str, list[list[float]]] = {verb: [] for verb in ("step", *VERBS)}
    for _ in range(runs):
        loop = DecodeLoop(requests, tokens, top_k, WARM_UP_STEPS + 2 * steps)
        for _ in range(WARM_UP_STEPS):
            loop.decode()
        seconds = []
        for _ in range(steps):
            loop.decode()
            seconds.append(loop.seconds)
        for verb in VERBS:
            samples[verb].append([1e6 * one[verb] for one in seconds])
        samples["step"].append([1e6 * sum(one.values()) for one in seconds])
    for _ in range(steps):
        loop.decode(traced=True)
    host_rows = loop.backend.statistics()["worker"]["host_rows"]
    loop.backend.shutdown()
    if not host_rows:
        raise UsageError(
            f"requests={requests} of tokens={tokens} fit the pool that top_k={top_k} asks for, so "
            "nothing was read from the host: use more tokens, or a smaller top-k"
        )
    whole = statistics.median(x for run in samples["step"] for x in run)
    cases = []
    for verb, found in samples.items():
        share = statistics.median(x for run in found for x in run) / whole
        cases.append(summarise(verb, found, "us", {} if verb == "step" else {"of the step": share}))
    answer = loop.answer_bytes
    for who, made in loop.memory.items():
        for what, column in (("kept", 0), ("at most", 1)):
            found = [[one[column] / 1024 for one in made]]
            ratio = {"its answer": statistics.median(found[0]) * 1024 / answer}
            cases.append(summarise(f"resolve, {who}: memory {what}", found, "KiB", ratio))
    return cases
