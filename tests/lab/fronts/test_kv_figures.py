"""The figures of the kv probes: what is drawn is what was measured."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from engram_lab.lab.draw import cache, labels
from engram_lab.lab.fronts import kv_knockout, kv_map, kv_set, kv_swap
from engram_lab.probes.base import Report
from engram_lab.probes.kv import knockout, swap
from engram_lab.probes.kv import map as kv_map_probe
from engram_lab.probes.kv import set as kv_set_probe
from tests.probes.kv.tiny import RIVER, opened, right


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    handle = opened("llama")
    good = right(handle)
    longer = [right(handle, dataclasses.replace(RIVER, template=RIVER.template + " the" * n)) for n in (1, 2, 3)]
    others = [dataclasses.replace(own, id=str(n), kind="$x$ <b>") for n, own in enumerate(longer)]
    refused = dataclasses.replace(RIVER, id="refused", new="xenon", kind="none right")
    wrong = dataclasses.replace(good, answer_old=good.answer_new, answer_new=good.answer_old)
    names = (handle.name,)
    return {
        "swap": swap.run([handle], swap.SwapConfig(names, good, draws=4)),
        "wrong": swap.run([handle], swap.SwapConfig(names, wrong, "k", (1,), random=())),
        "map": kv_map_probe.run([handle], kv_map_probe.MapConfig(names, good, 2)),
        "knockout": knockout.run([handle], knockout.KnockoutConfig(names, good)),
        "set": kv_set_probe.run([handle], kv_set_probe.SetConfig(names, (good, *others, refused), bootstrap=50)),
    }


def test_the_ladder_has_every_step_and_the_controls_spread(reports: dict[str, Report]) -> None:
    result = reports["swap"].result
    figure = kv_swap.figure(reports["swap"])
    drawn = {x: y for bar in figure.data for x, y in zip(bar.x, bar.y, strict=True)}
    for name, recovery, draw in zip(result.names, result.effects.recovery, result.draw, strict=True):
        if draw < 0:
            assert drawn[name] == recovery
    (control,) = (bar for bar in figure.data if bar.name == "random")
    np.testing.assert_allclose(control.y, result.random_mean)
    np.testing.assert_allclose(control.y + np.array(control.error_y.array), result.random_high)
    np.testing.assert_allclose(control.y - np.array(control.error_y.arrayminus), result.random_low)
    assert [n.split()[0] for n in drawn] == ["the", "all", *["last"] * 4, *["best"] * 4, *["random"] * 4, "all", "none"]
    wrong = kv_swap.figure(reports["wrong"], "dark")
    assert "no claim" in wrong.layout.title.subtitle.text and "K alone of layers 1" in wrong.layout.title.subtitle.text
    assert "no claim" not in figure.layout.title.subtitle.text
    table = kv_swap.ladder_table(reports["swap"])
    assert len(table) == len(drawn) and table[0]["recovery"] == f"{result.effects.recovery[0]:.3f}"
    assert table[10]["recovery"].startswith(f"{result.random_mean[0]:.3f} (")


def test_answers_run_from_one_clean_prompt_to_the_other(reports: dict[str, Report]) -> None:
    result = reports["swap"].result
    old, new = kv_swap.answers(reports["swap"]).data
    assert old.x[0] == "clean, old prompt" and old.x[-1] == "clean, new prompt"
    assert (old.y[0], old.y[-1]) == result.oracle.prob_old and (new.y[0], new.y[-1]) == result.oracle.prob_new
    assert old.y[1] == result.effects.prob_old[0] and f"id {result.pair.answer_ids[1]}" in new.name


def test_the_map_and_its_columns(reports: dict[str, Report]) -> None:
    result = reports["map"].result
    figure = kv_map.figure(reports["map"])
    np.testing.assert_array_equal(figure.data[0].z, result.recovery)
    assert figure.layout.xaxis.ticktext[4] == "·capital 4" and len(figure.layout.xaxis.ticktext) == 17
    assert (figure.layout.shapes[0].x0, figure.layout.shapes[0].x1) == (3.5, 4.5)
    assert list(figure.layout.yaxis.ticktext) == ["0 to 1", "2"]
    cells, pair = figure.data[1], result.pair  # squares on the cells, row by row, which report clicks
    assert (cells.x[pair.n_editable + 4], cells.y[pair.n_editable + 4]) == (4, 1)
    assert f"recovery {result.recovery[1, 4]:.5f}" in cells.hovertext[pair.n_editable + 4]
    assert "the same here" in cells.hovertext[1]


def test_the_prompt_in_place(reports: dict[str, Report]) -> None:
    result = reports["swap"].result
    alone = kv_swap.single_recovery(reports["swap"])
    text = cache.prompt_chips(result.pair, alone)
    chips = re.findall(r'<span class="([^"]*)" role="listitem" style="([^"]*)" title="([^"]*)">(.*?)</span>', text)
    assert len(chips) == result.pair.n_tokens
    assert [n for n, (kind, *_) in enumerate(chips) if "field" in kind] == [4] and chips[4][3] == "·capital"
    assert "border" in chips[4][1] and f"recovers {alone[4]:.1%} alone" in chips[4][2]
    assert "special" in chips[0][0] and "background" not in chips[2][1] and "runs again" in chips[-1][2]
    shades = {n: float(m[1]) for n, (_, style, *_) in enumerate(chips) if (m := re.search(r",([\d.]+)\)", style))}
    assert shades[4] == pytest.approx(min(abs(alone[4]), 1) * 0.85, abs=1e-3)
    assert "".join(chip[3] for chip in chips[1:]) == labels.label(result.pair.text_old.encode())
    assert "·river" in cache.prompt_chips(result.pair, None, "dark", new=True)
    best = kv_map.single_recovery(reports["map"])
    assert best[4] == reports["map"].result.recovery[:, 4].max() and 1 not in best


def test_knock_outs_hollow_where_the_answer_is_lost(reports: dict[str, Report]) -> None:
    result = reports["knockout"].result
    figure = kv_knockout.figure(reports["knockout"])
    points = {
        (trace.name, x, symbol.endswith("-open"))
        for trace in figure.data
        for x, symbol in zip(trace.x, trace.marker.symbol, strict=True)
    }
    assert points == {
        (how, margin, not kept) for how, margin, kept in zip(result.hows, result.margin, result.kept, strict=True)
    }
    assert figure.layout.shapes[1].x0 == result.margin_clean


def test_the_set_by_kind(reports: dict[str, Report]) -> None:
    result = reports["set"].result
    figure = kv_set.figure(reports["set"])
    field, behind, _ = figure.data
    np.testing.assert_array_equal(field.x, result.mean[:, 0])
    np.testing.assert_allclose(behind.x + np.array(behind.error_x.array), result.mean_high[:, 1])
    assert list(figure.layout.yaxis.ticktext)[1] == "&#36;x&#36; &lt;b&gt; (3)"
    table = kv_set.kind_table(reports["set"])
    assert [row["answered right"] for row in table] == ["1", "3", "0", "4"] and table[2]["field alone"] == "–"
    assert table[0]["field alone"] == f"{result.mean[0, 0]:.2f}" and "[" in table[1]["field alone"]
    rows = kv_set.scenario_table(reports["set"])
    assert rows[4]["counts"] == "no" and "different numbers of tokens" in rows[4]["why not"]
