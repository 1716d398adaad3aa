"""Gates as figures, chips, tables and rows: the numbers in them are those of the report, at the right place."""

from __future__ import annotations

import argparse
import html
import json
import re
import shlex

import numpy as np
import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from engram_lab.lab.ask import flags as arguments
from engram_lab.lab.draw import labels
from engram_lab.lab.draw.theme import Mode
from engram_lab.lab.fronts import front, gates_figures
from engram_lab.lab.fronts.export import command_line, csv_text, python
from engram_lab.lab.fronts.gates_figures import GATE, KNOCK_OUT, KNOCK_OUT_LOG_PROB, RATIO, SHOWN, WRITTEN
from engram_lab.models.errors import LabError
from engram_lab.models.handle import Handle
from engram_lab.probes import gates
from engram_lab.probes.base import Report
from engram_lab.probes.gates import GatesConfig
from tests.models import tiny
from tests.tiny_lab import CONTEXT, PROMPT, TARGET

TEXTS = ("The river runs past the river", "the river runs past", "past the old mill and the river runs past")


@pytest.fixture(scope="module")
def handle(tokenizer: PreTrainedTokenizerFast) -> Handle:
    """A tiny Engram of two memory layers, whose norms allow other gates than its width does."""
    model: PreTrainedModel = tiny.engram(tokenizer, max_position_embeddings=CONTEXT)
    model.model.layers[1].memory.key_norm.weight.data.mul_(1.7)
    return Handle(model, tokenizer, "engram-mini")


@pytest.fixture(scope="module")
def report(handle: Handle) -> Report:
    config = GatesConfig(("engram-mini",), (PROMPT,), TARGET, 6, ("shuffled", "off@1"), True)
    return gates.run([handle], config)


@pytest.fixture(scope="module")
def set_report(handle: Handle) -> Report:
    config = GatesConfig(
        ("engram-mini",), TEXTS, controls=("shuffled", "zeroed"), bootstrap=50, min_count=2, detail=False
    )
    return gates.run([handle], config)


def expected(report: Report, what: str) -> np.ndarray:
    """[pos] at the one memory layer, from the fields of the report."""
    result = report.result
    return {
        GATE: result.gate[0, 0],
        WRITTEN: result.written_norm[0, 0],
        RATIO: result.written_norm[0, 0] / result.residual_norm[0],
        gates_figures.ATTRIBUTION: result.attribution.memory.sum((0, 1, 2)) + result.attribution.conv[0],
        KNOCK_OUT: result.knock_out.logit_change[0],
        KNOCK_OUT_LOG_PROB: result.knock_out.log_prob_change[0],
    }[what]


@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("what", list(SHOWN))
def test_the_map_holds_the_reports_numbers(report: Report, what: str, mode: Mode) -> None:
    values = expected(report, what)
    figure = gates_figures.gate_map(report, mode, what, position=6)
    heat, cells = figure.data
    np.testing.assert_allclose(np.array(heat.z, dtype=float)[0], values, rtol=1e-5, atol=1e-7)
    tokens = gates_figures.tokens_of(report)
    assert labels.gives_back(tokens, PROMPT)
    for pos, hover in enumerate(cells.hovertext):
        assert f"position {pos}<" in hover and labels.plotly(tokens[pos].label) in hover
        if not np.isnan(values[pos]):
            assert f"{values[pos]:.6g}" in hover
        else:
            assert pos > 6 and heat.text[0][pos] == ""
    assert SHOWN[what].title in figure.layout.title.text and "engram-mini" in figure.layout.title.text
    assert figure.layout.xaxis.title.text and figure.layout.shapes[0].x0 == 5.5
    if SHOWN[what].signed:
        assert heat.zmin == -heat.zmax and heat.zmax == pytest.approx(np.nanmax(np.abs(values)), rel=1e-5)


def test_the_gates_colours_end_at_the_stated_ceiling(report: Report) -> None:
    figure = gates_figures.gate_map(report)
    ceiling = report.result.ceiling
    assert (figure.data[0].zmin, figure.data[0].zmax) == (0, ceiling)
    said = figure.layout.title.subtitle.text
    assert f"ceiling {ceiling:.3f}" in said and f"{report.result.ceiling_learned[0]:.3f} at layer 1" in said
    assert figure.data[0].colorbar.ticktext[-1] == f"{ceiling:.3f}, ceiling"
    assert report.result.ceiling_learned[0] > ceiling


