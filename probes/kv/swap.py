"""The swap ladder: how much of a prefill's K and V must come from another for the answer to be the other's.

Axes: variant (the steps of the ladder), position (positions at which the caches differ), size (of random sets). The
steps: the field; everything behind it; the last k positions; the best k by what each gives alone; as a control k at
random from those behind the field; all; none. The claim under test, that answers are read behind the field, is that of
"Models take notes at prefill" (arXiv 2606.17107); recovery is defined in probes/kv/effects.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import torch

from engram_lab.models.errors import LabError
from engram_lab.models.handle import Handle
from engram_lab.models.kv import PARTS, KVEdit, swap
from engram_lab.models.kv_runs import check_kv, check_parts, continue_from
from engram_lab.probes.base import Array, Progress, Protocol, Record, Report, check_seed, only, role
from engram_lab.probes.kv.effects import (
    Clean,
    Effects,
    Oracle,
    differing,
    edited,
    effects,
    oracle,
    oracle_sentence,
    run_clean,
)
from engram_lab.probes.kv.scenario import ALIGN, Pair, Scenario, prepare


@dataclass(frozen=True, eq=False)
class SwapConfig(Record):
    """A request: one model, a scenario, and the steps of the ladder.

    `last`, `best` and `random` are numbers of positions; those larger than there are positions are left out. Each
    random number is drawn `draws` times with `seed`. `part` is "kv", "k" or "v"; `layers` are blocks, None all.
    Raises LabError.
    """

    models: tuple[str, ...]
    scenario: Scenario
    part: str = "kv"
    layers: tuple[int, ...] | None = None
    last: tuple[int, ...] = (1, 2, 4, 8)
    best: tuple[int, ...] = (1, 2, 4, 8)
    random: tuple[int, ...] = (1, 2, 4, 8)
    draws: int = 8
    align: str = "refuse"
    seed: int = 0

    def __post_init__(self) -> None:
        check_request(self.models, self.align, self.part)
        if self.layers is not None and not self.layers:
            raise LabError("No layer is named: name at least one, or none at all for every layer.")
        if any(k < 1 for k in (*self.last, *self.best, *self.random)):
            raise LabError("The numbers of positions must be 1 or more.")
        check_seed(self.seed, self.draws, "draws")


def check_request(models: Sequence[str], align: str, part: str = "kv") -> None:
    """LabError for a request that no probe of the cache takes."""
    if len(models) != 1:
        raise LabError(f"This is about the cache of one model, not of {len(models)}.")
    if part not in PARTS:
        raise LabError(f'"{part}" is no part of a cache: use {", ".join(PARTS)}.')
    if align not in ALIGN:
        raise LabError(f'"{align}" is no way to align two values: use {" or ".join(ALIGN)}.')


@dataclass(frozen=True, eq=False)
class SwapResult(Record):
    """The ladder; DEFINITIONS of its front says what each figure is.

    `effects` goes by variant, `single` by position.
    """

    name: str
    layer_names: tuple[str, ...]  # of the blocks that were edited
    pair: Pair
    oracle: Oracle
    said: str = field(metadata=role("prose"))  # what the ladder shows, in a sentence
    steps: tuple[str, ...]  # [variant] field, downstream, last, best, random, all, self
    names: tuple[str, ...]  # [variant]
    positions: tuple[tuple[int, ...], ...]  # [variant]
    k: Annotated[np.ndarray, Array("variant", dtype="int64")]
    draw: Annotated[np.ndarray, Array("variant", dtype="int64", role="name")]  # of the random ones, else -1
    effects: Effects
    position: Annotated[np.ndarray, Array("position", dtype="int64", role="name")]
    single: Effects
    random_k: Annotated[np.ndarray, Array("size", dtype="int64")]
    random_mean: Annotated[np.ndarray, Array("size", unit="share", dtype="float64")]  # of the recovery
    random_sd: Annotated[np.ndarray, Array("size", unit="share", dtype="float64")]  # NaN for one draw
    random_low: Annotated[np.ndarray, Array("size", unit="share", dtype="float64")]  # the least of the draws
    random_high: Annotated[np.ndarray, Array("size", unit="share", dtype="float64")]
    self_equal: bool  # K, V of all layers swapped with themselves: the same bits as the clean old run
    all_equal: bool  # all from the donor: the same bits as the clean new run
    digests: tuple[str, str] = field(metadata=role("hash"))  # of the caches (old, new), before and after


CONFIG, RESULT = SwapConfig, SwapResult


@dataclass(frozen=True)
class _Step:
    """One variant of the ladder."""

    step: str
    name: str
    positions: tuple[int, ...]
    draw: int = -1


def run(
    handles: Sequence[Handle], config: SwapConfig, progress: Progress | None = None
) -> Report[SwapConfig, SwapResult]:
    """The ladder of one scenario: `effects` [variant] of each set of positions swapped, `single` [pos] of one alone.

    All that cannot be served is refused before the first forward, as a LabError.

        >>> cards = Scenario("Paris is the {field} of France.\\nTokyo is the old", "capital", "river", " mill", " sea")
        >>> report = run([handle], SwapConfig((handle.name,), cards, draws=1, align="split"))
        >>> len(report.result.effects.recovery) > 4
        True
    """
    handle = only(handles)
    pair = prepare(handle, config.scenario, config.align)
    layers = chosen_layers(handle, config.layers)
    check_kv(handle)
    if config.part != "kv":
        check_parts(handle)
    told = progress or (lambda fraction, doing: None)
    told(0.0, "clean runs")
    clean = run_clean(handle, pair)
    found = oracle(handle, pair, clean)
    equal = _equal(handle, clean)

    def measured(positions: Sequence[tuple[int, ...]], start: float, share: float, doing: str) -> Effects:
        edits = [KVEdit(own, config.layers, config.part) for own in positions]
        batches = edited(handle, clean, edits, lambda f, _: told(start + share * f, doing))
        return effects(batches, pair, clean, clean.new)

    where = differing(clean)
    single = measured([(p,) for p in where], 0.1, 0.4, "single positions")
    steps = _ladder(config, pair, where, single.recovery)
    got = measured([own.positions for own in steps], 0.5, 0.5, "the ladder")
    clean.check()
    sizes = sorted({len(own.positions) for own in steps if own.step == "random"})
    drawn = [
        got.recovery[[n for n, own in enumerate(steps) if own.step == "random" and len(own.positions) == k]]
        for k in sizes
    ]
    result = SwapResult(
        name=handle.name,
        layer_names=tuple(map(str, layers)),
        pair=pair,
        oracle=found,
        said=_said(pair, found, got),
        steps=tuple(own.step for own in steps),
        names=tuple(own.name for own in steps),
        positions=tuple(own.positions for own in steps),
        k=np.array([len(own.positions) for own in steps], dtype=np.int64),
        draw=np.array([own.draw for own in steps], dtype=np.int64),
        effects=got,
        position=np.array(where, dtype=np.int64),
        single=single,
        random_k=np.array(sizes, dtype=np.int64),
        random_mean=np.array([own.mean() for own in drawn], dtype=np.float64),
        random_sd=np.array([own.std(ddof=1) if len(own) > 1 else np.nan for own in drawn], dtype=np.float64),
        random_low=np.array([own.min() for own in drawn], dtype=np.float64),
        random_high=np.array([own.max() for own in drawn], dtype=np.float64),
        self_equal=equal[0],
        all_equal=equal[1],
        digests=clean.digests,
    )
    return Report("kv swap", config, Protocol.of(handles, [[pair.ids_old, pair.ids_new]], config.seed), result)


def chosen_layers(handle: Handle, layers: Sequence[int] | None) -> tuple[int, ...]:
    """The blocks that are edited; LabError for one that there is not."""
    chosen = tuple(range(handle.n_layers)) if layers is None else tuple(layers)
    for layer in chosen:
        if not 0 <= layer < handle.n_layers:
            raise LabError(f"{handle.name} has no layer {layer}: its layers are 0 to {handle.n_layers - 1}.")
    return chosen


def _equal(handle: Handle, clean: Clean) -> tuple[bool, bool]:
    """Whether swapping all with itself, and all with the donor, gives the clean runs bit for bit (same shapes)."""
    everything = range(clean.stale.n_tokens)
    own = continue_from(handle, swap(clean.stale, clean.stale, everything), clean.last)[0, -1]
    other = continue_from(handle, swap(clean.stale, clean.donor, everything), clean.last)[0, -1]
    return torch.equal(own, clean.old), torch.equal(other, clean.new)


def _ladder(config: SwapConfig, pair: Pair, where: Sequence[int], alone: np.ndarray) -> list[_Step]:
    """The steps; `alone` [position] is the recovery of each position of `where`."""
    steps = [_Step("field", "the field", pair.field), _Step("downstream", "all behind it", pair.downstream)]
    behind = pair.n_editable
    steps += [_Step("last", f"last {k}", tuple(range(behind - k, behind))) for k in config.last if k <= behind]
    ranked = [where[n] for n in np.argsort(-np.nan_to_num(alone), kind="stable")]
    steps += [_Step("best", f"best {k}", tuple(sorted(ranked[:k]))) for k in config.best if k <= len(where)]
    rng = np.random.default_rng(config.seed)
    for k in config.random:
        for draw in range(config.draws if k <= len(pair.downstream) else 0):
            drawn = tuple(sorted(rng.choice(np.array(pair.downstream), size=k, replace=False).tolist()))
            steps.append(_Step("random", f"random {k}", drawn, draw))
    steps.append(_Step("all", "all", tuple(range(pair.n_editable))))
    return [*steps, _Step("self", "none", ())]


def _said(pair: Pair, found: Oracle, got: Effects) -> str:
    """What the first two steps show; only where the model is right about both clean prompts."""
    if not found.both:
        return oracle_sentence(pair, found)
    field, behind = got.recovery[:2].tolist()
    flips = ["changes" if flip else "does not change" for flip in got.flip[:2]]
    held = "more in the field itself" if field > behind else "more in what stands behind the field"
    return (
        f"The field alone recovers {field:.0%} of the change and {flips[0]} the answer; everything behind it recovers "
        f"{behind:.0%} and {flips[1]} it: here the answer is read {held}."
    )
