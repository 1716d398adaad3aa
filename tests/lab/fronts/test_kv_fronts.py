"""Scenarios from files and from the command line, and the kv probes as flags and rows that give the request back."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engram_lab.lab.ask import flags
from engram_lab.lab.ask import scenarios as kv_scenarios
from engram_lab.lab.fronts import kv_knockout, kv_map, kv_set, kv_swap
from engram_lab.models.errors import DataError
from engram_lab.probes.base import Report
from engram_lab.probes.kv.knockout import KnockoutConfig
from engram_lab.probes.kv.map import MapConfig
from engram_lab.probes.kv.scenario import Scenario
from engram_lab.probes.kv.set import SetConfig
from engram_lab.probes.kv.swap import SwapConfig
from tests.probes.kv.tiny import RIVER, opened, right

OWN = Scenario(
    'It is "{field}" & $HOME\nnow', "a b", "c 'd", "yes", "no", "own one", "rule", erratum="-- not so", chat=True
)
LOOK = dataclasses.replace(RIVER, id="look", erratum="It is the sea.")
RULE = dataclasses.replace(LOOK, id="rule", new="sea", kind="rule")


@pytest.fixture(autouse=True)
def small_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A library of two, in place of the one that ships."""
    file = tmp_path / "library.jsonl"
    file.write_text(kv_scenarios.written((LOOK, RULE)), encoding="utf-8")
    monkeypatch.setattr(kv_scenarios, "LIBRARY", file)
    kv_scenarios.library.cache_clear()
    yield file
    kv_scenarios.library.cache_clear()