def test_a_window_of_a_long_prompt(handle: Handle) -> None:
    report = gates.run([handle], GatesConfig(("engram-mini",), ("the old mill and the river " * 80,)))
    n = len(report.result.token_ids)
    assert n > 300
    figure = gates_figures.gate_map(report, window=(256, 320))
    assert list(figure.data[0].x) == list(range(256, 320))
    np.testing.assert_allclose(figure.data[0].z[0], report.result.gate[0, 0, 256:320])
    assert figure.layout.width == 240 + 64 * gates_figures.COLUMN
    assert f"Positions 256 to 319 of {n}" in figure.layout.title.subtitle.text


def test_a_control_lies_under_the_gates_or_is_their_difference(report: Report) -> None:
    result, shuffled = report.result, report.result.controls[0]
    both = gates_figures.gate_map(report, control=shuffled)
    np.testing.assert_allclose(both.data[0].z[1], result.gate[0, 0])
    np.testing.assert_allclose(both.data[0].z[0], shuffled.gate[0, 0])
    assert "rows shuffled" in both.layout.yaxis.ticktext[0] and "shuffled" not in both.layout.yaxis.ticktext[1]
    change = gates_figures.gate_map(report, control=shuffled, difference=True)
    np.testing.assert_allclose(change.data[0].z, shuffled.gate[0] - result.gate[0])
    assert change.data[0].zmin == -change.data[0].zmax and "change of the gate" in change.layout.title.text
    written = gates_figures.gate_map(report, what=WRITTEN, control=shuffled, difference=True)
    np.testing.assert_allclose(written.data[0].z, shuffled.written_norm[0] - result.written_norm[0])
    # What a control does not change is the memory as it is.
    assert len(gates_figures.gate_map(report, what=KNOCK_OUT, control=shuffled).data[0].z) == 1


@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("what", list(SHOWN))
def test_the_coloured_prompt(report: Report, what: str, mode: Mode) -> None:
    made = gates_figures.chips(report, what, 0, mode)
    shown = re.findall(
        r'<span class="chip([^"]*)" role="listitem" style="([^"]*)" title="([^"]*)">([^<]*)</span>', made
    )
    tokens, values = gates_figures.tokens_of(report), expected(report, what)
    assert [html.unescape(text) for *_, text in shown] == [token.label for token in tokens]
    colours = {}
    for (special, style, title, _), token, value in zip(shown, tokens, values, strict=True):
        assert (special == " special") == token.special
        assert f"{value:.6g}" in html.unescape(title)
        if np.isnan(value):
            assert style == ""
            continue
        back, ink = (re.search(rf"(?:^|;){key}:([^;]+)", style)[1] for key in ("background", "color"))  # type: ignore[index]
        colours[float(value)] = back
        assert contrast(back, ink) >= 4.5, "legible, as WCAG asks of text"
    assert len(set(colours.values())) > 3
    assert gates_figures.chips(report, GATE, 0, mode, report.result.controls[0]) != gates_figures.chips(report, GATE, 0)


def contrast(back: str, ink: str) -> float:
    """WCAG 2's contrast ratio of an rgb() colour and #000 or #FFF."""
    channels = [int(part) / 255 for part in re.findall(r"\d+", back)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    one = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    other = {"#000": 0.0, "#FFF": 1.0}[ink]
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)


def test_attribution_bars_add_up(report: Report) -> None:
    said = report.result.attribution
    figure = gates_figures.attribution_bars(report, 6)
    bars = np.concatenate([trace.y for trace in figure.data])
    assert bars.sum() == pytest.approx(said.logit[6], abs=1e-5)
    assert len(bars) == said.memory[..., 6].size + 1 + 3 + 1
    at = np.concatenate([trace.x for trace in figure.data])
    assert len(set(at)) == len(at), "no bar hides another"
    assert f"logit {said.logit[6]:.3f}" in figure.layout.title.subtitle.text
    first = figure.data[0]
    np.testing.assert_allclose(first.y, said.memory[0, 0, :, 6])
    assert f"{said.memory[0, 0, 1, 6]:.6g}" in first.hovertext[1]
    assert labels.plotly(labels.label(TARGET.encode())) in figure.layout.title.text


def test_the_lens_with_and_without(report: Report, set_report: Report) -> None:
    figure = gates_figures.lens_curves(report, report.result.controls[1])
    as_it_is, off = (t for t in figure.data if t.mode == "lines+markers")
    np.testing.assert_allclose(as_it_is.y, report.result.mean_kl)
    np.testing.assert_allclose(off.y, report.result.controls[1].mean_kl)
    assert "memory off, layer 1" in figure.layout.title.text
    with pytest.raises(LabError, match="no lens curves"):
        gates_figures.lens_curves(set_report, set_report.result.controls[0])


