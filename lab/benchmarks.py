"""Measurements of the lab's own speed against what the arithmetic alone costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def best_seconds(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The shortest of `rounds` times of each call; they take turns, so that a busy machine is fair to all."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def lens(positions: int = 128, rounds: int = 5, threads: int | None = None) -> dict[str, Any]:
    """Seconds of the whole lens on a random Llama of 135 M parameters (30 blocks, d_model 576, vocab 49152).

    The floor is one bare forward and one plain projection of all layers' states onto the vocabulary; `ratio` is the
    probe's time (trace, statistics, top 5, a target, JSON-ready arrays) over the floor.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from models.handle import Handle
    from probes.logit_lens import lens_of_ids

    threads = threads or torch.get_num_threads()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
        )
        raise NotImplementedError(Handle, LlamaForCausalLM, lens_of_ids, config)
    finally:
        torch.set_num_threads(before)
