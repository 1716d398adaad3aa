"""Measurement of CKA's own speed against the forwards of the models it compares."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def cka(
    points: int = 8192, length: int = 128, rounds: int = 2, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """Seconds of CKA on two random Llamas with 12 residual streams (11 blocks and embed), 192 wide, vocab 8192.

    `points` tokens in texts of `length`, all of them compared. `forwards` is both models' bare forwards of the same
    batches, `pairs` the HSICs of all pairs of layers, `intervals` the same with the shares of the sentences, `probe`
    everything from text to report with 200 resamples. `ratio` is pairs over forwards, and so on. On a machine that
    others use pass time.process_time and run on one thread.
    """
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from engram_lab.lab.command.bench import best_seconds
    from engram_lab.models.data import train_tokenizer
    from engram_lab.models.handle import Handle
    from engram_lab.probes import cka_math
    from engram_lab.probes.cka import BATCH_TOKENS, CHUNK, CKAConfig, run

    shape: dict[str, Any] = {"vocab_size": 8192, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 11}
    shape |= {"num_attention_heads": 6, "num_key_value_heads": 6, "max_position_embeddings": length + 1}
    tokenizer = train_tokenizer(["ab"], 260)
    handles = []
    for seed in range(2):
        torch.manual_seed(seed)
        handles.append(Handle(LlamaForCausalLM(LlamaConfig(**shape)).eval(), tokenizer, f"random {seed}"))
    # No "ab", which the tokenizer has as one token.
    letters = np.random.default_rng(0).integers(99, 123, size=(points // length, length), dtype=np.uint8)
    request = CKAConfig(
        tuple(h.name for h in handles), tuple(bytes(row).decode() for row in letters), points="all", bootstrap=200
    )
    ids = torch.tensor([handles[0].encode(text) for text in request.prompts])
    sentence = np.repeat(np.arange(len(ids)), length)
    with torch.inference_mode():
        # The points themselves: all but the start token, which stands for no text.
        x, y = (torch.cat([h.residuals(b).states[:, :, 1:] for b in ids.split(4)], dim=1) for h in handles)
        x, y = (z.flatten(1, 2).transpose(0, 1).contiguous() for z in (x, y))
    assert x.shape == (points, 12, 192)

    def pieces() -> Any:
        return zip(x.split(CHUNK), y.split(CHUNK), strict=True)

    def forwards() -> None:
        for handle in handles:
            with handle.running():
                for batch in ids.split(max(1, BATCH_TOKENS // ids.shape[1])):
                    handle.model(input_ids=batch, use_cache=False)

    with torch.inference_mode():
        calls: dict[str, Callable[[], Any]] = {
            "forwards": forwards,
            "pairs": lambda: cka_math.hsic(pieces),
            "intervals": lambda: cka_math.hsic(pieces, sentence),
            "probe": lambda: run(handles, request),
        }
        best = best_seconds(calls, rounds, clock)
    return {
        "points": points,
        "threads": torch.get_num_threads(),
        **{f"{name}_seconds": seconds for name, seconds in best.items()},
        "ratio": best["pairs"] / best["forwards"],
        "intervals_ratio": best["intervals"] / best["forwards"],
        "probe_ratio": best["probe"] / best["forwards"],
    }
