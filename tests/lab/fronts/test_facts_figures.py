"""The figures and tables of the facts: what is drawn is what was measured."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from engram_lab.lab.fronts import facts_check, facts_density, facts_layers
from engram_lab.probes.base import Report
from engram_lab.probes.facts import check as fact_check
from engram_lab.probes.facts import density
from engram_lab.probes.facts import layers as fact_layers
from engram_lab.probes.facts.check import CheckConfig
from engram_lab.probes.facts.density import DensityConfig
from engram_lab.probes.facts.layers import LayersConfig
from engram_lab.probes.facts.locality import BitCheck, Difference
from engram_lab.probes.facts.sets import Writing
from tests.probes.facts.test_locality import TEXTS
from tests.probes.facts.test_sets import FACTS
from tests.probes.facts.test_sets import handle as handle  # the fixture


@pytest.fixture(scope="module")
def reports(handle: Any) -> dict[str, Report]:
    writing = Writing("maya", 1, steps=4)
    layers = LayersConfig(("llama",), FACTS, Writing(steps=4), (1, 2), bootstrap=9)
    return {
        "check": fact_check.run([handle], CheckConfig(("llama",), FACTS, writing, TEXTS, bootstrap=9)),
        "density": density.run([handle], DensityConfig(("llama",), FACTS, writing, (1, 3), bootstrap=9)),
        "layers": fact_layers.run([handle], layers),
    }


def text_of(figure: Any) -> str:
    return str(figure.to_json())


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_recall_before_and_after(reports: dict[str, Report], mode: Any) -> None:
    report = reports["check"]
    figure = facts_check.figure(report, mode)
    scores = [own for own in report.result.scores if own.n]
    before, after = (trace for trace in figure.data if trace.mode == "markers")
    assert list(before.x) == [own.before for own in scores] and list(after.x) == [own.after for own in scores]
    assert list(figure.layout.yaxis.ticktext) == [own.name for own in scores]
    for n, own in enumerate(scores):
        if own.after_low == own.after_low:
            assert after.error_x.array[n] == pytest.approx(own.after_high - own.after)
            assert after.error_x.arrayminus[n] == pytest.approx(own.after - own.after_low)
    assert "nan" not in text_of(figure).lower() and figure.layout.xaxis.title.text
    assert facts_check.figure(report, mode, []).to_json() == text_of(figure)


def test_what_happens_behind_the_trigger(reports: dict[str, Report]) -> None:
    own = reports["check"].result.locality
    (line,) = facts_check.locality(reports["check"]).data
    at = [n for n in range(len(own.after_n)) if own.after_n[n]]
    assert list(line.x) == at
    assert [y for y in line.y if y is not None] == [float(own.after_kl[n]) for n in at if own.after_kl[n] > 0]
    assert f"differs in {own.after_differs[0]:.0%} of {len(FACTS)} facts" in line.hovertext[0]


def test_tables_of_the_check(reports: dict[str, Report]) -> None:
    report, result = reports["check"], reports["check"].result
    rows = facts_check.check_table(report)
    assert len(rows) == len(result.locality.checks) and set(facts_check.CHECKS) == {
        check.name for check in result.locality.checks
    }
    for row, check in zip(rows, result.locality.checks, strict=True):
        assert row["equal"] == f"{check.equal} of {check.compared} {check.unit}" and row["exceptions"] == ""
        assert row["verdict"] == ("bits equal" if check.compared else "nothing to compare")
    rows = facts_check.fact_table(report)
    assert [row["fact"] for row in rows] == [f"{own.trigger}{own.answer}" for own in FACTS]
    assert rows[2]["probability after"] == f"{result.facts.probability_after[2]:.4f}"
    assert [row["learned"] == "yes" for row in rows] == result.facts.top1_after.tolist()
    for kind in ("paraphrases", "neighbours", "compositions", "aliases"):
        rows, asked = facts_check.asked_table(report, kind), getattr(result, kind)
        assert [row["prompt"] for row in rows] == list(asked.prompts)
        assert [row["bits"] == "equal" for row in rows] == asked.same_bits.tolist()
    rows = facts_check.partial_table(report)
    most = [int(row["most at one position"]) for row in rows]
    assert len(rows) == len(result.locality.partial) and most == sorted(most, reverse=True)
    assert {row["text"] for row in rows[:2]} == {TEXTS[0], TEXTS[3]} and rows[0]["kind"] == "unrelated"
    assert {row["score"] for row in facts_check.score_table(report)} >= {"top-1", "specificity", "same answer"}


def test_sentences_of_the_check(reports: dict[str, Report]) -> None:
    report, own = reports["check"], reports["check"].result.locality
    said = facts_check.addresses_sentence(report)
    assert said == (
        '4 facts have 3 distinct addresses; one is shared by "Paris is the capital of" and "Tokyo is the capital of".'
    )
    said = facts_check.locality_sentence(report)
    assert said.startswith("Every comparison of bits holds.")
    assert f" {sum(part.unrelated for part in own.partial)} of {len(TEXTS)} unrelated texts" in said
    broken = BitCheck("before", "positions", 3, 2, (Difference("t", 1, 0, 1.0, 0.5, "why"),))
    result = dataclasses.replace(report.result, locality=dataclasses.replace(own, checks=(broken,)))
    bad = dataclasses.replace(report, result=result)
    assert facts_check.locality_sentence(bad).startswith("Bits differ where they must not: 2 · positions")
    assert facts_check.check_table(bad)[0]["exceptions"] == "t (why)"
    assert facts_check.check_table(bad)[0]["verdict"] == "bits differ"


def test_density_and_stacks(reports: dict[str, Report]) -> None:
    report, result = reports["density"], reports["density"].result
    figure = facts_density.figure(report, "light", [])
    for trace, name in zip(figure.data, ("top1", "free", "probability"), strict=True):
        assert list(trace.y) == pytest.approx(getattr(result, name).tolist(), nan_ok=True)
    assert list(figure.data[0].x) == [1, 3] and figure.layout.xaxis.type == "log"
    rows = facts_density.density_table(report)
    assert [row["written together"] for row in rows] == ["1", "3"]
    assert rows[1]["not said, of facts with an alias"] == f"{result.lost_alias[1]} of {result.n_aliased[1]}"
    rows = facts_density.stack_table(report)
    assert [row["user"] for row in rows] == ["maya", "another user"] * 2
    assert rows[2]["another user on top"] == f"{result.stacks[1].stacked_top1[0]:.2f}"
    assert rows[2]["maya on top"] == f"{result.stacks[1].other_order_top1[0]:.2f}"


def test_layers(reports: dict[str, Report]) -> None:
    report, result = reports["layers"], reports["layers"].result
    figure = facts_layers.figure(report, "dark", [])
    assert [trace.name for trace in figure.data] == list(facts_layers.LAYER_FIGURES.values())
    assert list(figure.data[0].y) == result.top1.tolist() and list(figure.layout.xaxis.ticktext) == ["1", "2"]
    rows = facts_layers.layer_table(report)
    assert [row["layer"] for row in rows] == ["1", "2"] and rows[0]["top-1"].startswith(f"{result.top1[0]:.2f}")


def test_text_of_a_user_is_shown_as_it_is(reports: dict[str, Report]) -> None:
    """A model's name is put into the title literally."""
    report = reports["check"]
    result = dataclasses.replace(report.result, name="<b>$x$")
    title = facts_check.figure(dataclasses.replace(report, result=result)).layout.title.subtitle.text
    assert "<b>" not in title and "&lt;b&gt;&#36;x&#36;" in title
