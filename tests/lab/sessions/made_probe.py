"""A probe with every kind of field that a report may have; it computes nothing, and no model is needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from engram_lab.probes.base import Array, ModelProtocol, Protocol, Record, Report

NAME = "made"
AT = "engram_lab.probes.made"  # where the lab finds it, while the fixture `made` of conftest.py is used
ODD = 'naïve 東京 👍🏽 \ud800 \udfff \0 \x1f " \\ <b> 100 % a_b \u2028 \ufeff'  # with lone surrogates


@dataclass(frozen=True, eq=False)
class Inner(Record):
    name: str
    grid: Annotated[np.ndarray, Array("layer", "pos", unit="nats")]
    ids: Annotated[np.ndarray, Array("pos", dtype="int64")]
    mask: Annotated[np.ndarray, Array("layer", "pos", dtype="bool")]
    exact: Annotated[np.ndarray, Array("layer", dtype="float64")]
    missing: Annotated[np.ndarray, Array("pos")] | None = None


@dataclass(frozen=True, eq=False)
class MadeConfig(Record):
    models: tuple[str, ...]
    prompts: tuple[str, ...]
    number: float = 0.1
    perhaps: float | None = None
    on: bool = True
    weights: dict[str, float] | None = None


@dataclass(frozen=True, eq=False)
class MadeResult(Record):
    inner: tuple[Inner, ...]
    names: dict[int, str]
    words: dict[str, tuple[str, ...]]
    score: float
    count: int


CONFIG, RESULT = MadeConfig, MadeResult


def inner(layers: int, positions: int, fill: float = 0.0) -> Inner:
    grid = np.full((layers, positions), fill, dtype=np.float32)
    grid.ravel()[:4] = np.array([np.nan, np.inf, -0.0, 1e-45], np.float32)[: grid.size]
    ids = np.arange(positions) - 2**62
    return Inner(ODD, grid, ids, grid > 0, np.linspace(0, 1, layers) / 3)


def report(seed: int = 0, prompt: str = "The river runs", model: str = "tiny") -> Report:
    config = MadeConfig((model,), (prompt, ODD), float("nan"), float("-inf"), False, {"$float": 1.0, ODD: 0.1})
    protocol = Protocol(
        (ModelProtocol(model, f"print of {model}", "cpu", "float32", 3),), (((1, 2, 3),),), seed, {"torch": "2.13.0"}
    )
    result = MadeResult(
        (inner(3, 4, seed), inner(0, 5), inner(2, 0)),
        {-1: "a", 2**40: ODD},
        {"$array": ("result.score",), "$": (), "$$x": ("y",)},
        1 / 3,
        2**60 + seed,
    )
    return Report(NAME, config, protocol, result)
