"""The statistics that the probes share: one bootstrap, one divergence.

The bootstrap draws groups (prompts, facts, items, scenarios) with replacement, whole, and gives the percentile interval
of Efron (1979) at 95 %. What it resamples is a ratio of sums over groups, a mean among others. One array of draws
serves all figures of a report, so that differences of two of them are resampled in pairs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

LEVELS = (0.025, 0.975)


def draws(of: int | Sequence[Hashable], resamples: int, rng: int | np.random.Generator) -> np.ndarray:
    """How often each item is drawn, float64 [1 + resample, item]; `of` is their number, or the items themselves.

    Equal items are one group, which is drawn as a whole: to say a sentence twice tells nothing new. The first row takes
    each item once: it is the sample itself. One group alone, or none, has no other row: nothing tells its spread. `rng`
    is a seed, or a generator that goes on, for several samples in turn.
    """
    group = numbered(range(of) if isinstance(of, int) else of)
    n = int(group.max(initial=-1)) + 1
    if n < 2:
        return np.ones((1, len(group)))
    drawn = np.random.default_rng(rng).multinomial(n, np.full(n, 1 / n), size=resamples)
    return np.concatenate([np.ones((1, len(group))), drawn[:, group]])


def numbered(items: Iterable[Hashable]) -> np.ndarray:
    """The group of each item, int64 [item]: equal ones have one number, counted from 0 in the order of their first."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(item, len(numbers)) for item in items], dtype=np.int64)


def ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """above / below, of shapes that broadcast; NaN where below is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(below == 0, np.nan, above / below)


def percentiles(values: np.ndarray, estimate: np.ndarray | float = np.nan) -> tuple[np.ndarray, np.ndarray]:
    """The 2.5 % and the 97.5 % point, each [...], of values [resample, ...]; widened to hold the estimate [...].

    A resample that has no value, NaN, is left out; NaN where none has one, and without any resample.
    """
    if not len(values):
        return np.full(values.shape[1:], np.nan), np.full(values.shape[1:], np.nan)
    some = ~np.isnan(values).all(axis=0)
    known = np.where(some, values, 0.0)
    low, high = (np.nanquantile if np.isnan(known).any() else np.quantile)(known, LEVELS, axis=0)
    low, high = np.fmin(low, estimate), np.fmax(high, estimate)  # NaN is no estimate to hold
    return np.where(some, low, np.nan), np.where(some, high, np.nan)


def ratio_interval(sums: np.ndarray, counts: np.ndarray, drawn: np.ndarray) -> tuple[Any, Any, Any]:
    """(ratio, low, high), each [...]: the sum over groups of sums [group, ...] by that of counts [group].

    `drawn` is what `draws` gave for these groups. NaN where the counts are all 0; low and high are NaN without
    resamples.
    """
    below = (drawn[1:] @ counts).reshape(-1, *[1] * (sums.ndim - 1))
    whole = ratio(sums.sum(axis=0), counts.sum())
    return whole, *percentiles(ratio(drawn[1:] @ sums, below), whole)


def mean_interval(
    values: np.ndarray, counted: np.ndarray, index: np.ndarray, drawn: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """(mean, low, high), each [...], of values [..., pos] over the positions that count and are not NaN.

    counted [pos] bool; index [pos] is the prompt of each position, and `drawn` the `draws` of the prompts. low and
    high are None where there is nothing to resample. NaN at a position must stand in every row of values or in none.
    """
    valid = counted & ~np.isnan(values.reshape(-1, values.shape[-1])[0])
    if not counted.any():
        return np.full(values.shape[:-1], np.nan), None, None
    member = (index[valid] == np.arange(index.max() + 1)[:, None]).astype(np.float64)  # [prompt, pos]
    mean, low, high = ratio_interval(member @ values[..., valid].T.astype(np.float64), member.sum(axis=1), drawn)
    return (mean, None, None) if len(drawn) == 1 else (mean, low, high)


def scalar_fields(name: str, interval: tuple[Any, Any, Any]) -> dict[str, Any]:
    """(mean, low, high) as the fields name, name_low and name_high of a record; NaN is None."""
    keys = (name, f"{name}_low", f"{name}_high")
    return {key: None if v is None or np.isnan(v) else float(v) for key, v in zip(keys, interval, strict=True)}


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) [...] in nats of log-probabilities [..., vocab], in their own precision; rounding may leave it < 0."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)
