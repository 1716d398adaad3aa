"""`engram-lab gpu-check`: every probe on the GPU and on the CPU, compared and timed; needs no Streamlit or Plotly.

float32 results have to agree as a replay's have to (lab.sessions.compare.verdict): every array of every result, within
FLOAT32_BOUND. Of bfloat16 ones, nats and probabilities have to agree with the CPU's float32 within BFLOAT16_BOUND,
which is what rounding weights and activations to 8 bits of mantissa costs on the shipped models, with room to spare.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from engram_lab.lab.ask import brief
from engram_lab.lab.command.console import check_outputs, write
from engram_lab.lab.fronts import FRONTS, front
from engram_lab.lab.sessions import compare
from engram_lab.probes.running import compute

if TYPE_CHECKING:
    from torch import Tensor

    from engram_lab.models.handle import Handle
    from engram_lab.probes.base import Report

FLOAT32_BOUND = 1e-4  # and as much of the value itself
BFLOAT16_BOUND = 0.25  # nats at a single layer and position, or probability, and as much of the value itself
ROUNDED = ("nats", "nats a token", "probability")  # units that BFLOAT16_BOUND is of
REPEATS, ENOUGH = 5, 2.0  # times that something is measured, and seconds after which it is not again


def requests(engram: str, dense: str) -> dict[str, Any]:
    """Of every probe its front's example, on these two models."""
    return {probe: front(probe).example(engram, dense) for probe in FRONTS}


def rounded(a: Report, b: Report) -> tuple[float, list[str]]:
    """The largest difference of nats and probabilities, and what of them is further off than BFLOAT16_BOUND."""
    fields = [
        field
        for field in compare.fields(a, b)
        if field.unit in ROUNDED and field.kind == "float" and not field.timed and field.reason is None
    ]
    wrong = [text for field in fields if (text := field.wrong(BFLOAT16_BOUND)) is not None]
    return max((field.largest or 0.0 for field in fields), default=0.0), wrong


def timed(call: Callable[[], Any], device: str) -> tuple[float, Any]:
    """(best seconds of up to REPEATS, last value) of a call whose work on `device` is waited for."""
    import torch

    spent: list[float] = []
    while len(spent) < REPEATS and sum(spent) < ENOUGH:
        began = time.perf_counter()
        value = call()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - began)
    return min(spent), value


def _run(probe: str, config: Any, handles: list[Handle]) -> Report:
    by_name = {handle.name: handle for handle in handles}
    return compute(probe, [by_name[name] for name in config.models], config)[0]


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
    expected: dict[str, Report] = {}
    asked = requests(*names)
    for probe in asked:
        seconds, expected[probe] = timed(partial(_run, probe, asked[probe], reference), "cpu")
        out["runs"].append({"probe": probe, "device": "cpu", "dtype": "float32", "seconds": seconds})
    ids = torch.tensor([reference[0].encode(brief.PROMPT) * 20])[:, :256]
    for dtype, bound in (("float32", FLOAT32_BOUND), ("bfloat16", BFLOAT16_BOUND)):
        for tables in (device, "pinned host memory") if cuda else (device,):
            handles = [open_model(name, device=device, dtype=dtype) for name in names]
            if tables != device:
                for handle in handles:
                    if handle.engram_layers:
                        engram_model(handle).place_tables("cpu", pin=True)
            for probe in asked:
                if cuda:
                    torch.cuda.reset_peak_memory_stats()
                seconds, report = timed(partial(_run, probe, asked[probe], handles), device)
                if dtype == "float32":
                    verdict = compare.verdict(expected[probe], report, bound)
                    gap, wrong = verdict.largest, list(verdict.wrong)
                else:
                    gap, wrong = rounded(expected[probe], report)
                line = {"probe": probe, "device": device, "dtype": dtype, "tables": tables, "seconds": seconds}
                line |= {"largest_difference": gap, "bound": bound, "wrong": wrong, "within": not wrong}
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

    check_outputs(args.json)
    if torch.cuda.is_available():
        report = check()
    else:
        report = {"available": False, "reason": "PyTorch sees no CUDA device on this machine."}
        print(report["reason"], file=sys.stderr)
    write(args.json, json.dumps(report, indent=1) + "\n")
    return 0 if report.get("ok", True) else 1
