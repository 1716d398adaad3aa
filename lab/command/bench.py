"""Measurements of the lab's own speed against what the arithmetic alone costs."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

from engram_lab.lab.command.console import check_outputs, write

BENCHMARKS = ("start", "lens", "trace", "cka", "kv_map", "families")  # a function of that name each
PATIENCE = 180  # seconds for what takes a few where nothing else runs
FIRST_CHART = "document.querySelector('.st-key-curves .js-plotly-plot .trace') ? performance.now() / 1000 : 0"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to measure, and where to write it."""
    parser.add_argument("what", choices=BENCHMARKS, help="what to measure")
    parser.add_argument("--json", metavar="FILE", default="-", help="where to write the figures (default: stdout)")


def run(args: argparse.Namespace) -> int:
    """Measure, and write the figures."""
    check_outputs(args.json)
    measure = globals()[args.what]
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


def kv_map(
    name: str = "smollm2-135m", groups: int = 3, rounds: int = 2, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """Seconds of the map of the default scenario, all cells batched and each cell in a forward of its own.

    Both give the same cells from the same clean runs, which are not timed. On a machine that others use pass
    time.process_time and run on one thread.
    """
    import torch

    from engram_lab.lab.ask.scenarios import library
    from engram_lab.models.handle import open_model
    from engram_lab.models.kv import KVEdit
    from engram_lab.probes.kv.effects import differing, edited, effects, rows_at_once, run_clean
    from engram_lab.probes.kv.map import layer_groups
    from engram_lab.probes.kv.scenario import prepare

    handle = open_model(name)
    pair = prepare(handle, library()[0])
    clean = run_clean(handle, pair)
    cells = [KVEdit((p,), g) for g in layer_groups(handle.n_layers, groups) for p in differing(clean)]

    def batched() -> Any:
        return effects(edited(handle, clean, cells), pair, clean, clean.new)

    def single() -> Any:
        return effects((edit for cell in cells for edit in edited(handle, clean, [cell])), pair, clean, clean.new)

    gap = abs(batched().recovery - single().recovery).max()
    best = best_seconds({"batched": batched, "single": single}, rounds, clock)
    return {
        "model": name,
        "tokens": pair.n_tokens,
        "cells": len(cells),
        "forwards": -(-len(cells) // rows_at_once(clean)),
        "threads": torch.get_num_threads(),
        **{f"{which}_seconds": seconds for which, seconds in best.items()},
        "ratio": best["single"] / best["batched"],
        "largest_difference_of_recovery": float(gap),
    }


def families() -> dict[str, Any]:
    """What the lab does with a random model of each family, and the largest difference from transformers itself."""
    from engram_lab.lab.command import families

    measured = [families.measure(name) for name in families.FAMILIES]
    return {"families": measured, "table": families.table(measured)}


def start(rounds: int = 3) -> dict[str, Any]:
    """Seconds until something is there, medians of `rounds` times, each in a process of its own.

    `address` is from the start of `engram-lab app` until its address answers, `chart` from opening the lens page in a
    fresh headless Chromium until its first chart is drawn, once the models are open (None without a Chromium), `probe`
    the whole of `engram-lab probe lens` on a short prompt. `_processor` is the processor time of the command alone.
    """
    from engram_lab.lab.fronts import export

    seconds: dict[str, list[float]] = {name: [] for name in ("address", "address_processor", "probe")}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "ENGRAM_LAB_DATA": folder}
        for _ in range(rounds):
            with _served(environment) as (_, wall, processor):
                seconds["address"].append(wall)
                seconds["address_processor"].append(processor)
            began = time.perf_counter()
            command = ["probe", "lens", "--model", "engram-mini", "--prompt", "The old mill", "--json", os.devnull]
            subprocess.run([sys.executable, "-m", "engram_lab.lab", *command], env=environment, check=True)
            seconds["probe"].append(time.perf_counter() - began)
        if export.no_png() is None:
            with _served(environment) as (address, _, _):
                first_charts(address, 1)  # which waits for the models
                seconds["chart"] = first_charts(address, rounds)
    return {
        "rounds": rounds,
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "chart_seconds": None,
        **{f"{name}_seconds": round(statistics.median(times), 3) for name, times in seconds.items()},
    }


@contextlib.contextmanager
def _served(environment: dict[str, str]) -> Iterator[tuple[str, float, float]]:
    """An app of its own: its address, and the seconds and the processor seconds until it answered."""
    import psutil

    began = time.perf_counter()
    app = subprocess.Popen(
        [sys.executable, "-m", "engram_lab.lab", "app", "--port", "0"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert app.stdout is not None
        address = next(line for line in app.stdout if "http://" in line).split()[4]
        urllib.request.urlopen(f"{address}/_stcore/health", timeout=PATIENCE).close()
        used = psutil.Process(app.pid).cpu_times()
        yield address, time.perf_counter() - began, used.user + used.system
    finally:
        app.kill()
        app.wait()


def first_charts(address: str, rounds: int) -> list[float]:
    """Seconds from opening the lens page until its first chart is drawn, each time in a fresh Chromium."""

    async def once() -> float:
        from choreographer import Browser

        async with Browser(headless=True) as browser:
            tab = await browser.create_tab(f"{address}/lens")
            until = time.monotonic() + PATIENCE
            while time.monotonic() < until:
                answer = await tab.send_command("Runtime.evaluate", params={"expression": FIRST_CHART})
                if drawn := answer.get("result", {}).get("result", {}).get("value"):
                    return float(drawn)
                await asyncio.sleep(0.02)
        raise TimeoutError(f"The lens page has drawn no chart within {PATIENCE} seconds.")

    return [asyncio.run(once()) for _ in range(rounds)]
