"""A tiny Engram, and its memory once more: per position, in plain Python, from the formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram_lab.models.engram import CACHE_ARGUMENT, EngramConfig, EngramForCausalLM

VOCAB, CANONICAL, PAD, N, HEADS, D, HEAD_DIM = 97, 71, 3, 3, 2, 32, 8
LAYERS = (0, 2)


def config_of(**changes: Any) -> EngramConfig:
    return EngramConfig(**{
        "vocab_size": VOCAB, "hidden_size": D, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "engram_layer_ids": LAYERS, "engram_max_ngram_size": N, "engram_vocab_size": 50,
        "engram_n_heads": HEADS, "engram_head_dim": HEAD_DIM,
        "engram_pad_token_id": PAD, "engram_compressed_vocab_size": CANONICAL,
        "engram_seed": 5, "bos_token_id": None, "eos_token_id": None, "pad_token_id": PAD, **changes,
    })  # fmt: skip


def build(**changes: Any) -> EngramForCausalLM:
    """A model whose memories matter: random rows, convolution, norms, and a many-to-one canonical map."""
    torch.manual_seed(0)
    model = EngramForCausalLM(config_of(**changes)).eval()
    model.model.canonical_ids.copy_((torch.arange(VOCAB) * 7 + 5) % CANONICAL)
    with torch.no_grad():
        for memory in model.model.memories():
            memory.table.weight.normal_()
            memory.key.weight.normal_(std=0.2)
            memory.value.weight.normal_(std=0.2)
            memory.conv.weight.normal_(std=0.5)
            for norm in (memory.key_norm, memory.query_norm, memory.conv_norm):
                norm.weight.normal_(1.0, 0.3)
    return model


def tokens(*shape: int, seed: int = 0) -> Tensor:
    # Above the padding id, so that no prompt holds it by chance.
    return torch.randint(PAD + 1, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def logits(model: EngramForCausalLM, ids: Tensor, **kwargs: Any) -> Tensor:
    return model(ids, **{"use_cache": False, **kwargs}).logits


def cached(model: EngramForCausalLM, ids: Tensor, cache: Any, **kwargs: Any) -> Tensor:
    return model(ids, **{CACHE_ARGUMENT: cache}, use_cache=True, **kwargs).logits


def record(model: EngramForCausalLM, part: str, call: Any) -> list[Tensor]:
    """What `part` of each memory gave during `call`, in the order of the layers."""
    found: list[Tensor] = []
    hooks = [
        getattr(model.model.layers[i].memory, part).register_forward_hook(lambda *a: found.append(a[2].clone()))
        for i in LAYERS
    ]
    try:
        call()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def plain_primes() -> list[list[int]]:
    seen: list[int] = []
    for _ in LAYERS:
        for _order in range(N - 1):
            n = 49
            for _head in range(HEADS):
                n = next(m for m in range(n + 1, 999) if all(m % q for q in range(2, m)) and m not in seen)
                seen.append(n)
    size = (N - 1) * HEADS
    return [seen[:size], seen[size:]]


def plain_multipliers(layer: int) -> list[int]:
    half = (2**63 - 1) // CANONICAL // 2
    drawn = np.random.default_rng(5 + 10007 * layer).integers(0, half, size=(N,), dtype=np.int64)
    return [2 * int(m) + 1 for m in drawn]


def plain_rows(canonical: list[int], layer: int) -> list[list[int]]:
    """Row ids [pos][column] of one document."""
    multipliers = plain_multipliers(layer)
    primes = plain_primes()[LAYERS.index(layer)]
    pad = (PAD * 7 + 5) % CANONICAL
    out = []
    for t in range(len(canonical)):
        row, mix = [], canonical[t] * multipliers[0]
        for back in range(1, N):
            mix ^= (canonical[t - back] if t >= back else pad) * multipliers[back]
            for head in range(HEADS):
                column = (back - 1) * HEADS + head
                row.append(mix % primes[column] + sum(primes[:column]))
        out.append(row)
    return out


def plain_memory(memory: Any, h: np.ndarray, rows: list[list[int]], variant: str) -> np.ndarray:
    """What the memory adds to `h` [pos, d_model] of one document."""
    w = {name: value.double().numpy() for name, value in memory.state_dict().items()}

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / math.sqrt(float((x * x).mean()) + 1e-6) * weight

    gated = []
    for t, row in enumerate(rows):
        e = np.concatenate([w["table.weight"][r] for r in row])
        key, query = norm(w["key.weight"] @ e, w["key_norm.weight"]), norm(h[t], w["query_norm.weight"])
        s = float(key @ query) / math.sqrt(D)
        if variant != "paper":
            s = math.copysign(math.sqrt(max(abs(s), 1e-6)), s)
        gated.append(w["value.weight"] @ e / (1 + math.exp(-s)))
    out = []
    for t in range(len(rows)):
        total = np.zeros(D)
        for tap in range(4):
            if t - tap * N >= 0:
                total += norm(gated[t - tap * N], w["conv_norm.weight"]) * w["conv.weight"][:, 0, 3 - tap]
        out.append(gated[t] + total / (1 + np.exp(-total)))
    return np.stack(out)
