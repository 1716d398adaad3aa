"""Measurement of the position x layer map's speed against one position at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def kv_map(
    name: str = "smollm2-135m", groups: int = 3, rounds: int = 2, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """Seconds of the map of the default scenario, all cells batched and each cell in a forward of its own.

    Both give the same cells from the same clean runs, which are not timed. On a machine that others use pass
    time.process_time and run on one thread.
    """
    import torch

    from engram_lab.lab.ask.scenarios import library
    from engram_lab.lab.command.bench import best_seconds
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
