"""A library of scenarios: for which kind of question the answer is read from the field, and for which behind it.

Axes: scenario, edit (EDITS), kind (the last is all of them). A scenario whose values cannot be aligned, or that the
model gets wrong in one of the clean prompts, has its reason and is left out of every mean. What decides is the
contrast: recovery of the field alone minus that of everything behind it, with an interval over scenarios.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np

from engram_lab.models.errors import DataError, LabError
from engram_lab.models.handle import Handle
from engram_lab.models.kv import KVEdit, blank_each
from engram_lab.models.kv_runs import check_kv, continue_from
from engram_lab.probes.base import Array, Progress, Protocol, Record, Report, check_seed, only, role
from engram_lab.probes.kv.effects import edited, effects, oracle, oracle_sentence, run_clean
from engram_lab.probes.kv.knockout import answer_kept, notes
from engram_lab.probes.kv.scenario import Pair, Scenario, prepare
from engram_lab.probes.kv.swap import check_request
from engram_lab.probes.stats import draws, percentiles, ratio

# Of the new prompt's cache swapped in, and of the old prompt's cleared.
EDITS = ("field", "downstream", "notes", "notes zero", "downstream zero", "notes mean")
SWAPS = EDITS[:3]
ALL = "all kinds"
FEWEST = 3  # scenarios for a word on a kind


@dataclass(frozen=True, eq=False)
class SetConfig(Record):
    """A request: one model and scenarios; `seed` draws the `bootstrap` resamples. Raises LabError."""

    models: tuple[str, ...]
    scenarios: tuple[Scenario, ...]
    align: str = "refuse"
    seed: int = 0
    bootstrap: int = 1000

    def __post_init__(self) -> None:
        check_request(self.models, self.align)
        if not self.scenarios:
            raise DataError("No scenario was given: give at least one.")
        if len({scenario.id for scenario in self.scenarios}) < len(self.scenarios):
            raise DataError("Two scenarios have the same id: give each its own.")
        check_seed(self.seed, self.bootstrap)


@dataclass(frozen=True, eq=False)
class SetResult(Record):
    """DEFINITIONS of its front says what each figure is; NaN where there is none."""

    name: str
    edits: tuple[str, ...]
    ids: tuple[str, ...]  # [scenario]
    kinds: tuple[str, ...]  # [scenario]
    reasons: tuple[str, ...]  # [scenario] why it is left out, else ""
    served: Annotated[np.ndarray, Array("scenario", dtype="bool")]  # the tokens could be aligned
    right: Annotated[np.ndarray, Array("scenario", dtype="bool")]  # and both clean prompts are answered right
    field_tokens: Annotated[np.ndarray, Array("scenario", dtype="int64")]
    note_tokens: Annotated[np.ndarray, Array("scenario", dtype="int64")]
    n_tokens: Annotated[np.ndarray, Array("scenario", dtype="int64")]
    score_old: Annotated[np.ndarray, Array("scenario", unit="logits", dtype="float64")]
    score_new: Annotated[np.ndarray, Array("scenario", unit="logits", dtype="float64")]
    recovery: Annotated[np.ndarray, Array("scenario", "edit", unit="share", dtype="float64")]
    flip: Annotated[np.ndarray, Array("scenario", "edit", dtype="float64")]  # 1 yes, 0 no
    kind_names: tuple[str, ...]  # [kind]
    n_scenarios: Annotated[np.ndarray, Array("kind", dtype="int64")]
    n_served: Annotated[np.ndarray, Array("kind", dtype="int64")]
    n_right: Annotated[np.ndarray, Array("kind", dtype="int64")]
    mean: Annotated[np.ndarray, Array("kind", "edit", unit="share", dtype="float64")]  # of the recovery
    mean_low: Annotated[np.ndarray, Array("kind", "edit", unit="share", dtype="float64")]
    mean_high: Annotated[np.ndarray, Array("kind", "edit", unit="share", dtype="float64")]
    flips: Annotated[np.ndarray, Array("kind", "edit", unit="share", dtype="float64")]
    contrast: Annotated[np.ndarray, Array("kind", unit="share", dtype="float64")]
    contrast_low: Annotated[np.ndarray, Array("kind", unit="share", dtype="float64")]
    contrast_high: Annotated[np.ndarray, Array("kind", unit="share", dtype="float64")]
    said: tuple[str, ...] = field(metadata=role("prose"))  # [kind]


CONFIG, RESULT = SetConfig, SetResult


@dataclass(frozen=True)
class _Row:
    """One scenario."""

    reason: str = ""
    served: bool = False
    right: bool = False
    tokens: tuple[int, int, int] = (0, 0, 0)  # of the field, notes, all
    scores: tuple[float, float] = (np.nan, np.nan)
    recovery: tuple[float, ...] = (np.nan,) * len(EDITS)
    flip: tuple[float, ...] = (np.nan,) * len(EDITS)


def run(handles: Sequence[Handle], config: SetConfig, progress: Progress | None = None) -> Report[SetConfig, SetResult]:
    """Every scenario by itself: recovery [scenario, edit], and means with intervals [kind, edit].

    One that cannot be served becomes a row with the reason; DataError where none can.

        >>> cards = Scenario("Paris is the {field} of France.\\nTokyo is the old", "capital", "river", " mill", " sea")
        >>> report = run([handle], SetConfig((handle.name,), (cards,), "split", bootstrap=9))
        >>> report.result.recovery.shape == (1, len(report.result.edits))
        True
    """
    handle = only(handles)
    pairs: list[Pair | str] = []
    for scenario in config.scenarios:
        try:
            pairs.append(prepare(handle, scenario, config.align))
        except LabError as error:
            pairs.append(str(error))
    if all(isinstance(pair, str) for pair in pairs):
        raise DataError(f"None of the {len(pairs)} scenarios can be run on {handle.name}; the first: {pairs[0]}")
    rows = []
    check_kv(handle)
    for n, (scenario, pair) in enumerate(zip(config.scenarios, pairs, strict=True)):
        if progress is not None:
            progress(n / len(pairs), f"scenario {scenario.id}")
        rows.append(_Row(pair) if isinstance(pair, str) else _row(handle, pair))
    prompt_ids = [[ids for pair in pairs if not isinstance(pair, str) for ids in (pair.ids_old, pair.ids_new)]]
    return Report("kv set", config, Protocol.of(handles, prompt_ids, config.seed), _result(handle.name, config, rows))


def _row(handle: Handle, pair: Pair) -> _Row:
    clean = run_clean(handle, pair)
    found = oracle(handle, pair, clean)
    signs = notes(handle, pair)
    swapped = [KVEdit(positions) for positions in (pair.field, pair.downstream, signs)]
    batches = list(edited(handle, clean, swapped))
    for how, cleared in (("zero", (signs, pair.downstream)), ("mean", (signs,))):
        batch = blank_each(clean.stale, [KVEdit(positions) for positions in cleared], how)
        batches.append(continue_from(handle, batch, clean.last)[:, -1])
    got = effects(batches, pair, clean, clean.new)
    clean.check()
    recovery, flip = got.recovery.copy(), got.flip.astype(np.float64)
    flip[len(SWAPS) :] = ~answer_kept(pair, found, got)[len(SWAPS) :]
    recovery[len(SWAPS) :] = np.nan
    for n, positions in enumerate((pair.field, pair.downstream, signs, signs, pair.downstream, signs)):
        if not positions:
            recovery[n] = flip[n] = np.nan
    return _Row(
        reason="" if found.both else oracle_sentence(pair, found),
        served=True,
        right=found.both,
        tokens=(len(pair.field), len(signs), pair.n_tokens),
        scores=found.score,
        recovery=tuple(recovery.tolist()),
        flip=tuple(flip.tolist()),
    )


def _result(name: str, config: SetConfig, rows: Sequence[_Row]) -> SetResult:
    kinds = np.array([scenario.kind for scenario in config.scenarios])
    served, right = (np.array([getattr(row, field) for row in rows]) for field in ("served", "right"))
    recovery, flip = (np.array([getattr(row, field) for row in rows]) for field in ("recovery", "flip"))
    names = (*dict.fromkeys(kinds.tolist()), ALL)
    rng = np.random.default_rng(config.seed)
    means, intervals, flips, contrasts = [], [], [], []
    of_kind = [*(kinds == kind for kind in names[:-1]), np.ones(len(rows), dtype=bool)]
    drawn_of: list[np.ndarray] = []  # for each kind [1 + resample, scenario], 0 for those of the others
    for mine in (members & right for members in of_kind):
        drawn_of.append(np.zeros((config.bootstrap + 1, len(rows))))
        equal = [replace(config.scenarios[n], id="") for n in np.flatnonzero(mine)]
        drawn = draws(equal, config.bootstrap, rng)
        drawn_of[-1][: len(drawn), mine] = drawn
    values = np.concatenate([recovery, recovery[:, :1] - recovery[:, 1:2]], axis=1)
    for drawn in drawn_of:
        averaged = _means(values, drawn)
        low, high = percentiles(averaged[1:], averaged[0])  # a row without a draw has no mean
        means.append(averaged[0, :-1])
        intervals.append((low[:-1], high[:-1]))
        contrasts.append((averaged[0, -1], low[-1], high[-1]))
        flips.append(_means(flip, drawn[:1])[0])
    tokens = np.array([row.tokens for row in rows], dtype=np.int64)
    scores = np.array([row.scores for row in rows], dtype=np.float64)
    contrast = np.array(contrasts)
    return SetResult(
        name=name,
        edits=EDITS,
        ids=tuple(scenario.id for scenario in config.scenarios),
        kinds=tuple(kinds.tolist()),
        reasons=tuple(row.reason for row in rows),
        served=served,
        right=right,
        field_tokens=tokens[:, 0].copy(),
        note_tokens=tokens[:, 1].copy(),
        n_tokens=tokens[:, 2].copy(),
        score_old=scores[:, 0].copy(),
        score_new=scores[:, 1].copy(),
        recovery=recovery,
        flip=flip,
        kind_names=names,
        n_scenarios=np.array([mine.sum() for mine in of_kind], dtype=np.int64),
        n_served=np.array([served[mine].sum() for mine in of_kind], dtype=np.int64),
        n_right=np.array([right[mine].sum() for mine in of_kind], dtype=np.int64),
        mean=np.array(means),
        mean_low=np.array([low for low, _ in intervals]),
        mean_high=np.array([high for _, high in intervals]),
        flips=np.array(flips),
        contrast=contrast[:, 0].copy(),
        contrast_low=contrast[:, 1].copy(),
        contrast_high=contrast[:, 2].copy(),
        said=tuple(_said(int(drawn[0].sum()), *row) for drawn, row in zip(drawn_of, contrast.tolist(), strict=True)),
    )


def _means(values: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """Weighted means [draw, column] of values [scenario, column], NaN left out."""
    there = ~np.isnan(values)
    return ratio(drawn @ np.where(there, values, 0.0), drawn @ there)


def _said(n: int, contrast: float, low: float, high: float) -> str:
    """Where the answer is read, by the interval of field minus downstream; the claim is that it is behind the field."""
    if n < FEWEST:
        return f"too few that the model gets right ({n})"
    if low > 0:
        return "read from the field"
    return "read behind the field" if high < 0 else "no clear difference"
