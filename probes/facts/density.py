"""How many facts a memory takes, and what two users on top of each other do.

Axes: size (facts written together), fact, user (of two). The facts are drawn into groups of each size, every fact in
one of them as far as they go; each group is written by itself. A fact has an alias in its group if another one there
has the same address and another answer: the two have one vector, and only the rest of the residual can tell them
apart. What else is not said was lost to interference: facts that share some rows, or that the writing could not reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np

from engram_lab.models.errors import DataError
from engram_lab.models.handle import Handle
from engram_lab.models.overlay import Overlay, Stack, prepare
from engram_lab.probes.base import Array, Progress, Protocol, Record, Report, only, part, role
from engram_lab.probes.facts.addresses import address_groups
from engram_lab.probes.facts.sets import (
    WRITING,
    Asked,
    Expected,
    StatedFact,
    Writing,
    ask,
    check_request,
    encoded,
    interval,
    recall_items,
    write,
)
from engram_lab.probes.facts.writing import encode_facts

SIZES = (1, 2, 5, 10, 20, 50)


@dataclass(frozen=True, eq=False)
class DensityConfig(Record):
    """A request: one model, facts, how many are written together, and whether two users are stacked. `seed` draws the
    groups and the resamples. Raises LabError."""

    models: tuple[str, ...]
    facts: tuple[StatedFact, ...]
    writing: Writing = WRITING
    sizes: tuple[int, ...] = SIZES
    stacks: bool = True
    seed: int = 0
    bootstrap: int = 1000

    def __post_init__(self) -> None:
        check_request(self.models, self.facts, self.seed, self.bootstrap)
        if not self.sizes or sorted(set(self.sizes)) != list(self.sizes) or self.sizes[0] < 1:
            raise DataError("The numbers of facts must be ascending, from 1 on, none twice.")
        if self.sizes[0] > len(self.facts):
            raise DataError(f"There are {len(self.facts)} facts, fewer than the {self.sizes[0]} to write together.")


@dataclass(frozen=True, eq=False)
class StackCase(Record):
    """Two users, top-1 [user] as shares of a user's facts. `stacked`: the second on top; `other_order`: the first."""

    name: str
    users: tuple[str, ...]
    n_facts: tuple[int, ...]
    conflicts: int
    conflicting_facts: int
    alone_top1: Annotated[np.ndarray, Array("user", unit="share", dtype="float64")]
    stacked_top1: Annotated[np.ndarray, Array("user", unit="share", dtype="float64")]
    other_order_top1: Annotated[np.ndarray, Array("user", unit="share", dtype="float64")]
    own_top1: Annotated[np.ndarray, Array("user", unit="share", dtype="float64")]


@dataclass(frozen=True, eq=False)
class DensityResult(Record):
    """DEFINITIONS of its front says what each figure is.

    Counts are summed over the groups of a size; NaN: in no group of it.
    """

    name: str
    layer: int = field(metadata=role("name"))
    sizes: tuple[int, ...] = field(metadata=role("name"))
    groups: Annotated[np.ndarray, Array("size", dtype="int64", role="name")]
    n_facts: Annotated[np.ndarray, Array("size", dtype="int64")]
    top1: Annotated[np.ndarray, Array("size", unit="share", dtype="float64")]
    top1_low: Annotated[np.ndarray, Array("size", unit="share", dtype="float64")]
    top1_high: Annotated[np.ndarray, Array("size", unit="share", dtype="float64")]
    top5: Annotated[np.ndarray, Array("size", unit="share", dtype="float64")]
    top5_low: Annotated[np.ndarray, Array("size", unit="share", dtype="float64")]
    top5_high: Annotated[np.ndarray, Array("size", unit="share", dtype="float64")]
    probability: Annotated[np.ndarray, Array("size", unit="probability", dtype="float64")]
    probability_low: Annotated[np.ndarray, Array("size", unit="probability", dtype="float64")]
    probability_high: Annotated[np.ndarray, Array("size", unit="probability", dtype="float64")]
    free: Annotated[np.ndarray, Array("size", unit="share", dtype="float64")]
    free_low: Annotated[np.ndarray, Array("size", unit="share", dtype="float64")]
    free_high: Annotated[np.ndarray, Array("size", unit="share", dtype="float64")]
    n_aliased: Annotated[np.ndarray, Array("size", dtype="int64")]
    lost_alias: Annotated[np.ndarray, Array("size", dtype="int64")]
    lost_other: Annotated[np.ndarray, Array("size", dtype="int64")]
    addresses: Annotated[np.ndarray, Array("size", dtype="int64")]
    rows: Annotated[np.ndarray, Array("size", dtype="int64")]
    shared_rows: Annotated[np.ndarray, Array("size", dtype="int64")]
    fact_probability: Annotated[np.ndarray, Array("size", "fact", unit="probability")]
    fact_top1: Annotated[np.ndarray, Array("size", "fact", dtype="float64")]
    fact_aliased: Annotated[np.ndarray, Array("size", "fact", dtype="float64")]
    stacks: tuple[StackCase, ...]


CONFIG, RESULT = DensityConfig, DensityResult


