"""Measurements of the lab's own speed against what the arithmetic alone costs."""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable
from typing import Any

from engram_lab.lab.command.console import write

# What is measured -> the module with a function of that name.
BENCHMARKS = {
    "lens": "engram_lab.lab.command.bench",
    "trace": "engram_lab.lab.command.bench",
    "cka": "engram_lab.lab.command.bench_cka",
    "kv_map": "engram_lab.lab.command.bench_kv",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to measure, and where to write it."""
    parser.add_argument("what", choices=list(BENCHMARKS), help="what to measure")
    parser.add_argument("--json", metavar="FILE", default="-", help="where to write the figures (default: stdout)")


def run(args: argparse.Namespace) -> int:
    """Measure, and write the figures."""
    measure = getattr(importlib.import_module(BENCHMARKS[args.what]), args.what)
    write(args.json, json.dumps(measure(), indent=1) + "\n")
    return 0


def best_seconds(
    calls: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """The shortest of `rounds` times of each call; they take turns, so that a busy machine is fair to all."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            start = clock()
            call()
            best[name] = min(best[name], clock() - start)
    return best


def lens(positions: int = 128, rounds: int = 5, clock: Callable[[], float] = time.perf_counter) -> dict[str, Any]:
    """Seconds of the lens probe on a random Llama of 135 M parameters (30 blocks, 576 wide, vocab 49152).

    The floor is one bare forward and one projection of all layers' states onto the vocabulary; `ratio` is
    the probe's time, from text to report with the top 5 and a target, over the floor. On a machine that
    others use pass time.process_time and run on one thread.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from engram_lab.models.data import train_tokenizer
    from engram_lab.models.handle import Handle
    from engram_lab.probes.lens import LensConfig, run

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
    handle = Handle(LlamaForCausalLM(config), train_tokenizer(["ab"], 260), "random 135M")
    request = LensConfig((handle.name,), ("x" * (positions - 1),), target="y")  # with the start token
    ids = torch.tensor([handle.encode(request.prompts[0])])
    assert ids.shape[1] == positions
    with handle.running():
        states = handle.residuals(ids).states
        calls = {
            "probe": lambda: run([handle], request),
            "forward": lambda: handle.model(input_ids=ids, use_cache=False),
            "projection": lambda: handle.unembed(states),
        }
        best_seconds(calls, 1, clock)  # the first call of each builds what the others reuse
        best = best_seconds(calls, rounds, clock)
    return {
        "positions": positions,
        "parameters": handle.n_parameters,
        "threads": torch.get_num_threads(),
        **{f"{name}_seconds": seconds for name, seconds in best.items()},
        "ratio": best["probe"] / (best["forward"] + best["projection"]),
    }


def trace(name: str = "engram-mini", positions: int = 256, rounds: int = 20) -> dict[str, Any]:
    """Seconds of a bare and of a traced forward of a model, and their ratio."""
    import torch

    from engram_lab.models.handle import open_model

    handle = open_model(name, device="cpu")
    ids = torch.arange(positions)[None] % handle.vocab_size
    with handle.running():
        calls = {
            "bare": lambda: handle.model(input_ids=ids, use_cache=False),
            "traced": lambda: handle.residuals(ids),
        }
        best_seconds(calls, 2)
        best = best_seconds(calls, rounds)
    return {
        "model": name,
        "positions": positions,
        "threads": torch.get_num_threads(),
        **{f"{name}_seconds": seconds for name, seconds in best.items()},
        "ratio": best["traced"] / best["bare"],
    }
