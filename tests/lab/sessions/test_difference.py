"""The difference of two runs as drawn: each value, hover and axis against the two results."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from plotly.colors import hex_to_rgb, label_rgb

from engram_lab.lab.draw.theme import PALETTES
from engram_lab.lab.fronts import FRONTS, front
from engram_lab.lab.sessions import difference as figures
from engram_lab.models.errors import LabError
from engram_lab.models.handle import Handle
from engram_lab.probes import cka, gates, module_of, rows, sensitivity
from engram_lab.probes import lens as lens_probe
from engram_lab.probes.base import Report
from engram_lab.probes.gates import GatesConfig
from engram_lab.probes.lens import LensConfig
from engram_lab.probes.sensitivity import Item, SensitivityConfig, TextSet
from tests.tiny_lab import PROMPT

OTHER = PROMPT.replace("river runs", "mill past")


@pytest.fixture(scope="module")
def gate_runs(pair: list[Handle]) -> tuple[Report, Report]:
    config = GatesConfig(("engram-mini",), (PROMPT,), controls=("shuffled",))
    return gates.run(pair[:1], config), gates.run(pair[:1], dataclasses.replace(config, prompts=(OTHER,)))


@pytest.fixture(scope="module")
def lens_runs(pair: list[Handle]) -> tuple[Report, Report]:
    """The Engram and its twin on one prompt."""
    return tuple(lens_probe.run([own], LensConfig((own.name,), (PROMPT,))) for own in pair)  # type: ignore[return-value]


def words(figure: go.Figure) -> str:
    return f"{figure.layout.title.text} {figure.layout.title.subtitle.text}"


def test_what_a_probe_is_about_comes_first(lens_runs: Any, gate_runs: Any) -> None:
    found = figures.measures(*lens_runs)
    assert found[:3] == ["models[0].mean_kl", "models[0].kl", "models[0].next_token_loss"]
    assert {"models[0].kl_p10", "models[0].kl_p90"} == set(found[-2:])
    assert "models[0].token_ids" not in found and "models[0].layer_names" not in found
    assert figures.measures(*gate_runs)[:2] == ["gate", "gate_mean"]


def test_every_best_measure_is_an_array_of_its_probe() -> None:
    import typing

    from engram_lab.probes.base import Record, arrays_of

    def paths(kind: Any, at: str) -> set[str]:
        found = {f"{at}{name}" for name in arrays_of(kind)}
        for name, hint in typing.get_type_hints(kind).items():
            for inner in (hint, *typing.get_args(hint)):
                if isinstance(inner, type) and issubclass(inner, Record):
                    found |= paths(inner, f"{at}{name}.")
        return found

    for probe in FRONTS:
        best = front(probe).COMPARED
        assert best, probe
        assert set(best) <= paths(module_of(probe).RESULT, ""), probe


def test_what_cannot_be_drawn_says_why(pair: list[Handle], lens_runs: Any) -> None:
    longer = lens_probe.run(pair[:1], LensConfig(("engram-mini",), (PROMPT + " again",)))
    reasons = figures.refused(lens_runs[0], longer)
    n, m = (len(own.result.models[0].token_ids) for own in (lens_runs[0], longer))
    assert reasons["models[0].kl"] == f"A is 4 layer x {n} pos, B is 4 layer x {m} pos"
    assert "models[0].mean_kl" not in reasons and "models[0].token_ids" not in reasons
    assert set(reasons).isdisjoint(figures.measures(lens_runs[0], longer))
    with pytest.raises(LabError, match=r"no difference of models\[0\].kl to draw: A is 4 layer"):
        figures.difference(lens_runs[0], longer, "models[0].kl")
    with pytest.raises(LabError, match="has no field nothing"):
        figures.difference(lens_runs[0], longer, "nothing")
    with pytest.raises(LabError, match="it is a single number"):
        figures.difference(lens_runs[0], longer, "models[0].mean_loss")


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_two_axes_are_a_heat_map_around_no_difference(lens_runs: Any, mode: Any) -> None:
    a, b = (own.result.models[0] for own in lens_runs)
    figure = figures.difference(*lens_runs, "models[0].kl", mode)
    (heat,) = figure.data
    gap = b.kl.astype(float) - a.kl.astype(float)
    np.testing.assert_array_equal(heat.z, gap)
    most = np.abs(gap).max()
    assert (heat.zmin, heat.zmid, heat.zmax) == (-most, 0, most)
    blue, orange = PALETTES[mode].series[:2]
    expected = [label_rgb(hex_to_rgb(colour)) for colour in (blue, PALETTES[mode].panel, orange)]
    assert [colour for _, colour in heat.colorscale] == expected
    assert heat.colorbar.title.text == "B − A, nats"
    layer, pos = np.unravel_index(np.abs(gap).argmax(), gap.shape)
    assert figure.layout.title.text == "KL, engram-mini in A, dense-mini in B: B minus A"
    assert f"largest: {gap[layer, pos]:+.4g} nats at layer {a.layer_names[layer]}, position {pos}" in words(figure)
    assert "the runs differ in: models, weights" in words(figure)
    hover = heat.hovertext[2][3]
    assert f"B − A {gap[2, 3]:+.6g} nats<br>A {a.kl[2, 3]:.6g}, B {b.kl[2, 3]:.6g}" in hover
    assert hover.startswith("<b>layer 1<br>position 3 ")
    assert list(figure.layout.yaxis.ticktext) == list(a.layer_names)
    # Text of a prompt stands there as text.
    ticks = " ".join(figure.layout.xaxis.ticktext)
    assert "10 &lt; 11 mil" in ticks and "15 &#36; 16 5 17 ·and" in ticks and "<" not in ticks
    assert figure.layout.xaxis.title.text == "position" and figure.layout.yaxis.title.text == "layer"


def test_one_axis_in_order_is_a_line(lens_runs: Any) -> None:
    a, b = (own.result.models[0] for own in lens_runs)
    figure = figures.difference(*lens_runs, "models[0].mean_kl")
    (line,) = figure.data
    np.testing.assert_array_equal(line.y, b.mean_kl - a.mean_kl)
    assert line.mode == "lines+markers" and list(figure.layout.xaxis.ticktext) == list(a.layer_names)
    series = PALETTES["light"].series
    assert list(line.marker.color) == [series[1] if value > 0 else series[0] for value in line.y]
    assert figure.layout.yaxis.title.text == "B − A, nats" and figure.layout.xaxis.title.text == "layer"


def test_one_axis_of_kinds_is_bars(pair: list[Handle]) -> None:
    sets = (TextSet("own", (Item("The river runs"), Item("past the mill"))),)
    config = SensitivityConfig(("engram-mini",), sets, ("off", "zeroed"), bootstrap=5)
    a = sensitivity.run(pair[:1], config)
    b = sensitivity.run(
        pair[:1], dataclasses.replace(config, sets=(TextSet("own", (Item("the sea"), Item("old mill"))),))
    )
    figure = figures.difference(a, b, "loss")
    (bars,) = figure.data
    assert bars.type == "bar" and list(figure.layout.xaxis.ticktext) == list(a.result.conditions)
    np.testing.assert_array_equal(bars.y, (b.result.loss - a.result.loss)[0])
    assert "set own" in words(figure)  # the axis of one entry
    assert "condition off" in bars.hovertext[list(a.result.conditions).index("off")]


def test_more_axes_show_the_largest_and_say_so(gate_runs: Any) -> None:
    a, b = (own.result.attribution.memory.astype(float) for own in gate_runs)
    assert a.shape[0] == 1 and a.shape[1] > 1 and a.shape[2] > 1  # layer, order, head, pos
    figure = figures.difference(*gate_runs, "attribution.memory")
    gap = (b - a)[0]  # one layer
    expected = np.empty(gap.shape[::2])
    for order in range(gap.shape[0]):
        for pos in range(gap.shape[2]):
            expected[order, pos] = max(gap[order, :, pos], key=abs)
    np.testing.assert_array_equal(figure.data[0].z, expected)
    title = figure.layout.title.text
    assert title == "Attribution memory: B minus A; in each cell the largest along head" and "layer 1" in words(figure)
    assert figure.layout.xaxis.title.text == "position (as A names it)"
    hover = figure.data[0].hovertext[0]
    at = next(n for n, text in enumerate(hover) if " in A, " in text)
    assert "river in A" in hover[at] or "mill" in hover[at]
    # The A and B under the pointer are those of the entry that is shown.
    order, head, pos = np.unravel_index(np.abs(gap).argmax(), gap.shape)
    assert f"A {a[0, order, head, pos]:.6g}, B {b[0, order, head, pos]:.6g}" in figure.data[0].hovertext[order][pos]


def test_missing_values_are_blank_and_counted(lens_runs: Any) -> None:
    figure = figures.difference(*lens_runs, "models[0].next_token_loss")
    assert np.isnan(figure.data[0].y[-1]) and "blank: 1 of" in words(figure)


def test_a_run_against_itself_has_no_difference(lens_runs: Any) -> None:
    for path in figures.measures(lens_runs[0], lens_runs[0]):
        figure = figures.difference(lens_runs[0], lens_runs[0], path)
        (drawn,) = figure.data
        values = np.nan_to_num(np.array(drawn.z if drawn.type == "heatmap" else drawn.y, dtype=float))
        assert not values.any() and ("no difference anywhere" in words(figure) or "no place" in words(figure))
        assert "one request" in words(figure)
    assert figures.settings(lens_runs[0], lens_runs[0]) == []


def test_so_many_positions_are_told_by_number(pair: list[Handle]) -> None:
    run = lens_probe.run(pair[:1], LensConfig(("engram-mini",), (PROMPT * 3,)))
    axis = figures.difference(run, run, "models[0].kl").layout.xaxis
    assert len(run.result.models[0].token_ids) > figures.MOST_TICKS > 20
    assert list(axis.ticktext) == [str(n) for n in axis.tickvals] and len(axis.tickvals) <= figures.MOST_TICKS


def test_cka_lies_as_on_its_own_map(pair: list[Handle]) -> None:
    texts = tuple(f"The river runs past the {word}" for word in ("mill", "sea", "old mill", "town and the sea"))
    config = cka.CKAConfig(("engram-mini", "dense-mini"), texts, points="all", bootstrap=3)
    a = cka.run(pair, config)
    b = cka.run(pair, dataclasses.replace(config, prompts=texts[::-1]))
    figure = figures.difference(a, b, "cka")
    np.testing.assert_array_equal(figure.data[0].z, (b.result.cka - a.result.cka).T)
    assert figure.layout.xaxis.title.text == "layer of the first model"
    assert list(figure.layout.xaxis.ticktext) == list(a.result.layers_a)


def test_every_offer_of_a_probe_with_lists_can_be_drawn(gate_runs: Any, pair: list[Handle]) -> None:
    config = rows.RowsConfig(("engram-mini",), (PROMPT,), text=("The river runs past the old mill",))
    a = rows.run(pair[:1], config)
    b = rows.run(pair[:1], dataclasses.replace(config, text=("The sea, the sea, the sea",)))
    for runs in (gate_runs, (a, b)):
        assert len(figures.measures(*runs)) > 8
        for path in figures.measures(*runs):
            figure = figures.difference(*runs, path)
            assert figure.layout.xaxis.title.text and figure.layout.yaxis.title.text and figures.label(*runs, path)
    assert figures.measures(a, b)[0] == "text.coverage"
    assert figures.label(*gate_runs, "controls[0].gate") == "Gate, shuffled"


def test_single_numbers_stand_in_a_table(lens_runs: Any, gate_runs: Any) -> None:
    table = figures.scalars(*lens_runs).set_index("field")
    a, b = (own.result.models[0] for own in lens_runs)
    assert table.loc["models[0].mean_loss"].tolist() == [a.mean_loss, b.mean_loss, b.mean_loss - a.mean_loss]
    assert list(table.columns) == ["A", "B", "B - A"]
    table = figures.scalars(*gate_runs).set_index("field")
    one, other = (own.result.controls[0].mean_loss for own in gate_runs)
    assert table.loc["controls[0].mean_loss", "B - A"] == other - one
    assert "controls[0].layers" not in table.index and "position" not in table.index
    bare = dataclasses.replace(gate_runs[1], result=dataclasses.replace(gate_runs[1].result, controls=()))
    row = figures.scalars(gate_runs[0], bare).set_index("field").loc["controls[0].mean_loss"]
    assert row["A"] == one and np.isnan(row["B"]) and np.isnan(row["B - A"])
