"""Where a cache holds the answer: recovery of each position x group of layers, swapped alone.

Axes: group (of layers, from the first), position (all that an edit can reach). Every cell is one edit; as many as the
memory budget takes run in one forward. Cells at which the two caches are equal, as before the field, change nothing
and are not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np

from engram_lab.models.errors import LabError
from engram_lab.models.handle import Handle
from engram_lab.models.kv import KVEdit
from engram_lab.models.kv_runs import check_kv, check_parts
from engram_lab.probes.base import Array, Progress, Protocol, Record, Report, only, role
from engram_lab.probes.kv.effects import (
    Oracle,
    differing,
    edited,
    effects,
    oracle,
    oracle_sentence,
    rows_at_once,
    run_clean,
)
from engram_lab.probes.kv.scenario import Pair, Scenario, prepare
from engram_lab.probes.kv.swap import check_request


@dataclass(frozen=True, eq=False)
class MapConfig(Record):
    """A request: one model, a scenario, the number of layer groups (0: each layer by itself), what is swapped."""

    models: tuple[str, ...]
    scenario: Scenario
    groups: int = 0
    part: str = "kv"
    align: str = "refuse"
    seed: int = 0  # nothing is drawn

    def __post_init__(self) -> None:
        check_request(self.models, self.align, self.part)
        if self.groups < 0:
            raise LabError("The number of layer groups must be 0, for each layer by itself, or more.")


@dataclass(frozen=True, eq=False)
class MapResult(Record):
    """The map; DEFINITIONS of its front says what each figure is."""

    name: str
    pair: Pair
    oracle: Oracle
    said: str = field(metadata=role("prose"))
    groups: tuple[tuple[int, ...], ...] = field(metadata=role("name"))  # [group] blocks
    group_names: tuple[str, ...]
    recovery: Annotated[np.ndarray, Array("group", "position", unit="share", dtype="float64")]
    flip: Annotated[np.ndarray, Array("group", "position", dtype="bool")]
    kl: Annotated[np.ndarray, Array("group", "position", unit="nats", dtype="float64")]
    differs: Annotated[np.ndarray, Array("position", dtype="bool")]  # whether the caches do; the others were not run
    n_forwards: int
    digests: tuple[str, str] = field(metadata=role("hash"))


CONFIG, RESULT = MapConfig, MapResult


def run(handles: Sequence[Handle], config: MapConfig, progress: Progress | None = None) -> Report[MapConfig, MapResult]:
    """The map of one scenario: recovery [group of layers, pos] of one position swapped in some layers alone.

    All that cannot be served is refused before the first forward, as a LabError.

        >>> cards = Scenario("Paris is the {field} of France.\\nTokyo is the old", "capital", "river", " mill", " sea")
        >>> report = run([handle], MapConfig((handle.name,), cards, align="split"))
        >>> report.probe
        'kv map'
    """
    handle = only(handles)
    pair = prepare(handle, config.scenario, config.align)
    groups = layer_groups(handle.n_layers, config.groups)
    check_kv(handle)
    if config.part != "kv":
        check_parts(handle)
    clean = run_clean(handle, pair)
    found = oracle(handle, pair, clean)
    where = list(differing(clean))
    edits = [KVEdit((p,), group, config.part) for group in groups for p in where]
    got = effects(edited(handle, clean, edits, progress, f"{len(edits)} cells"), pair, clean, clean.new)
    clean.check()
    shape = (len(groups), pair.n_editable)

    def spread(values: np.ndarray, elsewhere: float | bool) -> np.ndarray:
        """[group, position] of values [variant]."""
        full = np.full(shape, elsewhere, dtype=values.dtype)
        full[:, where] = values.reshape(len(groups), len(where))
        return full

    names = tuple(str(g[0]) if len(g) == 1 else f"{g[0]} to {g[-1]}" for g in groups)
    recovery = spread(got.recovery, np.nan if np.isnan(got.recovery).all() else 0.0)
    result = MapResult(
        name=handle.name,
        pair=pair,
        oracle=found,
        said=_said(pair, found, recovery, names),
        groups=groups,
        group_names=names,
        recovery=recovery,
        flip=spread(got.flip, False),
        kl=spread(got.kl, found.kl),
        differs=np.isin(np.arange(pair.n_editable), where),
        n_forwards=-(-len(edits) // rows_at_once(clean)),
        digests=clean.digests,
    )
    return Report("kv map", config, Protocol.of(handles, [[pair.ids_old, pair.ids_new]], config.seed), result)


def layer_groups(n_layers: int, groups: int) -> tuple[tuple[int, ...], ...]:
    """Neighbouring layers in groups whose sizes differ by one at most; each by itself for 0."""
    if groups > n_layers:
        raise LabError(f"There are {n_layers} layers, which cannot make {groups} groups: ask for fewer.")
    return tuple(tuple(part.tolist()) for part in np.array_split(np.arange(n_layers), groups or n_layers))


def _said(pair: Pair, found: Oracle, recovery: np.ndarray, names: Sequence[str]) -> str:
    """The cell that recovers most; only where the model is right about both clean prompts."""
    if not found.both:
        return oracle_sentence(pair, found)
    group, position = map(int, np.unravel_index(int(np.nanargmax(recovery)), recovery.shape))
    inside = "in the field" if position in pair.field else "behind the field" if position in pair.downstream else ""
    return (
        f'The one cell that recovers most is position {position} ("{pair.token_texts_old[position]}", {inside}) in '
        f"layer {names[group]}: {recovery[group, position]:.0%} of the change."
    )