def parsed(front: ModuleType, words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    front.ASK.add_arguments(parser)
    flags.add_outputs(parser)
    return parser.parse_args(words)


def again(front: ModuleType, config: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The request that its own command makes, in a folder with its files."""
    for name, text in front.ASK.files(config).items():
        (folder / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(folder)
    return front.ASK.config(parsed(front, shlex.split(" ".join(front.ASK.options(config)))))


@pytest.mark.parametrize(
    ("front", "config"),
    [
        (kv_swap, SwapConfig(("m",), LOOK)),
        (kv_swap, SwapConfig(("m",), OWN, "k", (0, 2), (3,), (), (1, 5), 2, "split", 7)),
        (kv_swap, SwapConfig(("a 'b",), dataclasses.replace(RULE, chat=True))),
        (kv_map, MapConfig(("m",), RULE, 4, "v", "split")),
        (kv_map, MapConfig(("m",), dataclasses.replace(LOOK, new="mill"))),
        (kv_knockout, KnockoutConfig(("m",), LOOK)),
        (kv_knockout, KnockoutConfig(("m",), OWN, ("notes", "positions"), ("mean",), (1, 2), "a 'text'", 2, seed=3)),
        (kv_set, SetConfig(("m",), (LOOK, RULE))),
        (kv_set, SetConfig(("m",), tuple(dataclasses.replace(s, chat=True) for s in (LOOK, RULE)), "split")),
        (kv_set, SetConfig(("m",), (OWN, LOOK), seed=2, bootstrap=5)),
    ],
)
def test_the_flags_of_a_request_make_it_again(
    front: ModuleType, config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert again(front, config, tmp_path, monkeypatch) == config


def test_a_scenario_is_named_changed_or_given(tmp_path: Path) -> None:
    def asked(*words: str) -> Scenario:
        return kv_scenarios.scenario_of(parsed(kv_swap, ["--model", "m", *words]))

    assert asked() == LOOK and asked("--scenario", "rule") == RULE
    assert asked("--scenario=rule", "--new=mill", "--chat") == dataclasses.replace(RULE, new="mill", chat=True)
    given = asked("--template=a {field} b", "--old=c", "--new=d", "--answer-old=e", "--answer-new=f")
    assert given == Scenario("a {field} b", "c", "d", "e", "f")
    file = tmp_path / "mine.jsonl"
    file.write_text(kv_scenarios.written((OWN, RULE)), encoding="utf-8")
    assert asked("--scenarios", str(file)) == OWN and asked("--scenarios", str(file), "--scenario", "rule") == RULE
    with pytest.raises(DataError, match="needs --old too"):
        asked("--template=a {field} b")
    with pytest.raises(DataError, match='no scenario "none"; there are: look, rule'):
        asked("--scenario=none")


def test_a_library_that_is_shipped_in_the_flags_only_by_its_id() -> None:
    assert kv_scenarios.scenario_flags(LOOK) == ["--scenario=look"]
    assert kv_scenarios.scenario_flags(dataclasses.replace(LOOK, chat=True)) == ["--scenario=look", "--chat"]
    assert "--new=mill" in kv_scenarios.scenario_flags(dataclasses.replace(LOOK, new="mill"))


GOOD = {"template": "a {field}", "old": "b", "new": "c", "answer_old": "d", "answer_new": "e"}


def test_what_a_file_of_scenarios_may_hold() -> None:
    def read(*objects: Any) -> tuple[Scenario, ...]:
        lines = [own if isinstance(own, str) else json.dumps(own) for own in objects]
        return kv_scenarios.read("\n\n".join(lines).encode(), "mine.jsonl")

    assert read(GOOD, GOOD | {"id": "x", "chat": True})[1] == Scenario("a {field}", "b", "c", "d", "e", "x", chat=True)
    assert [scenario.id for scenario in read(GOOD, GOOD)] == ["1", "2"]
    for objects, match in [
        (("{",), "as its scenario 1"),
        ((GOOD, "[1]"), "as its scenario 2"),
        (({"template": "a {field}"},), "as its scenario 1"),
        ((GOOD | {"old": 3},), "as its scenario 1"),
        ((GOOD | {"colour": "red"},), 'has "colour", which is not read so'),
        ((GOOD | {"chat": "yes"},), 'has "chat", which is not read so'),
        ((GOOD | {"id": "x"}, GOOD | {"id": "x"}), 'two scenarios with the id "x"'),
        ((GOOD | {"template": "none"},), "0 times"),
    ]:
        with pytest.raises(DataError, match=match):
            read(*objects)


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    from engram_lab.probes.kv import knockout as knockout_probe
    from engram_lab.probes.kv import map as map_probe
    from engram_lab.probes.kv import set as set_probe
    from engram_lab.probes.kv import swap as swap_probe

    handle = opened("llama")
    good = right(handle)
    refused = dataclasses.replace(RIVER, id="refused", new="xenon")
    return {
        "swap": swap_probe.run([handle], SwapConfig(("llama",), good, draws=2)),
        "map": map_probe.run([handle], MapConfig(("llama",), good)),
        "knockout": knockout_probe.run([handle], KnockoutConfig(("llama",), good)),
        "set": set_probe.run([handle], SetConfig(("llama",), (good, refused), bootstrap=20)),
    }


def test_rows_are_tidy_and_hold_the_figures(reports: dict[str, Report]) -> None:
    for name, front in (("swap", kv_swap), ("map", kv_map), ("knockout", kv_knockout), ("set", kv_set)):
        rows = list(front.rows(reports[name]))
        assert len({tuple(row) for row in rows}) == 1 and json.dumps(rows)
    swap, result = list(kv_swap.rows(reports["swap"])), reports["swap"].result
    assert len(swap) == len(result.names) + len(result.position)
    assert swap[0]["recovery"] == result.effects.recovery[0] and swap[0]["positions"] == "4"
    assert swap[-1]["step"] == "single" and swap[-1]["kl_nats"] == result.single.kl[-1]
    cells, result = list(kv_map.rows(reports["map"])), reports["map"].result
    assert len(cells) == result.recovery.size and cells[4]["in_field"] and not cells[3]["in_field"]
    assert cells[result.recovery.shape[1] + 4]["recovery"] == result.recovery[1, 4]
    knocked, result = list(kv_knockout.rows(reports["knockout"])), reports["knockout"].result
    assert [row["margin_logits"] for row in knocked] == result.margin.tolist()
    rows, result = list(kv_set.rows(reports["set"])), reports["set"].result
    assert rows[0]["recovery_field"] == result.recovery[0, 0] and rows[0]["oracle"] and rows[0]["reason"] == ""
    assert not rows[1]["served"] and "different numbers of tokens" in rows[1]["reason"]
    assert rows[1]["flip_field"] == "" and isinstance(rows[0]["lost_notes_zero"], bool)


def test_the_bench_compares_the_same_cells() -> None:
    from engram_lab.lab.command.bench import kv_map as bench

    figures = bench("engram-mini", groups=1, rounds=1)
    assert figures["cells"] > 5 and figures["forwards"] == 1 and figures["largest_difference_of_recovery"] < 1e-3
    assert figures["ratio"] == figures["single_seconds"] / figures["batched_seconds"] > 1


def test_the_library_that_ships(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_scenarios, "LIBRARY", Path(kv_scenarios.__file__).parents[2] / "assets/kv/scenarios.jsonl")
    kv_scenarios.library.cache_clear()
    scenarios = kv_scenarios.library()
    kinds = {scenario.kind for scenario in scenarios}
    assert len(scenarios) >= 24 and {"lookup", "derived", "rule", "comparison"} <= kinds
    assert {"none", "before", "after"} <= {scenario.distractors for scenario in scenarios}
    assert all(s.erratum and s.irrelevant and s.wrong and s.third and s.question for s in scenarios)
    assert kv_scenarios.read(kv_scenarios.written(scenarios).encode(), "again") == scenarios
