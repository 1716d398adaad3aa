"""Facts from files and from the command line, and the facts probes as flags and rows that give the request back."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engram_lab.lab.ask import facts as facts_files
from engram_lab.lab.ask import flags
from engram_lab.lab.ask.texts import held_out
from engram_lab.lab.fronts import facts_check, facts_density, facts_layers
from engram_lab.models.errors import LabError
from engram_lab.probes.base import Report
from engram_lab.probes.facts.check import CheckConfig
from engram_lab.probes.facts.density import DensityConfig
from engram_lab.probes.facts.layers import LayersConfig
from engram_lab.probes.facts.sets import Expected, StatedFact, Writing, write
from tests.probes.facts.test_sets import FACTS
from tests.probes.facts.test_sets import handle as handle  # the fixture

OWN = (
    StatedFact("A \"quoted\" 'trigger' & $HOME", " it's <b>", ("one | two",), (Expected("x, y", " z"),), None, "own"),
    StatedFact("naïve 東京", " 👍🏽", composition=Expected("a => b", " c")),
)


def parsed(front: ModuleType, words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    front.ASK.add_arguments(parser)
    flags.add_outputs(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("front", "config"),
    [
        (
            facts_check,
            CheckConfig(("m",), OWN, Writing("o'neil", 2, "closed_form", 3, 0.25, 0.5), ("a", "b"), 4, 9),
        ),
        (facts_check, CheckConfig(("a 'b",), OWN, texts=())),
        (facts_density, DensityConfig(("m",), OWN, Writing("u", 1), (1, 2), False, 2, 5)),
        (facts_layers, LayersConfig(("m",), OWN, Writing("u", steps=0), (4, 1), 2, 5)),
        (facts_layers, LayersConfig(("m",), OWN)),
    ],
)
def test_the_flags_of_a_request_make_it_again(
    front: ModuleType, config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in front.ASK.files(config).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert front.ASK.config(parsed(front, shlex.split(" ".join(front.ASK.options(config))))) == config


def test_what_ships_is_the_default_and_needs_no_file() -> None:
    config = facts_check.ASK.config(parsed(facts_check, ["--model=m"]))
    assert config.facts == facts_files.persona() and len(config.facts) == 50 and config.writing == Writing("maya")
    assert config.texts == held_out()[:40] and facts_check.ASK.files(config) == {}
    assert facts_check.ASK.config(parsed(facts_check, facts_check.ASK.options(config))) == config
    assert all(len(own.paraphrases) == len(own.neighbours) == 2 for own in config.facts)
    assert facts_files.read(facts_files.written(config.facts).encode(), "again.jsonl") == config.facts
    few = facts_check.ASK.config(parsed(facts_check, ["--model=m", "--n-texts=3", "--fact=a b => c", "--fact=d=>e f"]))
    assert few.facts == (StatedFact("a b", " c"), StatedFact("d", " e f")) and few.texts == held_out()[:3]
    assert facts_density.ASK.config(parsed(facts_density, ["--model=m"])).sizes == (1, 2, 5, 10, 20, 50)


def test_an_overlay_brings_its_facts(tmp_path: Path, handle: Any) -> None:
    overlay, _ = write(handle, FACTS[:2], Writing("tom", layer=1, method="closed_form"))
    overlay.save(tmp_path / "o.safetensors")
    given = parsed(facts_check, ["--model=m", f"--overlay={tmp_path / 'o.safetensors'}", "--rate=.25"])
    config = facts_check.ASK.config(given)
    assert [own.fact for own in config.facts] == list(overlay.facts)
    assert config.writing == Writing("tom", 1, "closed_form", rate=0.25)
    with pytest.raises(LabError, match="brings its own facts"):
        facts_check.ASK.config(parsed(facts_check, ["--model=m", "--overlay=x", "--fact=a => b"]))
    with pytest.raises(LabError, match="no overlay to read"):
        facts_check.ASK.config(parsed(facts_check, ["--model=m", f"--overlay={tmp_path / 'none'}"]))


def test_a_table_of_facts() -> None:
    text = (
        "trigger,answer,paraphrases,neighbours,composition,id\n"
        '"Maya, the cat, is",black,One | Two,a => b | c d => e,f => g,cat\n'
        "Tom is, tall,,,,\n"
    )
    one, two = facts_files.read(text.encode("utf-8-sig"), "t.CSV")
    assert one == StatedFact(
        "Maya, the cat, is", " black", ("One", "Two"), (Expected("a", " b"), Expected("c d", " e")),
        Expected("f", " g"), "cat",
    )  # fmt: skip
    assert two == StatedFact("Tom is", " tall")
    assert facts_files.read(b"a => b\n\nc => d e\n", "t.txt")[1] == StatedFact("c", " d e")


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("t.jsonl", "[1]", "as its fact 1"),
        ("t.jsonl", '{"trigger": "a", "answer": "b"}\n{', "as its fact 2"),
        ("t.jsonl", '{"trigger": "a"}', "empty answer"),
        ("t.jsonl", '{"trigger": " ", "answer": "b"}', "empty trigger"),
        ("t.jsonl", '{"trigger": 3, "answer": "b"}', "must be texts"),
        ("t.jsonl", '{"trigger": "a", "answer": "b", "colour": 1}', 'has "colour"'),
        ("t.jsonl", '{"trigger": "a", "answer": "b", "paraphrases": "x"}', "must be a list of texts"),
        ("t.jsonl", '{"trigger": "a", "answer": "b", "neighbours": [1]}', '"prompt" and "answer"'),
        ("t.jsonl", '{"trigger": "a", "answer": "b", "neighbours": {"prompt": "x"}}', '"prompt" and "answer"'),
        ("t.jsonl", '{"trigger": "a", "answer": "b", "composition": []}', '"prompt" and "answer"'),
        ("t.jsonl", '{"trigger": "a", "answer": "b"}\n' * 2, 'the fact "a b" twice'),
        ("t.csv", "a,b\n1,2", 'no columns "trigger" and "answer"'),
        ("t.csv", "trigger,answer\na", "another number of columns"),
        ("t.csv", "trigger,answer\na,b,c", "another number of columns"),
        ("t.csv", "trigger,answer", "holds no fact"),
        ("t.csv", 'trigger,answer\n"a"b,c', "is no CSV file"),
        ("t.csv", "trigger,answer,neighbours\na,b,no arrow", '"prompt" and "answer"'),
        ("t.csv", "trigger,answer\n,b", "empty trigger"),
        ("t.txt", "no arrow", "is not a fact"),
        ("t.txt", " \n", "holds no text"),
    ],
)
def test_a_file_that_is_none_is_one_sentence(name: str, text: str, match: str) -> None:
    with pytest.raises(LabError, match=match) as caught:
        facts_files.read(text.encode(), name)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    with pytest.raises(LabError, match="is not UTF-8"):
        facts_files.read(b"caf\xe9", name)


@pytest.fixture(scope="module")
def reports(handle: Any) -> dict[str, Report]:
    from engram_lab.probes.facts import check, density, layers

    writing = Writing("maya", 1, steps=4)
    return {
        "check": check.run([handle], CheckConfig(("llama",), FACTS, writing, ("the sea",), bootstrap=9)),
        "density": density.run([handle], DensityConfig(("llama",), FACTS, writing, (1, 3), False, bootstrap=9)),
        "layers": layers.run([handle], LayersConfig(("llama",), FACTS, Writing(steps=4), (1, 2), bootstrap=9)),
    }


def test_rows_are_tidy_and_hold_the_figures(reports: dict[str, Report]) -> None:
    for name, front in (("check", facts_check), ("density", facts_density), ("layers", facts_layers)):
        rows = list(front.rows(reports[name]))
        assert len({tuple(row) for row in rows}) == 1 and json.dumps(rows)
    rows, result = list(facts_check.rows(reports["check"])), reports["check"].result
    parts = (result.facts, result.paraphrases, result.neighbours, result.compositions, result.aliases)
    assert len(rows) == sum(len(own.prompts) for own in parts)
    assert [row["kind"] for row in rows[: len(FACTS) + 1]] == ["fact"] * len(FACTS) + ["paraphrase"]
    assert rows[0]["fact"] == "river" and rows[1]["fact"] == 1
    assert rows[2]["probability_after"] == result.facts.probability_after[2]
    told = [row["likelier_than_rival_after"] for row in rows if row["kind"] == "neighbour"]
    assert told[1] == "" and isinstance(told[0], bool)
    rows, result = list(facts_density.rows(reports["density"])), reports["density"].result
    assert len(rows) == result.n_facts.sum() and rows[0]["top1"] == result.fact_top1[0, 0]
    rows, result = list(facts_layers.rows(reports["layers"])), reports["layers"].result
    assert rows[6]["layer"] == 2 and rows[6]["value"] == result.top1[1] and rows[6]["figure"] == "top1"