def run(
    handles: Sequence[Handle], config: DensityConfig, progress: Progress | None = None
) -> Report[DensityConfig, DensityResult]:
    """Write and ask every group of every size, then the stacks of two users: figures [size].

    Sizes beyond the number of facts are left out. LabError for facts that cannot be written.

        >>> facts = (StatedFact("The river runs past", " the sea"), StatedFact("Paris is the old", " mill"))
        >>> report = run([handle], DensityConfig((handle.name,), facts, sizes=(1, 2, 64), bootstrap=9))
        >>> report.result.sizes
        (1, 2)
    """
    handle = only(handles)
    encode_facts(handle, [own.fact for own in config.facts])  # refused as a whole, before anything is written
    n = len(config.facts)
    sizes = [size for size in config.sizes if size <= n]
    order = np.random.default_rng(config.seed).permutation(n)
    groups = {size: order[: n // size * size].reshape(-1, size).tolist() for size in sizes}
    # Each size writes about all facts once, and so does each user of a stack half of them.
    total = len(sizes) + (2 if config.stacks and n > 1 else 0)
    columns = []
    for done, size in enumerate(sizes):
        columns.append(_of_size(handle, config, groups[size], part(progress, done / total, (done + 1) / total)))
    stacks: tuple[StackCase, ...] = ()
    if config.stacks and n > 1:
        if progress is not None:
            progress(len(sizes) / total, "two users")
        stacks = _stacks(handle, config)
    layer = config.writing.layer if config.writing.layer is not None else handle.engram_layers[-1]
    fields = {name: np.array([column[name] for column in columns]) for name in columns[0]}
    result = DensityResult(name=handle.name, layer=layer, sizes=tuple(sizes), **fields, stacks=stacks)
    ids = [[prompt for prompt, _ in encoded(handle, recall_items(config.facts))]]
    return Report("facts density", config, Protocol.of(handles, ids, config.seed), result)


def _of_size(
    handle: Handle, config: DensityConfig, groups: Sequence[Sequence[int]], progress: Progress
) -> dict[str, Any]:
    """The figures of one size."""
    n = len(config.facts)
    probability, top1, top5, aliased = (np.full(n, np.nan) for _ in range(4))
    rows = shared = distinct = 0
    for done, group in enumerate(groups):
        progress(done / len(groups), f"{len(group)} fact{'s' * (len(group) > 1)} at a time")
        facts = [config.facts[i] for i in group]
        overlay, report = write(handle, facts, config.writing)
        asked = ask(handle, prepare(handle, overlay), recall_items(facts))
        probability[group], top1[group], top5[group] = asked.probability_after, asked.top1_after, asked.top5_after
        aliased[group] = 0
        aliased[[group[i] for alias in report.aliases for i in alias]] = 1
        rows, shared = rows + report.rows, shared + report.shared_rows
        distinct += len(address_groups(handle, report.layer, facts))
    known = ~np.isnan(top1)
    free = np.where(aliased == 0, top1, np.nan)
    figures: dict[str, Any] = {}
    for name, values in (("top1", top1), ("top5", top5), ("probability", probability), ("free", free)):
        mean, low, high = interval(np.arange(n), values, config.seed, config.bootstrap)
        figures |= {name: mean, f"{name}_low": low, f"{name}_high": high}
    return figures | {
        "groups": len(groups),
        "n_facts": int(known.sum()),
        "n_aliased": int((aliased == 1).sum()),
        "lost_alias": int(((top1 == 0) & (aliased == 1)).sum()),
        "lost_other": int(((top1 == 0) & (aliased == 0)).sum()),
        "addresses": distinct,
        "rows": rows,
        "shared_rows": shared,
        "fact_probability": probability.astype(np.float32),
        "fact_top1": top1,
        "fact_aliased": aliased,
    }


def _stacks(handle: Handle, config: DensityConfig) -> tuple[StackCase, ...]:
    """Two users with half of the facts each, and two who disagree about the first half."""
    half = len(config.facts) // 2
    first = config.facts[:half]
    # The answers of the first user's facts go round by one.
    turned = [own.answer for own in (*first[1:], first[0])]
    against = tuple(
        replace(own, answer=answer) for own, answer in zip(first, turned, strict=True) if answer != own.answer
    )
    cases = [("disjoint", first, config.facts[half:])]
    if against:
        cases.append(("overlapping", first, against))
    overlays: dict[tuple[Any, ...], Overlay] = {}

    def written(user: str, facts: Sequence[StatedFact]) -> Overlay:
        key = (user, *(own.fact for own in facts))
        if key not in overlays:
            overlays[key] = write(handle, facts, replace(config.writing, user=user))[0]
        return overlays[key]

    users, found = (config.writing.user, "another user"), []
    for name, mine, theirs in cases:
        both = [written(users[0], mine), written(users[1], theirs)]
        items = [recall_items(mine), recall_items(theirs)]
        stack, turned_stack = Stack(tuple(both)), Stack(tuple(reversed(both)))
        conflicts = stack.conflicts()
        found.append(
            StackCase(
                name=name,
                users=users,
                n_facts=(len(mine), len(theirs)),
                conflicts=len(conflicts),
                conflicting_facts=len({claim for conflict in conflicts for claim in conflict.claims}),
                alone_top1=_shares([ask(handle, prepare(handle, own), i) for own, i in zip(both, items, strict=True)]),
                stacked_top1=_shares([ask(handle, prepare(handle, stack), own) for own in items]),
                other_order_top1=_shares([ask(handle, prepare(handle, turned_stack), own) for own in items]),
                own_top1=_shares_of(handle, both, items),
            )
        )
    return tuple(found)


def _shares(asked: Sequence[Asked]) -> np.ndarray:
    return np.array([own.top1_after.mean() for own in asked])


def _shares_of(
    handle: Handle, overlays: Sequence[Overlay], items: Sequence[Sequence[tuple[int, Expected]]]
) -> np.ndarray:
    """Top-1 [user] in batches that hold both users' prompts, each with its own overlay."""
    each = [overlay for overlay, own in zip(overlays, items, strict=True) for _ in own]
    said = ask(handle, each, [item for own in items for item in own]).top1_after
    return np.array([part.mean() for part in np.split(said, [len(items[0])])])