def test_the_histogram_and_its_intervals(set_report: Report) -> None:
    result = set_report.result
    figure = gates_figures.histogram(set_report)
    (bars,) = figure.data
    gates_ = result.gate[0, 0, result.counted]
    np.testing.assert_allclose(bars.y, 100 * np.histogram(gates_, 20, (0, 1))[0] / len(gates_))
    np.testing.assert_allclose(bars.y + bars.error_y.array, 100 * result.histogram_high[0])
    assert figure.layout.shapes[0].x0 == result.ceiling
    assert f"mean {gates_.mean():.2f} [" in bars.name


def test_tables(report: Report, set_report: Report) -> None:
    result = set_report.result
    rows = gates_figures.control_rows(set_report)
    assert [row[""] for row in rows] == ["as it is", "rows shuffled", "rows zeroed"]
    shuffled = result.controls[0]
    assert rows[1]["change of the loss"] == (
        f"{shuffled.mean_loss_change:.3f} [{shuffled.mean_loss_change_low:.3f}, {shuffled.mean_loss_change_high:.3f}]"
    )
    assert rows[1]["rank correlation, layer 1"] == f"{shuffled.rank_correlation[0, 0]:.2f}"
    assert rows[2]["rank correlation, layer 1"] == "–" and rows[2]["gate, layer 1"] == "0.500"
    assert gates_figures.control_rows(report)[2][""] == "memory off, layer 1"
    highest, lowest = (gates_figures.ngram_rows(set_report, 1, 2, h) for h in (True, False))
    assert len(highest) > 1 and highest[0]["mean gate"] >= highest[-1]["mean gate"] >= lowest[0]["mean gate"]
    assert {row["as found"] for row in highest} == {
        labels.label(own.example.encode()) for own in result.highest if own.order == 2
    }
    assert not gates_figures.ngram_rows(set_report, 6, 2, True)


def parsed(flags: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    front("gates").ASK.add_arguments(parser)
    arguments.add_outputs(parser)
    return parser.parse_args(flags)


CONFIGS = [
    GatesConfig(("engram-mini",), (PROMPT,)),
    GatesConfig(("a folder",), ("--it's $5\n", "<b>"), " the", -2, ("shuffled", "off@1"), True, 3, 70, 2, 4),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_the_command_makes_the_request_again(config: GatesConfig) -> None:
    shown = command_line("gates", config)
    words = shlex.split(shown.replace(" \\\n", " "))
    assert words[:3] == ["engram-lab", "probe", "gates"]
    assert front("gates").ASK.config(parsed(words[3:])) == config
    made: dict[str, GatesConfig] = {}
    exec(python("gates", config).split("report = ")[0], made)
    assert made["config"] == config


def test_rows_are_tidy(report: Report, set_report: Report) -> None:
    result = report.result
    rows = list(front("gates").rows(report))
    n = len(result.token_ids)
    assert len(rows) == 3 * n and [row["control"] for row in rows[::n]] == ["", "shuffled", "off@1"]
    row = rows[4]
    assert row["gate"] == float(result.gate[0, 0, 4]) and row["position"] == 4 and row["layer"] == 1
    assert row["knock_out_logit_change"] == float(result.knock_out.logit_change[0, 4])
    assert row["written_to_target_logit"] == float(result.attribution.written[0, 4])
    assert rows[n - 1]["knock_out_logit_change"] is None and rows[n - 1]["next_token_loss_nats"] is None
    assert rows[n + 4]["gate"] == float(result.controls[0].gate[0, 0, 4]) and rows[n + 4]["target_logit"] is None
    assert csv_text(report).count("\n") == 3 * n + 1
    many = list(front("gates").rows(set_report))
    assert len(many) == len(set_report.result.token_ids) and many[-1]["prompt"] == 2
    starts = [row["position"] for row in many if row["prompt"] == 1]
    assert starts == list(range(len(starts)))


def test_the_figure_of_a_command(report: Report, set_report: Report, handle: Handle) -> None:
    shown = front("gates").figure
    assert json.loads(shown(report, "light", [handle]).to_json()) == json.loads(
        gates_figures.gate_map(report).to_json()
    )
    assert shown(set_report, "light", [handle]).data[0].type == "bar"
