"""CKA figures and sentences against the report they show."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from engram_lab.lab.draw.figure import narrow
from engram_lab.lab.fronts import cka as front
from engram_lab.lab.fronts import cka_figures
from engram_lab.models.handle import Handle
from engram_lab.probes import cka
from engram_lab.probes.base import Report
from engram_lab.probes.cka import CKAConfig
from tests.models import tiny

TEXTS = (
    "The river runs past the old mill.", "Paris is the capital of France.", "past the old mill", "into the sea",
    "Tokyo", "the river and the sea",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(pair: list[Handle]) -> Report:
    return cka.run(pair, CKAConfig(("engram-mini", "dense-mini"), TEXTS, None, "all", bootstrap=50))


@pytest.fixture(scope="module")
def uneven(pair: list[Handle]) -> Report:
    """Against a model of another depth, whose name would be markup."""
    deep = Handle(tiny.make("llama", num_hidden_layers=20), tiny.byte_level(), "<b>$x$")
    return cka.run([pair[0], deep], CKAConfig(("engram-mini", "<b>$x$"), TEXTS[:1], None, "all"))


def trace(figure: go.Figure, name: str) -> Any:
    (found,) = [t for t in figure.data if t.name == name]
    return found


@pytest.mark.parametrize("biased", [False, True])
def test_the_map_shows_every_pair(made: Report, biased: bool) -> None:
    figure, result = cka_figures.cka_map(made, "light", biased), made.result
    cells = trace(figure, "CKA")
    values = result.biased if biased else result.cka
    assert np.array_equal(np.array(cells.z), values.T)
    assert list(cells.x) == list(cells.y) == [-1, 0, 1, 2]
    assert list(figure.layout.xaxis.ticktext) == ["embed", "0", "1", "2"]
    assert "engram-mini" in figure.layout.xaxis.title.text and "dense-mini" in figure.layout.yaxis.title.text
    hover = cells.hovertext[2][1]  # layer 1 of B, layer 0 of A
    assert "layer 0 of engram-mini" in hover and "layer 1 of dense-mini" in hover
    for value in (result.cka[1, 2], result.cka_low[1, 2], result.cka_high[1, 2], result.biased[1, 2]):
        assert f"{value:.6f}" in hover
    assert float(cells.text[2][1]) == round(values[1, 2], 2)
    assert ("biased" in figure.layout.title.text.replace("unbiased", "")) == biased
    assert f"{result.n_points} points of 6 sentences" in figure.layout.title.subtitle.text


def test_the_ridge_is_the_unbiased_one(made: Report) -> None:
    for biased in (False, True):
        figure = cka_figures.cka_map(made, "dark", biased)
        assert np.array_equal(trace(figure, "soft alignment").y, made.result.alignment_a)
        assert list(trace(figure, "best match").y) == [int(np.argmax(row)) - 1 for row in made.result.cka]


def test_negative_values_are_shown_as_they_are(made: Report) -> None:
    values = made.result.cka.copy()
    values[0, 1] = -0.04
    figure = cka_figures.cka_map(_with(made, cka=values))
    cells = trace(figure, "CKA")
    assert cells.zmin == -0.04 and cells.z[1][0] == -0.04 and cells.text[1][0] == "-.04"


def test_the_curves(made: Report) -> None:
    result, figure = made.result, cka_figures.alignment_curve(made)
    for name, side in (("engram-mini in dense-mini", "a"), ("dense-mini in engram-mini", "b")):
        value, low, high = (getattr(result, f"alignment_{side}{end}") for end in ("", "_low", "_high"))
        assert np.array_equal(trace(figure, name).y, value) and list(trace(figure, name).x) == [-1, 0, 1, 2]
        assert list(trace(figure, f"{name} band").y) == [*high, *low[::-1]]
    diagonal = trace(figure, "diagonal")
    assert list(diagonal.x) == list(diagonal.y) == [-1, 2]
    lead = cka_figures.lead_curve(made)
    assert np.array_equal(trace(lead, "lead").y, result.lead)
    assert f"{result.mean_lead:+.2f}" in lead.layout.title.subtitle.text


def test_models_of_other_depths_and_markup_in_names(uneven: Report) -> None:
    for figure in (cka_figures.cka_map(uneven), cka_figures.alignment_curve(uneven)):
        assert "<b>$x$" not in figure.to_json() and "&lt;b&gt;&#36;x&#36;" in figure.to_json()
        assert not [t for t in figure.data if "band" in (t.name or "")], "one sentence has no interval"
    assert trace(cka_figures.cka_map(uneven), "CKA").text is None, "20 layers have no room for numbers"
    assert "different layers" in cka_figures.deeper(uneven, None)
    rows = cka_figures.readings(uneven)
    assert len(rows) == 4 and "lead, blocks" not in rows[0] and "[" not in rows[0]["its CKA"]


def test_readings_are_those_of_the_report(made: Report) -> None:
    result, rows = made.result, cka_figures.readings(made)
    best = int(np.argmax(result.cka[2]))
    low, high = result.cka_low[2, best], result.cka_high[2, best]
    assert rows[2]["its CKA"] == f"{result.cka[2, best]:.4f} [{low:.4f}, {high:.4f}]"
    assert rows[2]["best match"] == result.layers_b[best]
    assert rows[2]["looks like layer of dense-mini"].startswith(f"{result.alignment_a[2]:.4f} [")


def test_a_subtitle_takes_the_lines_it_needs(made: Report) -> None:
    whole, half = cka_figures.lead_curve(made), narrow(cka_figures.lead_curve(made), 30)
    lines = half.layout.title.subtitle.text.split("<br>")
    assert max(map(len, lines)) <= 30 and " ".join(lines) == whole.layout.title.subtitle.text
    assert half.layout.margin.t > whole.layout.template.layout.margin.t


def _with(report: Report, **values: Any) -> Report:
    return dataclasses.replace(report, result=dataclasses.replace(report.result, **values))


def _lens(difference: float, low: float, high: float) -> Any:
    found = SimpleNamespace(settle_depth=difference, settle_depth_low=low, settle_depth_high=high)
    return SimpleNamespace(result=SimpleNamespace(difference=found))


@pytest.mark.parametrize(
    ("lead", "settle", "begins"),
    [
        ((0.8, 0.5, 1.0), (-0.3, -0.4, -0.2), "Yes, by both measures: "),
        ((-0.8, -1.0, -0.5), (0.3, 0.2, 0.4), "No: "),
        ((0.8, 0.5, 1.0), (0.3, 0.2, 0.4), "By one measure only: "),
        ((0.8, 0.5, 1.0), (-0.1, -0.3, 0.1), "By one measure only: "),
        ((0.1, -0.5, 0.7), (-0.3, -0.4, -0.2), "By one measure only: "),
        ((0.1, -0.5, 0.7), (0.0, -0.2, 0.2), "No difference that can be told: "),
        ((0.1, -0.5, 0.7), (0.3, 0.2, 0.4), "No: "),
    ],
)
def test_the_verdict_follows_the_numbers(made: Report, lead: tuple, settle: tuple, begins: str) -> None:
    report = _with(made, mean_lead=lead[0], mean_lead_low=lead[1], mean_lead_high=lead[2])
    said = cka_figures.deeper(report, _lens(*settle))
    assert said.startswith(begins) and said.endswith(".")
    if lead[1] > 0:
        assert "looks 0.80 blocks deeper than the same layer of dense-mini" in said
    if lead[2] < 0:
        assert "looks 0.80 blocks less deep" in said
    if lead[1] < 0 < lead[2]:
        assert "looks neither deeper nor less deep" in said
    if settle[2] < 0:
        assert "settles 0.30 blocks earlier" in said
    if settle[1] > 0:
        assert "settles 0.30 blocks later" in said
    assert cka_figures.deeper(report, None).startswith("Not both measures can tell: ")


def test_a_model_with_itself_has_no_verdict(pair: list[Handle]) -> None:
    report = cka.run([pair[0]] * 2, CKAConfig(("engram-mini",) * 2, TEXTS, None, "all", bootstrap=20))
    assert cka_figures.deeper(report, None).startswith("This is engram-mini with itself")


def test_rows(made: Report) -> None:
    rows, result = list(front.rows(made)), made.result
    assert len(rows) == 16
    row = rows[1 * 4 + 2]
    assert (row["model_a"], row["layer_a"], row["model_b"], row["layer_b"]) == ("engram-mini", "0", "dense-mini", "1")
    assert (row["cka"], row["cka_low"], row["cka_biased"]) == (
        result.cka[1, 2], result.cka_low[1, 2], result.biased[1, 2],
    )  # fmt: skip
    assert (row["alignment_a"], row["lead_high"]) == (result.alignment_a[1], result.lead_high[1])
    assert (row["points"], row["sentences"]) == (result.n_points, 6)


def test_the_figure_of_the_command_is_the_map(made: Report, pair: list[Handle]) -> None:
    assert trace(front.figure(made, "light", pair), "CKA").z is not None
