"""What the figures draw, against the report; every figure says what it shows."""

from __future__ import annotations

import dataclasses
import html
import json
import time
from collections.abc import Callable

import numpy as np
import plotly.graph_objects as go
import pytest

from engram_lab.lab.draw import labels
from engram_lab.lab.draw import training as training_figures
from engram_lab.lab.draw.theme import PALETTES, Mode
from engram_lab.lab.fronts import front, lens_figures
from engram_lab.models.errors import LabError
from engram_lab.models.handle import Handle
from engram_lab.probes import lens as lens_probe
from engram_lab.probes import tuned_lens
from engram_lab.probes.base import Report
from engram_lab.probes.lens import LensConfig
from tests.models import tiny
from tests.probes.test_tuned_lens import translators
from tests.tiny_lab import training

CARDS = {"engram-mini": training(True), "dense-mini": training(False)}


def name_of(handle: Handle) -> Callable[[int], str]:
    return lambda token_id: labels.label(handle.pieces([token_id], whole=False)[0])


def lines(figure: go.Figure) -> dict[str, go.Scatter]:
    return {trace.name.split(" (")[0]: trace for trace in figure.data if trace.mode == "lines+markers"}


def test_curves_are_the_means_and_the_band_is_the_percentiles(report: Report) -> None:
    figure = lens_figures.lens_curves(report, memory={"engram-mini": (1,)})
    drawn = lines(figure)
    assert list(drawn) == ["engram-mini", "dense-mini"]
    bands = [trace for trace in figure.data if trace.fill == "toself"]
    for lens, trace, band in zip(report.result.models, drawn.values(), bands, strict=True):
        # The percentiles anew, from the positions themselves.
        counted = np.arange(len(lens.token_ids)) > 0
        assert np.allclose(trace.y, lens.kl[:, counted].mean(axis=1), atol=1e-6)
        low, high = np.quantile(lens.kl[:, counted].astype(float), [0.1, 0.9], axis=1)
        assert np.allclose(band.y, [*high, *low[::-1]], atol=1e-6)
    assert list(figure.layout.xaxis.ticktext) == ["embed", "0", "1", "2"]
    symbols = drawn["engram-mini"].marker.symbol
    assert [symbol == "diamond" for symbol in symbols] == [False, False, True, False], "block 1 has the memory"
    assert "diamond" not in drawn["dense-mini"].marker.symbol


def test_a_huge_embed_does_not_flatten_the_blocks(report: Report) -> None:
    models = []
    for lens in report.result.models:
        raised = {name: getattr(lens, name).copy() for name in ("mean_kl", "kl_p10", "kl_p90")}
        for values in raised.values():
            values[0] += 40
        models.append(dataclasses.replace(lens, **raised))
    changed = dataclasses.replace(report, result=dataclasses.replace(report.result, models=tuple(models)))
    figure = lens_figures.lens_curves(changed)
    highest = max(lens.kl_p90[1:].max() for lens in models)
    assert highest < figure.layout.yaxis.range[1] < 1.2 * highest
    assert figure.layout.xaxis.ticktext[0] == "<br>".join(["embed", *(f"↑ {lens.mean_kl[0]:.3g}" for lens in models)])
    assert lines(figure)["engram-mini"].y[0] == models[0].mean_kl[0], "the line itself is not cut"
    assert lens_figures.lens_curves(report).layout.xaxis.ticktext[0] == "embed"


def test_curves_of_a_set_have_the_interval_of_the_mean(set_report: Report) -> None:
    figure = lens_figures.lens_curves(set_report)
    bands = [trace for trace in figure.data if trace.fill == "toself"]
    for lens, band in zip(set_report.result.models, bands, strict=True):
        assert np.allclose(band.y, [*lens.mean_kl_high, *lens.mean_kl_low[::-1]])
    assert "95 %" in figure.layout.title.subtitle.text and "3 texts" in figure.layout.title.subtitle.text


