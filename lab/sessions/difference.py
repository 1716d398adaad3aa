"""Two runs of one probe as a figure of their difference and a table of their single numbers; no Streamlit here.

All differences are B - A. A figure shows an array of the results over its own axes, named as the result names them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from engram_lab.lab.draw import labels
from engram_lab.lab.draw.figure import titled
from engram_lab.lab.draw.theme import MONO, PALETTES, Mode, diverging
from engram_lab.lab.fronts import front
from engram_lab.lab.sessions.compare import ENTRY, Field, fields
from engram_lab.models.errors import LabError
from engram_lab.probes.base import Record, Report

# Ends of intervals and spreads, of which a difference says little: offered last.
_EDGES = ("_low", "_high", "_sd", "_p10", "_p90", "_expected")
# Axis -> what names its entries, in the record of the array or one around it.
_NAMED_BY: dict[str, tuple[str, ...]] = {
    "layer": ("layers", "layer_names"),
    "lens_layer": ("layer_names",),
    "pos": ("token_texts",),
    "item": ("prompts",),
    "scenario": ("ids",),
    "kind": ("kinds", "kind_names"),
    "variant": ("names", "variants", "sources"),
    "policy": ("thresholds",),
    "step": ("values",),
}
_IN_ORDER = {
    "layer", "lens_layer", "layer_a", "layer_b", "block", "group", "pos", "position", "step", "distance", "length",
    "size", "bin", "shared", "quantile",
}  # fmt: skip
_WORDS = {
    "pos": "position", "lens_layer": "layer", "layer_a": "layer of the first model",
    "layer_b": "layer of the second model", "group": "layers", ENTRY: "entry",
}  # fmt: skip
_SHORT = {"kl": "KL", "cka": "CKA", "prob": "probability"}
_FOLDED = ("k", "quantile", "branch", "head", "order")  # the first axes to go where there are more than two
MOST_TICKS = 32


def measures(a: Report, b: Report) -> list[str]:
    """Paths of the arrays whose difference can be drawn, what the probe is about first; LabError for two probes."""
    found = [own.path for own in fields(a, b) if own.reason is None and own.axes and own.axes != (ENTRY,)]
    best = front(a.probe).COMPARED  # paths without indices, what the probe is about first; the others come after

    def place(path: str) -> tuple[int, int]:
        plain = re.sub(r"\[[^\]]*\]", "", path)
        return best.index(plain) if plain in best else len(best), int(plain.endswith(_EDGES))

    return sorted(found, key=place)  # stable: else in the order of the result


def refused(a: Report, b: Report) -> dict[str, str]:
    """Path -> why, for arrays of amounts whose difference cannot be drawn."""
    return {
        own.path: own.reason
        for own in fields(a, b)
        if own.reason is not None and own.kind != "text" and own.axes and own.axes != (ENTRY,) and not own.is_name
    }


def label(a: Report, b: Report, path: str) -> str:
    """A path in words: what it is, and of what where the result has several."""
    return _label(_field(a, b, path))


def settings(a: Report, b: Report) -> list[str]:
    """The fields of the request, and "weights" and "token ids", in which two runs differ."""
    one, other = a.config.to_dict(), b.config.to_dict()
    found = [name.replace("_", " ") for name in one if one[name] != other.get(name)]
    prints = [tuple(model.fingerprint for model in own.protocol.models) for own in (a, b)]
    found += ["weights"] if prints[0] != prints[1] else []
    return found + (["token ids"] if a.protocol.prompt_ids != b.protocol.prompt_ids else [])


def scalars(a: Report, b: Report) -> pd.DataFrame:
    """The single numbers of the results, one a row: field, A, B, B - A; NaN where a run has none."""
    rows = []
    for own in fields(a, b):
        if own.kind == "text" or own.is_name or own.axes not in ((), (ENTRY,)):
            continue
        sides = [np.empty(0) if side is None else side.astype(float).ravel() for side in (own.a, own.b)]
        for n in range(max(side.size for side in sides)):
            one, other = (float(side[n]) if n < side.size else np.nan for side in sides)
            name = f"{own.path}[{n}]" if own.axes else own.path
            rows.append({"field": name, "A": one, "B": other, "B - A": other - one})
    return pd.DataFrame(rows, columns=["field", "A", "B", "B - A"])


def difference(a: Report, b: Report, path: str, mode: Mode = "light") -> go.Figure:
    """B - A of one array: over one axis as a line or bars, over two as a heat map centred on no difference.

    Axes of one entry are left out. Of more than two, the first of _FOLDED go: each cell shows the difference that is
    largest in size along them, which the title says. LabError for a path that `measures` does not offer.
    """
    field = _field(a, b, path)
    if field.reason is not None or not field.axes:
        raise LabError(f"There is no difference of {path} to draw: {field.reason or 'it is a single number'}.")
    assert field.a is not None and field.b is not None
    values = [side.astype(float) for side in (field.a, field.b)]
    gap = values[1] - values[0]
    names = {axis: (_names(a, field.records_a, axis, n), _names(b, field.records_b, axis, n))
             for axis, n in zip(field.axes, gap.shape, strict=True)}  # fmt: skip
    axes, (gap, *values), folded, only = _fold(field.axes, (gap, *values))
    title = f"{_label(field)}: B minus A"
    if folded:
        title += f"; in each cell the largest along {' and '.join(_words(axis) for axis in folded)}"
    figure = titled(
        mode,
        title,
        _subtitle(a, b, field, gap, axes, names, only),
        420 if len(axes) == 1 else 190 + 26 * min(max(gap.shape[0], 5), 40),
        margin={"l": 70, "r": 96, "t": 100, "b": 64},
        showlegend=False,
    )
    (_one if len(axes) == 1 else _two)(figure, mode, field, gap, values, axes, names)
    return figure


Names = dict[str, tuple[list[str], list[str]]]  # axis -> names of its entries in A, in B


def _field(a: Report, b: Report, path: str) -> Field:
    for own in fields(a, b):
        if own.path == path:
            return own
    raise LabError(f'A result of "{a.probe}" has no field {path}.')


def _label(field: Field) -> str:
    """The path in words; an entry of a list by its name, such as the model's or the control's, if it has one."""
    owners = [_owner(own) for own in (field.records_a, field.records_b)]
    words = []
    for part in field.path.split("."):
        name, bracket, index = part.partition("[")
        if not bracket:
            words += [_SHORT.get(word, word) for word in name.split("_")]
        elif not any(owners):
            words.append(f"{name} {index.rstrip(']')}")
    said = labels.plotly(" ".join(words))
    said = said[:1].upper() + said[1:]
    if "[" in field.path and any(owners):
        said += f", {labels.plotly(owners[0] if owners[0] == owners[1] else f'{owners[0]} in A, {owners[1]} in B')}"
    return said


def _owner(records: Sequence[Record]) -> str:
    """The name of the innermost record that has one, the result itself left out."""
    return next(
        (str(getattr(own, key)) for own in records[:-1] for key in ("name", "control") if hasattr(own, key)), ""
    )


def _words(axis: str) -> str:
    return _WORDS.get(axis, axis.replace("_", " "))


def _names(report: Report, records: Sequence[Record], axis: str, size: int) -> list[str]:
    """Names of the entries of an axis, else their numbers."""
    if axis == "fact" and len(getattr(report.config, "facts", ())) == size:
        return [own.trigger for own in report.config.facts]
    if axis == "position":  # of a cache that both prompts share
        pair = next((own.pair for own in records if hasattr(own, "pair")), None)
        own_places = getattr(records[0], "position", None)
        at = own_places.tolist() if isinstance(own_places, np.ndarray) else range(size)
        return [f"{p} {_token(pair.token_texts_old[p])}" if pair is not None else str(p) for p in at]
    for record in records:
        for key in _NAMED_BY.get(axis, (f"{axis}_names", f"{axis}s", f"{axis[:-2]}s{axis[-2:]}")):
            found = getattr(record, key, None)
            if found is not None and len(found) == size:
                texts = [str(item) for item in found]
                return [f"{n} {_token(text)}" for n, text in enumerate(texts)] if axis == "pos" else texts
    return [str(n) for n in range(size)]


def _token(text: str) -> str:
    return labels.label(text.encode())


def _fold(
    axes: tuple[str, ...], arrays: tuple[np.ndarray, ...]
) -> tuple[tuple[str, ...], list[np.ndarray], list[str], dict[str, int]]:
    """(axes left, arrays over them, axes folded, axes of one entry) with at most two axes left.

    The first array says which entry stands for the others: that of the largest size.
    """
    only: dict[str, int] = {}
    found = list(arrays)
    left = list(axes)
    for axis in axes:
        if len(left) > 1 and found[0].shape[left.index(axis)] == 1:
            found = [np.take(own, 0, left.index(axis)) for own in found]
            left.remove(axis)
            only[axis] = 0
    folded = []
    while len(left) > 2:
        axis = next((name for name in _FOLDED if name in left), left[0])
        at = left.index(axis)
        size = np.abs(found[0])
        best = np.expand_dims(np.where(np.isnan(size), -1.0, size).argmax(at), at)
        found = [np.take_along_axis(own, best, at).squeeze(at) for own in found]
        left.remove(axis)
        folded.append(axis)
    return tuple(left), found, folded, only


def _subtitle(
    a: Report, b: Report, field: Field, gap: np.ndarray, axes: tuple[str, ...], names: Names, only: dict[str, int]
) -> str:
    """Where the largest difference is, and how the runs differ."""
    unit = f" {field.unit}" if field.unit else ""
    if np.isnan(gap).all():
        first = "no place where both runs have a value"
    elif not np.nanmax(np.abs(gap)):
        first = "no difference anywhere"
    else:
        at = np.unravel_index(int(np.nanargmax(np.abs(gap))), gap.shape)
        place = ", ".join(f"{_words(axis)} {labels.short(names[axis][0][n], 24)}"
                          for axis, n in zip(axes, at, strict=True))  # fmt: skip
        first = f"largest: {gap[at]:+.4g}{unit} at {labels.plotly(place)}"
    if missing := int(np.isnan(gap).sum()):
        first += f"; blank: {missing} of {gap.size} have no value in A or in B"
    fixed = "".join(f"; {_words(axis)} {labels.plotly(names[axis][0][n])}" for axis, n in only.items())
    models = [" and ".join(model.name for model in own.protocol.models) for own in (a, b)]
    who = models[0] if models[0] == models[1] else f"A: {models[0]}, B: {models[1]}"
    other = settings(a, b)
    second = (
        f"{labels.plotly(who)}; the runs differ in: {', '.join(other)}"
        if other
        else f"{labels.plotly(who)}; one request"
    )
    return f"{first}{fixed}<br>{second}"


def _title(field: Field) -> str:
    return f"B − A{f', {field.unit}' if field.unit else ''}"


def _hover(field: Field, places: Sequence[tuple[str, int]], names: Names, gap: float, a: float, b: float) -> str:
    unit = f" {field.unit}" if field.unit else ""
    lines = []
    for axis, n in places:
        one, other = (own[n] for own in names[axis])
        lines.append(f"{_words(axis)} {one}" if one == other else f"{_words(axis)} {one} in A, {other} in B")
    where = "<br>".join(labels.plotly(line) for line in lines)
    return f"<b>{where}</b><br>B − A {gap:+.6g}{unit}<br>A {a:.6g}, B {b:.6g}"


def _ticks(axis: str, names: Names) -> dict[str, Any]:
    """Ticks with A's names, those of B on hover where they differ; so many that they can be read."""
    mine, others = names[axis]
    at = list(range(0, len(mine), -(-len(mine) // MOST_TICKS)))
    # Of so many tokens a few say nothing: their numbers do.
    shown = [str(n) for n in range(len(mine))] if axis == "pos" and len(at) < len(mine) else mine
    return {
        "title_text": _words(axis) + ("" if mine == others else " (as A names it)"),
        "tickvals": at,
        "ticktext": [labels.plotly(labels.short(shown[n], 16)) for n in at],
        "showgrid": False,
    }


def _one(
    figure: go.Figure, mode: Mode, field: Field, gap: np.ndarray, values: Sequence[np.ndarray],
    axes: tuple[str, ...], names: Names,
) -> None:  # fmt: skip
    (axis,), palette = axes, PALETTES[mode]
    x = list(range(len(gap)))
    colours = [palette.series[int(value > 0)] for value in gap]
    hover = [_hover(field, [(axis, n)], names, gap[n], values[0][n], values[1][n]) for n in x]
    common = {"x": x, "y": gap, "hovertext": hover, "hoverinfo": "text", "name": "B − A"}
    figure.add_hline(y=0, line={"color": palette.quiet, "width": 1, "dash": "dot"})
    if axis in _IN_ORDER:
        line = {"color": palette.quiet, "width": 2}
        figure.add_scatter(mode="lines+markers", line=line, marker={"size": 8, "color": colours}, **common)
    else:
        figure.add_bar(marker={"color": colours}, **common)
    figure.update_xaxes(**_ticks(axis, names), range=[-0.6, len(x) - 0.4])
    figure.update_yaxes(title_text=_title(field))


def _two(
    figure: go.Figure, mode: Mode, field: Field, gap: np.ndarray, values: Sequence[np.ndarray],
    axes: tuple[str, ...], names: Names,
) -> None:  # fmt: skip
    if axes == ("layer_a", "layer_b"):  # as on the map of CKA
        gap, *values = (own.T for own in (gap, *values))
        axes = axes[::-1]
    down, along = axes
    most = float(np.nanmax(np.abs(gap), initial=0.0)) if not np.isnan(gap).all() else 0.0
    cells = [
        [
            _hover(field, [(down, y), (along, x)], names, gap[y, x], values[0][y, x], values[1][y, x])
            for x in range(gap.shape[1])
        ]
        for y in range(gap.shape[0])
    ]
    figure.add_heatmap(
        z=gap,
        hovertext=cells,
        hoverinfo="text",
        colorscale=diverging(mode),
        zmid=0,
        zmin=-(most or 1.0),
        zmax=most or 1.0,
        xgap=1 if gap.shape[1] <= MOST_TICKS else 0,
        ygap=1 if gap.shape[0] <= MOST_TICKS else 0,
        name="B − A",
        colorbar={"title": {"text": _title(field), "side": "top"}, "thickness": 10, "outlinewidth": 0},
    )
    figure.update_xaxes(**_ticks(along, names), tickfont={"family": MONO, "size": 11})
    figure.update_yaxes(**_ticks(down, names))
    if down not in _IN_ORDER:  # rows of a table, the first on top
        figure.update_yaxes(autorange="reversed")
