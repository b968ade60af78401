"""A decode step of a tiny transformers model: over `HiSparseBackend`, and with its own cache.

The same model, prompts and tokens three ways: stock eager attention over the resident
`DynamicCache`; `HiSparseCache` with a pool in which everything stays; and with the smallest pool
that takes the batch, so that rows come from the host. Runs of the three alternate. The tiny model
computes next to nothing, so what is added stands out: of a real model it is a small share.

Parts are the verbs of the backend, timed by their callers in runs of their own. On `cpu` a copy of
the simulated device is part of the verb that makes it run. Times are CPU time of the process: give
it one thread (``OMP_NUM_THREADS=1``), since threads that wait count too.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache

from hisparse.backend import HiSparseBackend
from hisparse.bench.measure import Case, summarise
from hisparse.errors import ConfigError
from hisparse.integrations.transformers import HiSparseCache, config_of, detach, tiny_model

PAGE = 16
TOP_K = 32
VERBS = ("plan_step", "begin_step", "write_index", "index_keys", "write", "resolve", "end_step")
Steps = list[float]  # ms


class Timed:
    """A backend whose verbs are timed: `ms` by verb, added up over a step."""

    def __init__(self, backend: HiSparseBackend) -> None:
        self._backend = backend
        self.ms: dict[str, float] = defaultdict(float)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        if name not in VERBS:
            return found

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            answer = found(*args, **kwargs)
            self.ms[name] += 1e3 * (time.process_time() - start)
            return answer

        return timed


class GenerateBench:
    """One model and batch, decoded in several ways."""

    def __init__(self, model_type: str, lines: int, context: int, steps: int) -> None:
        self.lines, self.context, self.steps = lines, context, steps
        self.model = tiny_model(model_type, top_k=TOP_K, max_model_len=context + steps + PAGE)
        drawn = torch.Generator().manual_seed(1)
        self.ids = torch.randint(2, 500, (lines, context + steps), generator=drawn)

    def decode(self, cache: Any, after_step: Callable[[], None] = lambda: None) -> Steps:
        """Prefill, then a token of each line a step; returns the time of each step."""
        took: Steps = []
        with torch.no_grad():
            for first in range(0, self.context, PAGE):
                self.model(self.ids[:, first : first + PAGE], past_key_values=cache)
            after_step()
            for at in range(self.context, self.context + self.steps):
                start = time.process_time()
                self.model(self.ids[:, at : at + 1], past_key_values=cache)
                took.append(1e3 * (time.process_time() - start))
                after_step()
        return took

    def stock(self) -> Steps:
        detach(self.model)
        return self.decode(DynamicCache(config=self.model.config))

    def backend(self, *, resident: bool) -> HiSparseBackend:
        longest = self.context + self.steps + PAGE
        pages = self.lines * (longest // PAGE + 1)
        sizes: dict[str, dict[str, Any]] = {
            "pools": {"page_size": PAGE, "gpu_blocks": 4 * pages + 64, "host_pool_gib": 0.25},
            "schedule": {
                "max_requests": self.lines,
                "max_model_len": longest,
                "step_rows": self.lines * PAGE,
            },
        }
        config = config_of(self.model, **sizes)
        if not resident:
            if config.max_pages <= config.backed_pages:  # `backed_pages`: nothing would leave
                need = config.backed_pages * PAGE - self.steps
                raise ConfigError(f"--context {self.context} stays resident: use at least {need}")
            least = self.lines * config.steady_blocks(longest) + config.step_pages + 1
            sizes["pools"]["gpu_blocks"] = least
            config = config_of(self.model, policy={"watermark_blocks": least}, **sizes)
        return HiSparseBackend(config)

    def tiered(self, *, resident: bool) -> Steps:
        with self.backend(resident=resident) as backend, HiSparseCache(self.model, backend) as held:
            took = self.decode(held)
            read = backend.worker.statistics()["host_rows"]
            assert (read == 0) == resident, f"{read} rows were read from the host"
            return took

    def parts(self) -> dict[str, Steps]:
        """Time of each verb by step, in a run with the small pool."""
        by_verb: dict[str, Steps] = {verb: [] for verb in VERBS}
        with self.backend(resident=False) as backend:
            timed = Timed(backend)

            def after_step() -> None:
                for verb in VERBS:
                    by_verb[verb].append(timed.ms.pop(verb, 0.0))

            with HiSparseCache(self.model, timed) as cache:  # type: ignore[arg-type]
                self.decode(cache, after_step)
        return {verb: ms[1:] for verb, ms in by_verb.items()}  # the first is of the prefill


def bench_generate(
    model_type: str, *, lines: int, context: int, steps: int, runs: int
) -> list[Case]:
    """Cases: a decode step three ways, and by verb with the small pool; ms of CPU time."""
    bench = GenerateBench(model_type, lines, context, steps)
    names = ("stock eager", "all resident", "small pool", *VERBS)
    took: dict[str, list[Steps]] = {name: [] for name in names}
    for run in range(runs + 1):  # the first warms up
        measured = {
            "stock eager": bench.stock(),
            "all resident": bench.tiered(resident=True),
            "small pool": bench.tiered(resident=False),
            **bench.parts(),
        }
        for name, ms in measured.items():
            took[name] += [ms] * bool(run)

    def case(title: str, name: str, baseline: str) -> Case:
        ratio = summarise(name, took[name], "ms").median
        ratio /= summarise(baseline, took[baseline], "ms").median
        ratios = {} if name == baseline else {baseline: ratio}
        return summarise(title, took[name], "ms", ratios)

    whole = [case(f"decode step, {name}", name, "stock eager") for name in names[:3]]
    return whole + [case(f"its {verb}", verb, "small pool") for verb in VERBS]