def test_curve_hover_has_the_exact_values(report: Report) -> None:
    trace = lines(lens_figures.lens_curves(report))["engram-mini"]
    for value, hover in zip(report.result.models[0].mean_kl, trace.hovertext, strict=True):
        assert f"mean {value:.6g} nats" in hover


@pytest.mark.parametrize("what", ["kl", "entropy", "target_prob", "target_rank"])
@pytest.mark.parametrize("index", [0, 1])
def test_map_shows_every_cell(report: Report, pair: list[Handle], what: lens_figures.Measure, index: int) -> None:
    lens = report.result.models[index]
    figure = lens_figures.lens_map(report, index, name_of(pair[index]), what=what)
    cells, clicks = figure.data
    expected = getattr(lens, what).astype(float)
    assert np.allclose(cells.z, np.log10(1 + expected) if what == "target_rank" else expected)
    assert len(clicks.x) == expected.size
    for x, y, hover in list(zip(clicks.x, clicks.y, clicks.hovertext, strict=True))[::7]:
        assert f"layer {lens.layer_names[y]}, position {x}" in hover
        assert f"(id {lens.token_ids[x]})" in hover and f"{expected[y, x]:.6g}" in hover
        for k in range(4):
            assert f"(id {lens.top_ids[y, x, k]})" in hover
    top = name_of(pair[index])(int(lens.top_ids[2, 3, 0]))
    assert html.unescape(cells.text[2][3]) == labels.short(top, 7)


def test_map_keeps_equal_tokens_apart_and_text_literal(report: Report, pair: list[Handle]) -> None:
    figure = lens_figures.lens_map(report, 0, name_of(pair[0]))
    ticks = figure.layout.xaxis
    n = len(report.result.models[0].token_ids)
    assert len(ticks.tickvals) == len(set(ticks.tickvals)) == n
    shown = [html.unescape(text.split("<br>")[0]) for text in ticks.ticktext]
    assert shown.count("·the") == 3, "the the the has a column each"
    raw = "".join(text.split("<br>")[0] for text in ticks.ticktext)
    assert "$" not in raw and "<" not in raw, "neither LaTeX nor a tag"


def test_map_window_and_frame(report: Report, pair: list[Handle]) -> None:
    figure = lens_figures.lens_map(report, 0, name_of(pair[0]), window=(4, 9), selected=(2, 5))
    assert np.shape(figure.data[0].z) == (4, 5) and list(figure.data[0].x) == [4, 5, 6, 7, 8]
    (box,) = figure.layout.shapes
    assert (box.x0, box.x1, box.y0, box.y1) == (4.5, 5.5, 1.5, 2.5)
    assert not lens_figures.lens_map(report, 0, name_of(pair[0]), window=(4, 9), selected=(2, 3)).layout.shapes


@pytest.fixture(scope="module")
def long_report(pair: list[Handle]) -> Report:
    """Of a prompt of 512 tokens."""
    prompt = "the " * 600
    ids = pair[0].encode(prompt)
    prompt = b"".join(p for p, i in zip(pair[0].pieces(ids[:512]), ids, strict=False) if i > 1).decode()
    report = lens_probe.run(pair[:1], LensConfig(("engram-mini",), (prompt,)))
    assert len(report.result.models[0].token_ids) == 512
    return report


def test_map_of_512_tokens_is_wide(long_report: Report, pair: list[Handle]) -> None:
    figure = lens_figures.lens_map(long_report, 0, name_of(pair[0]))
    text = figure.to_json()
    assert figure.layout.width >= 512 * 50, "room for the token in every cell"
    assert len(text) < 5_000_000


@pytest.mark.slow
def test_map_of_512_tokens_is_fast(long_report: Report, pair: list[Handle]) -> None:
    """By processor time, the best of three: what else the machine does is left out, as far as that goes."""

    def spent() -> float:
        began = time.process_time()
        lens_figures.lens_map(long_report, 0, name_of(pair[0])).to_json()
        return time.process_time() - began

    assert min(spent() for _ in range(3)) < 3


