"""`engram-lab gpu-check`: every probe on the GPU and on the CPU, compared and timed; needs no Streamlit or Plotly.

float32 results have to agree within FLOAT32_BOUND; bfloat16 ones with the CPU's float32 within BFLOAT16_BOUND, which
is what rounding weights and activations to 8 bits of mantissa costs on the shipped models, with room to spare.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from engram_lab.lab.command.console import write

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from engram_lab.models.handle import Handle
    from engram_lab.probes.base import Report

FLOAT32_BOUND = 1e-4  # nats, or probability
BFLOAT16_BOUND = 0.25  # nats at a single layer and position, or probability
PROMPT = "The Soviet Union and the United States of America signed the treaty in New York City in 1963."
REPEATS = 5


def lens(handles: list[Handle]) -> tuple[Report, dict[str, np.ndarray]]:
    """The lens probe on the default prompt: (report, the figures to compare, by name)."""
    from engram_lab.probes import lens as lens_probe

    config = lens_probe.LensConfig(models=tuple(h.name for h in handles), prompts=(PROMPT,), target=" States")
    report = lens_probe.run(handles, config)
    figures = {}
    for model in report.result.models:
        for field in ("kl", "entropy", "next_token_loss", "target_prob"):
            figures[f"{model.name} {field}"] = getattr(model, field)
    return report, figures


def gates(handles: list[Handle]) -> tuple[Report, dict[str, np.ndarray]]:
    """The gates of the first model on the default prompt, with shuffled rows beside."""
    from engram_lab.probes import gates as probe

    report = probe.run(handles[:1], probe.GatesConfig((handles[0].name,), (PROMPT,), controls=("shuffled",)))
    result = report.result
    (shuffled,) = result.controls
    return report, {"gate": result.gate, "loss": result.next_token_loss, "shuffled loss": shuffled.next_token_loss}


def sensitivity(handles: list[Handle]) -> tuple[Report, dict[str, np.ndarray]]:
    """The loss on the prompt with the memory and without."""
    from engram_lab.probes import sensitivity as probe

    sets = (probe.TextSet("prompt", (probe.Item(PROMPT),)),)
    report = probe.run(handles, probe.SensitivityConfig(tuple(h.name for h in handles), sets))
    return report, {"loss": report.result.loss}


def cka(handles: list[Handle]) -> tuple[Report, dict[str, np.ndarray]]:
    """The alignment of the two models on all tokens of a few sentences."""
    from engram_lab.probes import cka as probe

    sentences = tuple(f"{PROMPT[:-5]}{year}." for year in range(1960, 1966))
    config = probe.CKAConfig(tuple(h.name for h in handles), sentences, points="all", bootstrap=20)
    report = probe.run(handles, config)
    return report, {"cka": report.result.cka}


def kv_swap(handles: list[Handle]) -> tuple[Report, dict[str, np.ndarray]]:
    """The probabilities of both answers on every step of a swap ladder, on the first model."""
    from engram_lab.probes.kv import swap as probe
    from engram_lab.probes.kv.scenario import Scenario

    scenario = Scenario("He was born in {field}, a city in the", "France", "England", " north", " south")
    # The best positions hang on near ties, which another number format may break otherwise.
    config = probe.SwapConfig((handles[0].name,), scenario, align="split", best=(), draws=2)
    report = probe.run(handles[:1], config)
    effects = report.result.effects
    return report, {"old": effects.prob_old, "new": effects.prob_new}


# A new probe adds itself here: run on handles -> (report, figures to compare).
PROBES: dict[str, Callable[[list[Handle]], tuple[Report, dict[str, np.ndarray]]]] = {
    "lens": lens,
    "gates": gates,
    "sensitivity": sensitivity,
    "cka": cka,
    "kv swap": kv_swap,
}


def largest_difference(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """The largest absolute difference over all figures; NaN stands at the same places or the result is infinite."""
    import numpy as np

    worst = 0.0
    for name, x in a.items():
        y = b[name]
        if x.shape != y.shape or not np.array_equal(np.isnan(x), np.isnan(y)):
            return float("inf")
        gap = np.abs(np.nan_to_num(x) - np.nan_to_num(y))
        worst = max(worst, float(gap.max(initial=0.0)))
    return worst


def timed(call: Callable[[], Any], device: str) -> tuple[float, Any]:
    """(best seconds of REPEATS, last value) of a call whose work on `device` is waited for."""
    import torch

    best = float("inf")
    for _ in range(REPEATS):
        began = time.perf_counter()
        value = call()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best, value


def trace_overhead(handle: Handle, ids: Tensor) -> dict[str, float]:
    """Milliseconds of a bare and of a traced forward of ids [batch, pos], and their ratio."""
    device = str(handle.device)
    with handle.running():
        bare, _ = timed(lambda: handle.model(input_ids=ids, use_cache=False).logits, device)
        traced, _ = timed(lambda: handle.residuals(ids).logits, device)
    return {"bare_ms": bare * 1e3, "traced_ms": traced * 1e3, "ratio": traced / bare}


def check(device: str = "cuda", names: tuple[str, str] = ("engram-mini", "dense-mini")) -> dict[str, Any]:
    """Every probe on `device` against the CPU in float32: differences, seconds, peak memory, trace overhead."""
    import torch

    from engram_lab.models.handle import open_model
    from engram_lab.models.ngrams import engram_model
    from engram_lab.probes.base import versions

    out: dict[str, Any] = {"available": True, "device": device, "versions": versions()}
    cuda = device.startswith("cuda")
    if cuda:
        out["gpu"] = torch.cuda.get_device_name()
    reference = [open_model(name, device="cpu", dtype="float32") for name in names]
    out["runs"] = []
    expected = {}
    for probe, run in PROBES.items():
        seconds, (_, figures) = timed(partial(run, reference), "cpu")
        expected[probe] = figures
        out["runs"].append({"probe": probe, "device": "cpu", "dtype": "float32", "seconds": seconds})
    ids = torch.tensor([reference[0].encode(PROMPT) * 20])[:, :256]
    for dtype, bound in (("float32", FLOAT32_BOUND), ("bfloat16", BFLOAT16_BOUND)):
        for tables in (device, "pinned host memory") if cuda else (device,):
            handles = [open_model(name, device=device, dtype=dtype) for name in names]
            if tables != device:
                for handle in handles:
                    if handle.engram_layers:
                        engram_model(handle).place_tables("cpu", pin=True)
            for probe, run in PROBES.items():
                if cuda:
                    torch.cuda.reset_peak_memory_stats()
                seconds, (_, figures) = timed(partial(run, handles), device)
                gap = largest_difference(expected[probe], figures)
                line = {"probe": probe, "device": device, "dtype": dtype, "tables": tables, "seconds": seconds}
                line |= {"largest_difference": gap, "bound": bound, "within": gap <= bound}
                if cuda:
                    line["peak_bytes"] = torch.cuda.max_memory_allocated()
                out["runs"].append(line)
            overhead = trace_overhead(handles[0], ids.to(handles[0].device))
            out.setdefault("trace", []).append({"dtype": dtype, "tables": tables, **overhead})
            for handle in handles:
                handle.close()
    out["ok"] = all(line.get("within", True) for line in out["runs"])
    return out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where to write it."""
    parser.add_argument("--json", metavar="FILE", default="-", help="where to write the figures (default: stdout)")


def run(args: argparse.Namespace) -> int:
    """Write the check as JSON; 0 where all is within bounds or there is no GPU."""
    import json
    import sys

    import torch

    if torch.cuda.is_available():
        report = check()
    else:
        report = {"available": False, "reason": "PyTorch sees no CUDA device on this machine."}
        print(report["reason"], file=sys.stderr)
    write(args.json, json.dumps(report, indent=1) + "\n")
    return 0 if report.get("ok", True) else 1
