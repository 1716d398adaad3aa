"""How evenly the n-grams of a text fall on the rows of a memory layer, beside what even hashing would give.

Axes: order (n = 2..N), head, quantile (of the loads of a head's rows). The load of a row is the number of distinct
n-grams that address it. All heads of one order share one mix, so their figures are not independent of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np

from engram_lab.models.hashing import NgramHash
from engram_lab.models.ngrams import expected_collisions, expected_coverage, expected_spread, head_sizes, load_spread
from engram_lab.probes.base import Array, Record, role

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


@dataclass(frozen=True, eq=False)
class Usage(Record):
    """Coverage, collisions and loads of each head, with their mean and standard deviation under even hashing.

    coverage: share of rows that are addressed; collisions: share of distinct n-grams that share their row;
    spread: variance of the loads over their mean, 1 where n-grams fall evenly; hits_max: reads of the busiest row.
    """

    sources: tuple[str, ...]
    tokens: int
    quantiles: tuple[float, ...] = field(metadata=role("name"))
    distinct: Annotated[np.ndarray, Array("order", unit="n-grams", dtype="int64")]
    rows: Annotated[np.ndarray, Array("order", "head", unit="rows", dtype="int64")]
    coverage: Annotated[np.ndarray, Array("order", "head", unit="share of rows", dtype="float64")]
    coverage_expected: Annotated[np.ndarray, Array("order", "head", unit="share of rows", dtype="float64")]
    coverage_sd: Annotated[np.ndarray, Array("order", "head", unit="share of rows", dtype="float64")]
    collisions: Annotated[np.ndarray, Array("order", "head", unit="share of n-grams", dtype="float64")]
    collisions_expected: Annotated[np.ndarray, Array("order", "head", unit="share of n-grams", dtype="float64")]
    collisions_sd: Annotated[np.ndarray, Array("order", "head", unit="share of n-grams", dtype="float64")]
    spread: Annotated[np.ndarray, Array("order", "head", dtype="float64")]
    spread_expected: Annotated[np.ndarray, Array("order", "head", dtype="float64")]
    spread_sd: Annotated[np.ndarray, Array("order", "head", dtype="float64")]
    load_mean: Annotated[np.ndarray, Array("order", "head", unit="n-grams a row", dtype="float64")]
    load: Annotated[np.ndarray, Array("order", "head", "quantile", unit="n-grams a row", dtype="float64")]
    hits_max: Annotated[np.ndarray, Array("order", "head", unit="reads", dtype="int64")]


def usage(
    hash_: NgramHash,
    distinct: Sequence[int],
    hits: np.ndarray,
    loads: np.ndarray,
    sources: Sequence[str],
    tokens: int,
) -> Usage:
    """The usage of one layer from its hits and loads [row of the table]; `distinct` n-grams [order]."""
    sizes = head_sizes(hash_)
    grams = np.repeat(np.asarray(distinct, dtype=np.int64)[:, None], sizes.shape[1], axis=1)
    ends = np.cumsum(sizes)[:-1]
    own_loads, own_hits = np.split(loads, ends), np.split(hits, ends)

    def each(values: list) -> np.ndarray:
        return np.array(values).reshape(*sizes.shape, *np.shape(values[0]))

    pairs = list(zip(grams.flat, sizes.flat, strict=True))
    coverage, collisions, spread = (
        each([predict(int(n), int(m)) for n, m in pairs])
        for predict in (expected_coverage, expected_collisions, expected_spread)
    )
    return Usage(
        sources=tuple(sources),
        tokens=tokens,
        quantiles=QUANTILES,
        distinct=grams[:, 0].copy(),
        rows=sizes,
        coverage=each([float((load > 0).mean()) for load in own_loads]),
        coverage_expected=coverage[..., 0],
        coverage_sd=coverage[..., 1],
        collisions=each([float(load[load > 1].sum() / load.sum()) for load in own_loads]),
        collisions_expected=collisions[..., 0],
        collisions_sd=collisions[..., 1],
        spread=each([load_spread(load) for load in own_loads]),
        spread_expected=spread[..., 0],
        spread_sd=spread[..., 1],
        load_mean=each([float(load.mean()) for load in own_loads]),
        load=each([np.quantile(load, QUANTILES) for load in own_loads]),
        hits_max=each([int(hit.max()) for hit in own_hits]),
    )
