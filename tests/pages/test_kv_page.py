"""The page on the KV cache, on tiny models and a library of two: every experiment and widget, exports, bad input."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from engram_lab.lab.app import runner
from engram_lab.lab.ask import scenarios
from engram_lab.lab.command.main import build_parser
from engram_lab.lab.fronts import front
from engram_lab.models.errors import LabError
from engram_lab.models.handle import Handle
from engram_lab.pages import kv_edits, kv_runs
from engram_lab.probes.kv import compose, erratum, knockout, reasoning, swap
from engram_lab.probes.kv import map as kv_map
from engram_lab.probes.kv import set as kv_set
from engram_lab.probes.kv.compose import ComposeConfig
from engram_lab.probes.kv.erratum import ErratumConfig
from engram_lab.probes.kv.knockout import KnockoutConfig
from engram_lab.probes.kv.map import MapConfig
from engram_lab.probes.kv.reasoning import ReasoningConfig
from engram_lab.probes.kv.scenario import Scenario
from engram_lab.probes.kv.set import SetConfig
from engram_lab.probes.kv.swap import SwapConfig
from tests.lab.fronts.test_export import words
from tests.pages.driving import change, chart, clean, command, numbers, open_page, sentence, table
from tests.probes.kv.tiny import RIVER, right

ONE = ("engram-mini",)


@pytest.fixture(scope="module")
def look(pair: list[Handle]) -> Scenario:
    """A scenario that the tiny Engram gets right."""
    return right(pair[0], dataclasses.replace(
        RIVER, id="look", kind="lookup", third="sea", erratum="It is the river.", irrelevant="The mill is old.",
        wrong="It is the sea.",
    ))  # fmt: skip


@pytest.fixture(scope="module")
def rule(look: Scenario) -> Scenario:
    """One that it gets wrong: the answers are the wrong way round."""
    return dataclasses.replace(
        look, id="rule", kind="rule", answer_old=look.answer_new, answer_new=look.answer_old, erratum="It is old."
    )


@pytest.fixture(autouse=True)
def lab_of_tiny_models(
    lab_of_twins: Path, look: Scenario, rule: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    library = tmp_path / "library.jsonl"
    library.write_text(scenarios.written((look, rule)), encoding="utf-8")
    monkeypatch.setattr(scenarios, "LIBRARY", library)
    scenarios.library.cache_clear()
    yield
    scenarios.library.cache_clear()


def asked(at: AppTest) -> Any:
    """The request that the shown command makes."""
    args = build_parser().parse_args(words(command(at)))
    return front(f"kv {command(at).split()[3]}").ASK.config(args)


def said(at: AppTest) -> str:
    return " ".join(m.value for m in (*at.markdown, *at.success, *at.warning, *at.info)).replace("\\", "")


def heights(at: AppTest, key: str) -> np.ndarray:
    return np.concatenate([numbers(trace["y"]) for trace in chart(at, key)["data"]])


def test_the_ladder_is_the_probes(pair: list[Handle], look: Scenario) -> None:
    at = clean(open_page("kv"))
    config = SwapConfig(ONE, look, align="split")
    report = swap.run(pair[:1], config)
    result = report.result
    assert asked(at) == config
    wanted = [
        result.random_mean[result.random_k.tolist().index(int(result.k[n]))] if step == "random" else
        result.effects.recovery[n] for n, step in enumerate(result.steps) if result.draw[n] <= 0
    ]  # fmt: skip
    np.testing.assert_allclose(heights(at, "ladder"), wanted, atol=1e-6)
    assert result.oracle.both and at.success and result.said in said(at)
    (chips,) = [e.proto.body for e in at.get("html") if 'role="list"' in e.proto.body]
    assert chips.count("chip field") == len(result.pair.field) and "recovers" in chips
    assert any("gives the same bits as the clean old prompt" in c.value for c in at.caption)
    change(at, "selectbox", "kind", "rule")
    assert asked(at).scenario.id == "rule" and "look" not in at.selectbox(key="scenario").options


def test_a_wrong_model_is_told_in_place_of_a_claim(rule: Scenario) -> None:
    at = clean(open_page("kv", scenario="rule"))
    assert not at.success and "No claim can be made of this cache" in at.warning[0].value
    assert "recovers" not in " ".join(m.value for m in at.markdown)
    assert asked(at).scenario == rule


def test_an_edit_has_its_own_id_and_goes_back(look: Scenario) -> None:
    at = change(clean(open_page("kv")), "text_input", "new.look", "sea")
    edited = dataclasses.replace(look, new="sea", id="look-edited", kind="own")
    assert asked(at).scenario == edited
    clean(at.button(key="undo").click().run())
    assert asked(at).scenario == look and not [b for b in at.button if b.key == "undo"]
    change(at, "selectbox", "scenario", "your own")
    assert asked(at).scenario == dataclasses.replace(look, id="own", kind="own")


def test_a_link_reopens_the_request(look: Scenario) -> None:
    query = {"experiment": "Map", "scenario": "rule", "new.rule": "sea", "groups": "2", "part": "K alone"}
    config = asked(clean(open_page("kv", **query)))
    assert isinstance(config, MapConfig) and (config.groups, config.part) == (2, "k")
    assert (config.scenario.id, config.scenario.new) == ("rule-edited", "sea")
    config = asked(clean(open_page("kv", experiment="Swap", sizes=["1", "16"])))
    assert config.last == config.best == config.random == (1, 16)


def test_the_map(pair: list[Handle], look: Scenario) -> None:
    at = clean(open_page("kv", experiment="Map"))
    config = MapConfig(ONE, look, 3, align="split")
    report = kv_map.run(pair[:1], config)
    assert asked(at) == config
    (cells,) = [t for t in chart(at, "map")["data"] if t["type"] == "heatmap"]
    np.testing.assert_allclose(numbers(cells["z"]), report.result.recovery, atol=1e-6)
    field = report.result.pair.field_start
    for position, group, name in ((field, 1, "1"), (0, 0, "0")):
        change(at, "number_input", "kv_pos", position)
        change(at, "selectbox", "kv_group", name)
        assert kv_edits.cell(report, position, group) in said(at)
    assert "both caches are the same" in kv_edits.cell(report, 0, 0)
    best = int(report.result.recovery[:, field].argmax())
    assert kv_edits.cell(report, field, -1) == kv_edits.cell(report, field, best)


def test_knock_outs(pair: list[Handle], look: Scenario) -> None:
    at = clean(open_page("kv", experiment="Knock-out"))
    config = KnockoutConfig(ONE, look, align="split")
    result = knockout.run(pair[:1], config).result
    assert asked(at) == config
    drawn = np.concatenate([numbers(t["x"]) for t in chart(at, "knockouts")["data"]])
    np.testing.assert_allclose(np.sort(drawn), np.sort(result.margin), atol=1e-5)
    assert len(result.anecdotes) == 3 and all(own.said in said(at) for own in result.anecdotes)
    change(at, "pills", "hows", [])
    assert "Pick at least one" in at.info[-1].value


def test_errata(pair: list[Handle], look: Scenario) -> None:
    at = clean(open_page("kv", experiment="Erratum"))
    config = ErratumConfig(ONE, look, align="split")
    result = erratum.run(pair[:1], config).result
    assert asked(at) == config
    old = numbers(chart(at, "errata")["data"][0]["y"])
    np.testing.assert_allclose(old[1:-1], result.effects.prob_old, atol=1e-6)
    if result.chain is None:
        assert result.no_chain in said(at)
    at = change(at, "text_input", "chain", f"river={look.answer_new}; sea= Japan")
    config = dataclasses.replace(
        config, chain=(("river", look.answer_new.strip()), ("sea", "Japan")), wording="It is the {value}."
    )
    change(at, "text_input", "wording", config.wording)
    chain = erratum.run(pair[:1], config).result.chain
    assert asked(at) == config and chain is not None
    for trace, computed in zip(chart(at, "timeline")["data"], chain.computed, strict=True):
        np.testing.assert_array_equal(numbers(trace["y"]), computed.cumsum())
    change(at, "text_input", "chain", "")
    with pytest.raises(LabError, match=r'^"sea" is no correction of a chain: write VALUE=ANSWER'):
        kv_runs.chain_of("a=b; sea")


def test_reasoning(pair: list[Handle], look: Scenario) -> None:
    at = clean(open_page("kv", experiment="Reasoning", written=["0", "2"]))
    config = ReasoningConfig(ONE, look, (0, 2), align="split")
    result = reasoning.run(pair[:1], config).result
    assert asked(at) == config
    np.testing.assert_allclose(np.sort(heights(at, "reasoning")), np.sort(result.effects.score), atol=1e-5)
    assert list(table(at, "written")["written"]) == list(result.texts)


def test_composition(pair: list[Handle]) -> None:
    at = clean(open_page("kv", experiment="Compose", lengths=["16"], again=["0", "2"], decide=""))
    config = ComposeConfig(ONE, answers=(), recompute=(0, 2), lengths=(16,))
    result = compose.run(pair[:1], config).result
    assert asked(at) == config and result.said in said(at)
    np.testing.assert_allclose(np.sort(heights(at, "compose")), np.sort(result.cosine), atol=1e-5)


def test_the_whole_library(pair: list[Handle], look: Scenario, rule: Scenario) -> None:
    at = clean(open_page("kv", experiment="Whole library", bootstrap="100"))
    config = SetConfig(ONE, (look, rule), bootstrap=100)
    result = kv_set.run(pair[:1], config).result
    assert asked(at) == config
    assert "gets both clean prompts of 1 of the 2 scenarios right; 0 were refused" in said(at)
    assert list(table(at, "reads")["kind"]) == list(result.kind_names)
    assert list(table(at, "why not")["why not"]) == list(result.reasons)
    other = dataclasses.replace(look, id="mine")
    at.file_uploader(key="kv_file").set_value([("mine.jsonl", scenarios.written([other]).encode(), "text/plain")])
    assert "of 1 of the 1 scenarios" in said(clean(at.run())) and "--scenarios=scenarios.jsonl" in command(at)
    at.toggle(key="chat_all").set_value(True)
    assert "chat template" in sentence(at.run())


def test_a_file_of_scenarios(look: Scenario) -> None:
    at = clean(open_page("kv"))
    mine = [dataclasses.replace(look, new=new, id=name) for new, name in (("sea", "look"), ("mill", "two"))]
    file = ("mine.jsonl", scenarios.written(mine).encode(), "text/plain")
    at.file_uploader(key="kv_file").set_value([file])
    assert asked(clean(at.run())).scenario == mine[0]
    change(at, "selectbox", "scenario", "two")
    assert asked(at).scenario == mine[1]
    at.file_uploader(key="kv_file").set_value([("bad.jsonl", b"{}", "text/plain")])
    assert "bad.jsonl has no JSON object" in sentence(at.run())
    assert at.file_uploader, "the file can be taken away"


@pytest.mark.parametrize(
    ("kind", "key", "value", "says"),
    [
        ("text_area", "template.look", "no field", "0 times {field}"),
        ("text_area", "template.look", "Paris is the {field}", "put text behind the field"),
        ("text_input", "new.look", "capital", "two different values"),
        ("text_input", "answer_new.look", "", "two different answers"),
        ("toggle", "chat.look", True, "no chat template"),
    ],
)
def test_bad_input_is_one_sentence(kind: str, key: str, value: Any, says: str) -> None:
    at = open_page("kv")
    getattr(at, kind)(key=key).set_value(value)
    assert says in sentence(at.run())


def test_a_stronger_model_is_used_where_it_is_here(shipped: Path, tmp_path: Path) -> None:
    shutil.copytree(shipped / "dense-mini", tmp_path / "cache" / "models" / "smollm2-135m")
    at = clean(open_page("kv", against="smollm2-135m"))
    assert "engram-mini is far too weak" in at.info[0].value.replace("\\", "")
    at.button(key="use_model").click().run()
    assert clean(at).selectbox(key="model").value == "smollm2-135m" and asked(at).models == ("smollm2-135m",)
    assert at.selectbox(key="against").value == runner.NOTHING
    assert "too weak" not in said(at), "nothing is offered beside it"


def test_a_download_that_fails_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = clean(open_page("kv"))
    assert at.button(key="get_model").label == "Get SmolLM2-135M-Instruct"
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("ENGRAM_LAB_CACHE", str(tmp_path / "file"))
    at.button(key="get_model").click().run()
    assert "smollm2-135m" in sentence(at) and command(at), "the page goes on without it"
    assert clean(at.run()).button(key="get_model")


def test_a_download_that_ends_is_used(shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has brought the model by the time of the click: it is found whole, and offered for use."""
    at = clean(open_page("kv"))
    shutil.copytree(shipped / "dense-mini", tmp_path / "cache" / "models" / "smollm2-135m")
    at.button(key="get_model").click().run()
    assert clean(at).button(key="use_model").label == "Use SmolLM2-135M-Instruct"


def test_the_library_can_be_taken_along(look: Scenario, rule: Scenario) -> None:
    at = change(clean(open_page("kv")), "text_input", "new.look", "sea")
    (button,) = [b for b in at.get("download_button") if "scenarios" in b.proto.label]
    assert button.proto.label == "3 scenarios"
    assert json.loads(scenarios.written([asked(at).scenario]))["new"] == "sea"