def test_settle_histogram_counts_positions(report: Report) -> None:
    figure = lens_figures.settle_histogram(report)
    for lens, bar in zip(report.result.models, figure.data, strict=True):
        final = lens.top_ids[-1, :, 0]
        first = [
            min(d for d in range(4) if all(lens.top_ids[e, p, 0] == final[p] for e in range(d, 4)))
            for p in range(1, len(final))
        ]
        assert np.allclose(bar.y, [100 * first.count(d) / len(first) for d in range(4)])


def test_difference_curve(set_report: Report) -> None:
    figure = lens_figures.difference_curve(set_report)
    a, b = set_report.result.models
    (trace,) = lines(figure).values()
    assert np.allclose(trace.y, a.mean_kl - b.mean_kl, atol=1e-6), "same tokens, so the means subtract"


@pytest.fixture(scope="module")
def both(pair: list[Handle], tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Report]:
    """(one prompt with a target, a text set), each with the tuned lens, of random translators."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENGRAM_LAB_CACHE", str(tmp_path_factory.mktemp("cache")))
        for n, handle in enumerate(pair):
            tuned_lens.save(translators(handle, 0.2, n), tuned_lens.places(handle)[0])
        names, texts = tuple(h.name for h in pair), ("The river runs", "past the old mill", "into the sea")
        return (
            lens_probe.run(pair, LensConfig(names, texts[:1], " the", tuned=True)),
            lens_probe.run(pair, LensConfig(names, texts, bootstrap=60, detail=False, tuned=True)),
        )


def test_both_lenses_are_drawn_and_told_apart(both: tuple[Report, Report], pair: list[Handle]) -> None:
    one, several = both
    for report in both:
        figure = lens_figures.lens_curves(report, memory={"engram-mini": (1,)})
        drawn = lines(figure)
        assert list(drawn) == [n + end for n in ("engram-mini", "dense-mini") for end in ("", ", tuned lens")]
        for lens in report.result.models:
            tuned = drawn[f"{lens.name}, tuned lens"]
            kept = lens.counted
            assert np.allclose(tuned.y, lens.tuned.kl[:, kept].mean(axis=1), atol=1e-6)
            assert tuned.line.color == drawn[lens.name].line.color and tuned.line.dash != drawn[lens.name].line.dash
            assert all(symbol.endswith("-open") for symbol in tuned.marker.symbol)
            # The final entropy anew, from the last layer.
            assert f"{lens.name} {lens.entropy[-1, kept].mean():.3f}" in figure.layout.title.subtitle.text
    a, b = several.result.models
    trace = lines(lens_figures.difference_curve(several))["difference, tuned lens"]
    assert np.allclose(trace.y, a.tuned.mean_kl - b.tuned.mean_kl, atol=1e-6)
    bars = lens_figures.settle_histogram(several).data
    assert [bar.name for bar in bars] == list(drawn)
    for lens, bar in zip((a, b), bars[1::2], strict=True):
        depths = lens.tuned.settle_depth[lens.counted]
        assert np.allclose(bar.y, [100 * np.mean(depths == d) for d in range(4)])
    row = lens_figures.summary(several)[2]
    assert row["settle depth, tuned lens"].startswith(f"{a.tuned.mean_settle_depth - b.tuned.mean_settle_depth:.3f} [")
    assert row["final entropy, nats"].startswith(f"{a.mean_final_entropy - b.mean_final_entropy:.3f} [")
    lens = one.result.models[0]
    for what in lens_figures.MEASURES:
        figure = lens_figures.lens_map(one, 0, name_of(pair[0]), what=what, tuned=True)
        expected = getattr(lens.tuned, what).astype(float)
        assert np.allclose(figure.data[0].z, np.log10(1 + expected) if what == "target_rank" else expected)
        assert "tuned lens" in figure.layout.title.text
    top = name_of(pair[0])(int(lens.tuned.top_ids[1, 2, 0]))
    assert html.unescape(figure.data[0].text[1][2]) == labels.short(top, 7)


def test_rows_have_the_tuned_lens_only_if_it_was_asked_for(both: tuple[Report, Report], report: Report) -> None:
    found = list(front("lens").rows(both[0]))
    lens = both[0].result.models[0]
    row = found[4 * 2 + 1]  # position 2, layer 0
    assert row["tuned_kl_nats"] == pytest.approx(lens.tuned.kl[1, 2]) and row["position"] == 2
    assert (
        row["tuned_top_id"] == lens.tuned.top_ids[1, 2, 0] and row["tuned_target_rank"] == lens.tuned.target_rank[1, 2]
    )
    plain = next(iter(front("lens").rows(report)))
    assert set(found[0]) - set(plain) == {key for key in found[0] if key.startswith("tuned_")}


def test_difference_of_unequal_depths_is_refused(report: Report, pair: list[Handle]) -> None:
    deeper = Handle(tiny.make("llama", num_hidden_layers=4), pair[0].tokenizer, "deeper")
    both = lens_probe.run([pair[0], deeper], LensConfig(("engram-mini", "deeper"), ("one", "two"), bootstrap=5))
    with pytest.raises(LabError, match="engram-mini has 3 layers and deeper 4, so there is no difference layer by"):
        lens_figures.difference_curve(both)


def test_summary_has_the_intervals(set_report: Report) -> None:
    rows = lens_figures.summary(set_report)
    assert [row[""] for row in rows] == ["engram-mini", "dense-mini", "difference (paired)"]
    lens = set_report.result.models[0]
    assert rows[0]["loss, nats a token"].startswith(f"{lens.mean_loss:.3f} [{lens.mean_loss_low:.3f}, ")


def every_figure(report: Report, set_report: Report, pair: list[Handle], mode: Mode) -> list[go.Figure]:
    return [
        lens_figures.lens_curves(report, mode),
        lens_figures.lens_curves(set_report, mode),
        lens_figures.lens_map(report, 0, name_of(pair[0]), mode),
        lens_figures.settle_histogram(report, mode),
        lens_figures.difference_curve(set_report, mode),
        training_figures.loss_over_training(CARDS, mode),
        training_figures.lens_over_training("engram-mini", CARDS["engram-mini"], mode),
        training_figures.gates_over_training("engram-mini", CARDS["engram-mini"], mode),
    ]


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_every_figure_is_titled_and_its_axes_named(
    report: Report, set_report: Report, pair: list[Handle], mode: Mode
) -> None:
    for figure in every_figure(report, set_report, pair, mode):
        assert figure.layout.title.text and figure.layout.title.subtitle.text
        assert figure.layout.xaxis.title.text and figure.layout.yaxis.title.text
        assert figure.layout.template.layout.paper_bgcolor == PALETTES[mode].page
        assert any(trace.hovertext is not None or trace.hovertemplate for trace in figure.data)
        json.loads(figure.to_json())


def test_training_figures() -> None:
    loss = training_figures.loss_over_training(CARDS)
    assert [list(trace.x) for trace in loss.data] == [[0.5, 1.0]] * 2, "millions of tokens, without the start"
    assert list(loss.data[0].y) == [8.0, 7.0]
    curves = training_figures.lens_over_training("engram-mini", CARDS["engram-mini"])
    assert [list(trace.y) for trace in curves.data] == [[3.5, 2.0, 1.0, 0.0], [4.0, 2.0, 1.0, 0.0]]
    gates = training_figures.gates_over_training("engram-mini", CARDS["engram-mini"])
    assert np.allclose(np.sum(gates.data[0].z, axis=0), 100)
    assert np.allclose(np.array(gates.data[0].z)[:, 1], np.array([500, 10, 30, 0]) / 5.4)


def luminance(colour: str) -> float:
    """Relative luminance of #RRGGBB, after WCAG 2."""
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_colours_can_be_read(mode: Mode) -> None:
    palette = PALETTES[mode]
    for ground in (palette.page, palette.panel):
        assert contrast(palette.ink, ground) >= 7
        assert contrast(palette.quiet, ground) >= 4.5
        assert contrast(palette.accent, ground) >= 4.5
    for colour in palette.series:
        assert contrast(colour, palette.page) >= 3, "lines and marks"
