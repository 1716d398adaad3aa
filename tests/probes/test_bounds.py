"""Numbers that cannot be: every result of every probe keeps to the bounds of what its figures are."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engram_lab.lab.ask import brief
from engram_lab.lab.fronts import FRONTS, front
from engram_lab.models.errors import LabError
from engram_lab.models.handle import Handle
from engram_lab.probes import module_of
from engram_lab.probes.base import Record, held_by

SLACK = 1e-5  # what sums of float32 leave
COSINES = ("cka", "biased", "cosine", "cos_", "correlation", "rank_correlation")
SHARES = ("top1", "top5", "coverage", "efficacy", "specificity")


def records(record: Record, path: str = "") -> Iterator[tuple[str, Record]]:
    """A record and all inside it, each with its path."""
    yield path, record
    for item in dataclasses.fields(record):
        value = getattr(record, item.name)
        for n, inner in enumerate(value if isinstance(value, tuple) else (value,)):
            if isinstance(inner, Record):
                yield from records(inner, f"{path}.{item.name}[{n}]")


def numbers(value: Any) -> np.ndarray | None:
    """The finite numbers of a field, or None where it holds none."""
    if isinstance(value, bool | str) or value is None:
        return None
    array = np.asarray(value) if isinstance(value, np.ndarray | int | float) else None
    if array is None or array.dtype.kind not in "fiu":
        return None
    flat = array.astype(np.float64).ravel()
    assert not np.isinf(flat).any(), "infinity is no figure"
    return flat[~np.isnan(flat)]


def impossible(result: Record, vocab: int) -> list[str]:
    """What of a result lies outside of what its kind of figure can be."""
    found = []
    for path, record in records(result):
        if "difference" in path:  # of two figures
            continue
        held = held_by(type(record))
        for name, array in held.items():
            value = getattr(record, name)
            flat = numbers(value)
            if flat is None or not len(flat):
                continue
            where = f"{path}.{name}: {flat.min():.6g} to {flat.max():.6g}"
            base = name.removesuffix("_low").removesuffix("_high")
            share = array.unit == "probability" or base.startswith(SHARES) or array.unit.startswith("share of items")
            if share and (flat.min() < -SLACK or flat.max() > 1 + SLACK):
                found.append(where)
            if base.startswith(COSINES) and (flat.min() < -1 - SLACK or flat.max() > 1 + SLACK):
                found.append(where)
            if (base == "kl" or base.endswith("_kl")) and "change" not in base and flat.min() < -SLACK:
                found.append(where)
            if base.startswith("entropy") and (flat.min() < -SLACK or flat.max() > math.log(vocab) + SLACK):
                found.append(where)
            if base.endswith("loss") and flat.min() < -SLACK:
                found.append(where)
            if array.unit == "nats" and base.startswith("gate"):
                found.append(where)
            low, high = (getattr(record, f"{name}{end}", None) for end in ("_low", "_high"))
            if low is not None and high is not None:
                middle = np.asarray(value, dtype=np.float64)
                with np.errstate(invalid="ignore"):
                    outside = (np.asarray(low) > middle + 1e-12) | (np.asarray(high) < middle - 1e-12)
                if outside.any():
                    found.append(f"{path}.{name} outside of its interval")
    return found


def vocab_of(pair: list[Handle]) -> int:
    return max(handle.vocab_size for handle in pair)


def requests(probe: str, seed: int) -> Iterator[Record]:
    """The front's example, and the same with other seeds, few resamples and few texts, as far as it has them."""
    example = front(probe).example("engram-mini", "dense-mini")
    if "target" in vars(example):  # which is no token of the tiny models
        example = dataclasses.replace(example, target=None)
    if "lengths" in vars(example):  # of more tokens than they take
        example = dataclasses.replace(example, lengths=(2, 5), answers=())
    draw = random.Random(f"{probe}{seed}")
    yield example
    for _ in range(0 if probe == "facts alternatives" else 2):  # which trains adapters
        fields = vars(example)
        changes: dict[str, Any] = {}
        if "seed" in fields:
            changes["seed"] = draw.randrange(2**31)
        if "bootstrap" in fields:
            changes["bootstrap"] = draw.choice((2, 5, 30))
        for name in ("prompts", "unrelated", "texts", "text"):
            if len(fields.get(name) or ()) > 1:
                texts = tuple(draw.choices(fields[name], k=len(fields[name])))  # some of them twice
                if name != "unrelated":
                    changes[name] = texts
        try:
            yield dataclasses.replace(example, **changes)
        except LabError:
            continue


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that fits the tiny models' context."""
    monkeypatch.setattr(brief, "PROMPT", "The river runs past the old mill.")
    monkeypatch.setattr(brief, "SENTENCES", tuple(f"The river runs {n} times past the old mill" for n in range(7)))


@pytest.mark.parametrize("probe", FRONTS)
def test_every_figure_is_one_that_can_be(probe: str, pair: list[Handle]) -> None:
    by_name = {handle.name: handle for handle in pair}
    served = 0
    for config in requests(probe, 0):
        handles = [by_name[name] for name in config.models]  # type: ignore[attr-defined]
        try:
            report = module_of(probe).run(handles, config)
        except LabError:
            continue
        served += 1
        assert impossible(report.result, vocab_of(pair)) == []
    assert served


def test_what_cannot_be_is_found(pair: list[Handle]) -> None:
    """The checks themselves see a figure that is off."""
    report = module_of("lens").run(pair, next(requests("lens", 0)))
    first = report.result.models[0]
    for name, value in (("kl", -0.1), ("entropy", 99.0), ("next_token_loss", -1.0)):
        bad = getattr(first, name).copy()
        bad.flat[0] = value
        models = (dataclasses.replace(first, **{name: bad}), *report.result.models[1:])
        found = impossible(dataclasses.replace(report.result, models=models), vocab_of(pair))
        assert len(found) == 1 and name in found[0]
