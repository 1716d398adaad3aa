"""`engram-lab facts write | remove | list` and `engram-lab graft` as a user runs them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from engram_lab.lab.command.main import build_parser
from engram_lab.models import listing
from engram_lab.models.errors import LabError
from engram_lab.models.handle import open_model
from engram_lab.models.overlay import Fact, load_overlay, prepare
from engram_lab.probes.facts.sets import StatedFact, Writing, write
from tests import memory_lab

RIVER, MILL = "The river runs => past", "Into the old => mill"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, shipped: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    return memory_lab.make(tmp_path_factory.mktemp("lab"), shipped, tokenizer)


@pytest.fixture(autouse=True)
def lab(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "SHIPPED", models)


def command(*words: Any) -> int:
    args = build_parser().parse_args(list(map(str, words)))
    code: int = args.call(args)
    return code


def written(*words: Any) -> int:
    usual = {"--model": "engram-mini", "--steps": 3}
    return command(
        "facts", "write", *(word for name in usual.keys() - {*words} for word in (name, usual[name])), *words
    )


def test_write_list_and_remove(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "maya.safetensors"
    assert written("--fact", RIVER, "--fact", MILL, "--user", "tom", "--layer", 0, "--out", out) == 0
    overlay = load_overlay(out)
    handle = open_model("engram-mini")
    facts = [StatedFact("The river runs", " past"), StatedFact("Into the old", " mill")]
    assert overlay == write(handle, facts, Writing("tom", 0, steps=3))[0]
    said = capsys.readouterr().out
    assert f"{out}: 2 facts of tom, {overlay.n_rows} rows at layer 0, {out.stat().st_size} bytes" in said
    assert command("facts", "list", out) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"tom: 2 facts, {overlay.n_rows} rows; layers 0; optimised; for the model")
    alone = overlay.n_rows - overlay.without(Fact("The river runs", " past")).n_rows
    assert re.search(rf"^ +{alone} rows of its own  The river runs => past$", said, re.M)
    rest = tmp_path / "rest.safetensors"
    assert command("facts", "remove", out, "--fact", RIVER, "--out", rest) == 0
    assert load_overlay(rest) == overlay.without(Fact("The river runs", " past"))
    assert load_overlay(out) == overlay  # as it was
    assert command("facts", "remove", out, "--fact", RIVER, "--fact", MILL) == 0
    assert load_overlay(out).facts == () and load_overlay(out).n_rows == 0
    prepare(handle, load_overlay(out))
    assert command("facts", "list", out) == 0


def test_a_file_of_facts(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "facts.csv").write_text("trigger,answer\nThe river runs,past\nAnd the river runs,into\n")
    out = tmp_path / "o.safetensors"
    assert written("--facts", tmp_path / "facts.csv", "--out", out) == 0
    assert [fact.answer for fact in load_overlay(out).facts] == [" past", " into"]
    assert "address the same rows: one vector for both" in capsys.readouterr().err


def test_bad_input_is_one_sentence_and_nothing_is_written(tmp_path: Path) -> None:
    out = tmp_path / "o.safetensors"
    (tmp_path / "bad.jsonl").write_text("{")
    written("--fact", RIVER, "--out", tmp_path / "good.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "good.safetensors").read_bytes()[:-9])
    before = sorted(tmp_path.iterdir())
    for words, sentence in (
        (("--fact", "no arrow", "--out", out), "is not a fact"),
        (("--fact", " => x", "--out", out), "empty trigger"),
        (("--fact", "The river =>", "--out", out), "empty answer"),
        (("--fact", "a => b", "--fact", "a => c", "--out", out), "two answers"),
        (("--facts", tmp_path / "bad.jsonl", "--out", out), "as its fact 1"),
        (("--fact", RIVER, "--layer", 1, "--out", out), "no memory at layer 1"),
        (("--fact", RIVER, "--method", "magic", "--out", out), "not a method"),
        (("--fact", RIVER, "--steps", -1, "--out", out), "number of steps"),
        (("--fact", RIVER, "--user", "", "--out", out), "no name"),
        (("--fact", RIVER, "--rate", "1e38", "--out", out), "rate must be above 0"),
        (("--fact", RIVER, "--out", tmp_path), "a folder: name a file"),
        (("--fact", RIVER, "--out", tmp_path / "no" / "o"), "There is no folder"),
        (("--fact", RIVER, "--model", "dense-mini", "--out", out), "no Engram memory"),
    ):
        with pytest.raises(LabError, match=sentence) as caught:
            written(*words)
        assert str(caught.value).endswith(".") and "\n" not in str(caught.value)
    for words, sentence in (
        (("list", tmp_path / "none"), "no overlay to read"),
        (("list", tmp_path / "cut.safetensors"), "not an overlay of this lab, or damaged"),
        (("remove", tmp_path / "good.safetensors", "--fact", MILL), "has no fact"),
        (("remove", tmp_path / "good.safetensors", "--fact", RIVER, "--fact", MILL), "has no fact"),
    ):
        with pytest.raises(LabError, match=sentence):
            command("facts", *words)
    assert sorted(tmp_path.iterdir()) == before
    assert len(load_overlay(tmp_path / "good.safetensors").facts) == 1


def test_graft_a_memory(tmp_path: Path, models: Path, capsys: Capture) -> None:
    out = tmp_path / "grafted"
    base = models / "dense-mini"
    assert command("graft", "--base", base, "--layer", 2, "--layer", 0, "--rows", 100, "--out", out) == 0
    assert "an empty memory before layers 0, 2" in capsys.readouterr().out
    made, plain = open_model(str(out)), open_model(str(base))
    ids = [made.encode("The river runs past the old mill")]
    assert made.engram_layers == (0, 2) and torch.equal(made.residuals(ids).logits, plain.residuals(ids).logits)
    for words, sentence in (
        (("--base", base, "--layer", 1, "--out", out), "exists already"),
        (("--base", base, "--layer", 7, "--out", tmp_path / "new"), "cannot go to"),
        (("--base", base, "--layer", 1, "--rows", 0, "--out", tmp_path / "new"), "rows_per_head"),
        (("--base", "engram-mini", "--layer", 1, "--out", tmp_path / "new"), "has a memory already"),
        (("--base", tmp_path / "none", "--layer", 1, "--out", tmp_path / "new"), "none"),
    ):
        with pytest.raises(LabError, match=sentence):
            command("graft", *words)
    assert not (tmp_path / "new").exists()
