"""Figures, rows and flags of errata, of writing before the answer, and of composition."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from engram_lab.lab.fronts import kv_compose, kv_erratum, kv_reasoning
from engram_lab.models.errors import LabError
from engram_lab.probes.base import Report
from engram_lab.probes.kv import compose as compose_probe
from engram_lab.probes.kv import erratum as erratum_probe
from engram_lab.probes.kv import reasoning as reasoning_probe
from engram_lab.probes.kv.compose import ComposeConfig
from engram_lab.probes.kv.erratum import ErratumConfig
from engram_lab.probes.kv.reasoning import ReasoningConfig
from tests.lab.fronts.test_kv_fronts import LOOK, OWN, again, parsed, small_library
from tests.probes.kv.test_compose import BLOCK, PREFIX, SUFFIX
from tests.probes.kv.test_erratum import OLD_MILL
from tests.probes.kv.tiny import opened

assert small_library  # a fixture


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    handle, names = opened("llama"), ("llama",)
    texts = {"prefix": PREFIX, "block": BLOCK, "suffix": SUFFIX, "answers": (" the", " sea"), "lengths": (5, 20)}
    return {
        "erratum": erratum_probe.run([handle], ErratumConfig(names, OLD_MILL, corrections=3)),
        "single": erratum_probe.run([handle], ErratumConfig(names, OLD_MILL, corrections=0)),
        "reasoning": reasoning_probe.run([handle], ReasoningConfig(names, OLD_MILL, (0, 2), "\nthe")),
        "compose": compose_probe.run([handle], ComposeConfig(names, **texts, time=True)),
        "untimed": compose_probe.run([handle], ComposeConfig(names, **texts)),
    }


@pytest.mark.parametrize(
    ("front", "config"),
    [
        (kv_erratum, ErratumConfig(("m",), LOOK)),
        (kv_erratum, ErratumConfig(("m",), OWN, (("a=b", " c"), ("'", "$d")), 0, "so {value}", (3,), "split", True)),
        (kv_reasoning, ReasoningConfig(("m",), LOOK)),
        (kv_reasoning, ReasoningConfig(("m",), OWN, (0, 9), "", "split")),
        (kv_compose, ComposeConfig(("m",))),
        (kv_compose, ComposeConfig(("m",), "", "a 'b'\n", "c", (), (), (), True)),
        (kv_compose, ComposeConfig(("m",), answers=(" $x", "'"), recompute=(1,), lengths=(7, 3))),
    ],
)
def test_the_flags_of_a_request_make_it_again(front: Any, config: Any, tmp_path: Any, monkeypatch: Any) -> None:
    assert again(front, config, tmp_path, monkeypatch) == config


def test_defaults_and_bad_flags() -> None:
    own = kv_compose.ASK.config(parsed(kv_compose, ["--model=m", "--block=b"]))
    assert own.answers == () and own.prefix == compose_probe.PREFIX
    assert kv_compose.ASK.config(parsed(kv_compose, ["--model=m"])) == ComposeConfig(("m",))
    with pytest.raises(LabError, match="no correction of a chain"):
        kv_erratum.ASK.config(parsed(kv_erratum, ["--model=m", "--chain=Rome"]))


def test_rows_are_tidy_and_hold_the_figures(reports: dict[str, Report]) -> None:
    rows = {
        name: list(front.rows(reports[name]))
        for name, front in (("erratum", kv_erratum), ("reasoning", kv_reasoning), ("compose", kv_compose))
    }
    for own in rows.values():
        assert len({tuple(row) for row in own}) == 1 and json.dumps(own)
    result = reports["erratum"].result
    assert len(rows["erratum"]) == 5 + 9 and rows["erratum"][1]["recovery"] == result.effects.recovery[1]
    assert rows["erratum"][-1]["served_share"] == result.chain.share[2, 2] == 0
    assert (
        rows["reasoning"][0]["tokens"] == -1 and rows["reasoning"][-1]["text"] == reports["reasoning"].result.texts[-1]
    )
    timing = reports["compose"].result.timing
    assert rows["compose"][0]["seconds"] == timing.seconds[0] and rows["compose"][0]["seconds_full"] == timing.full[0]
    assert next(kv_compose.rows(reports["untimed"]))["seconds"] == ""


def test_errata_and_their_timeline(reports: dict[str, Report]) -> None:
    result = reports["erratum"].result
    old, new, third = kv_erratum.figure(reports["erratum"]).data
    assert (old.y[0], old.y[-1]) == result.oracle.prob_old and new.y[2] == result.effects.prob_new[1]
    np.testing.assert_array_equal(third.y[1:-1], result.prob_third)
    assert old.x[2] == "the correction" and "the river" in old.hovertext[2]
    lines = kv_erratum.timeline(reports["erratum"], "dark").data
    for p, line in enumerate(lines):
        np.testing.assert_array_equal(line.y, result.chain.computed[p].cumsum())
        for n, symbol in enumerate(line.marker.symbol):
            assert symbol.startswith("square") == result.chain.anew[p, n]
            assert symbol.endswith("open") == (not result.chain.right[p, n])
    assert kv_erratum.timeline(reports["single"]) is None
    table = kv_erratum.errata_table(reports["erratum"])
    assert table[1]["tokens computed"] == str(result.computed[1]) and table[3]["due"] == "third"


def test_reasoning_lines_and_texts(reports: dict[str, Report]) -> None:
    report = reports["reasoning"]
    lines = kv_reasoning.figure(report).data
    assert len(lines) == 3 and list(lines[1].x) == ["0", "2"]
    np.testing.assert_array_equal(lines[1].y, report.result.effects.score[[1, 4]])
    assert kv_reasoning.reasoning_table(report)[4]["written"] == report.result.texts[4]


def test_composition_curves(reports: dict[str, Report]) -> None:
    report = reports["compose"]
    result, lines = report.result, kv_compose.figure(report).data
    assert len(lines) == 4 and list(lines[0].x) == ["K = 0", "K = 2", "K = 8", "K = all"]
    np.testing.assert_array_equal(lines[0].y, result.cosine[:4])
    assert list(lines[1].x) == ["K = 0", "K = 2", "K = all"] and list(lines[3].x) == ["not rotated", "no block"]
    times = kv_compose.compose_times(report, "dark").data
    order = np.argsort(result.lengths)
    np.testing.assert_allclose(times[0].y, result.timing.full[order] * 1000)
    assert len(times) == 5 and times[2].y[0] == pytest.approx(
        result.timing.seconds[result.block_length.tolist().index(5)] * 1000
    )
    assert kv_compose.compose_times(reports["untimed"]) is None
    assert len(kv_compose.compose_table(report)) == len(result.names)
    plain = dataclasses.replace(report, config=dataclasses.replace(report.config, answers=()))
    assert kv_compose.compose_table(plain)[0]["decision"] == ""
