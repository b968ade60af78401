"""`generate` of tiny models three ways: stock eager, over small tiers, over what keeps all."""

from __future__ import annotations

from contextlib import contextmanager

import torch

import hisparse
from hisparse.fsm.fold import fold
from hisparse.fsm.state import digest
from hisparse.integrations.transformers import HiSparseCache, config_of, detach

PAGE = 4
PROMPT = 40
PADDING = (0, 17, 33)
MODEL_LEN = 84


def prompts(seed=3, lines=3, width=PROMPT, device="cpu"):
    """Token ids [lines, width], and the mask of a batch that is padded on the left."""
    drawn = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 512, (lines, width), generator=drawn)
    mask = torch.ones_like(ids)
    for line, padding in enumerate(PADDING[:lines]):
        mask[line, :padding] = 0
        ids[line, :padding] = 0
    return ids.to(device), mask.to(device)


def config(model, *, gpu_blocks=None, step_rows=72, max_requests=3, checks="on", policy=None):
    """`gpu_blocks` None: as many as let that many requests in, and the rows of a step; the
    watermark, which that cannot keep, asks for every page that may be spilled."""
    if gpu_blocks is None:
        sizes = {"step_rows": step_rows, "max_requests": max_requests}
        made = config(model, gpu_blocks=1000, policy=policy, **sizes)
        gpu_blocks = max_requests * made.steady_blocks(MODEL_LEN) + made.step_pages + 1
    return config_of(
        model,
        pools={"page_size": PAGE, "gpu_blocks": gpu_blocks, "host_pool_gib": 0.02},
        policy={"hot_rows": 12, "watermark_blocks": 20, **(policy or {})},
        schedule={
            "max_requests": max_requests,
            "max_model_len": MODEL_LEN,
            "step_rows": step_rows,
            "prefill_chunk": PROMPT,
        },
        checks=checks,
    )


@contextmanager
def tiers(model, *, log=None, device="cpu", **sizes):
    """A backend with small pools. Afterwards nothing is violated; its log folds to its state."""
    with hisparse.HiSparseBackend(config(model, **sizes), device=device, log=log) as backend:
        yield backend
        coordinator = backend.coordinator
        assert not coordinator.checker.violations
        coordinator.checker.state(coordinator.state)
        assert not coordinator.checker.violations
        assert digest(fold(backend.config, coordinator.log.read(1))) == coordinator.digest()


def generate(model, cache, ids, mask, new=40, **options):
    """Greedy; `cache` None is stock eager. Tokens [lines, new], logits [new, lines, vocab]."""
    if cache is None:
        detach(model)
    made = model.generate(
        ids,
        attention_mask=mask,
        past_key_values=cache,
        max_new_tokens=new,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    return made.sequences[:, ids.shape[1] :], torch.stack(made.logits)


def over(model, backend, ids, mask, new=40, eos_token_id=None, **options):
    """One call of `generate` over a backend, or anything with its verbs."""
    with HiSparseCache(model, backend, eos_token_id=eos_token_id) as cache:
        if eos_token_id is not None:
            options["eos_token_id"] = eos_token_id
        return generate(model, cache, ids, mask, new, **options)


def live(tokens, eos):
    """Steps, bool [new, lines], whose logits decide a token: a line that ended decides none."""
    ended = (tokens == eos).cumsum(1) - (tokens == eos).int()
    return (ended == 0).T


def early_end(tokens):
    """A token with which one line ends before the others, and no other does."""
    for line in (1, 0, 2):
        for token in tokens[line, 8:20].tolist():
            if (tokens == token).any(1).sum() == 1:
                return token
    raise AssertionError("no token is of one line alone")
