"""The CKA page and its command, on tiny models: every widget, files of all kinds, exports, bad input."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from engram_lab.lab.app import runner
from engram_lab.lab.command.main import build_parser, main
from engram_lab.lab.fronts import cka as front
from engram_lab.lab.fronts import cka_figures, export
from engram_lab.models.errors import LabError
from engram_lab.models.handle import Handle
from engram_lab.probes import cka
from engram_lab.probes.cka import CKAConfig
from engram_lab.probes.points import read_sentences, take, to_json_lines
from tests.lab.fronts.test_export import words
from tests.pages.driving import change, chart, clean, command, numbers, open_page, sentence

BIO = "\n".join(
    "\n".join(f"{word} {tag}" for word, tag in zip(line.split(), tags.split(), strict=True)) + "\n"
    for line, tags in (
        ("The old mill at Paris .", "O B-a I-a O B-b O"),
        ("Tokyo is in Japan", "B-b O O B-b"),
        ("the river runs past Paris", "O B-a O O B-b"),
        ("France and the sea", "B-b O O B-a"),
        ("Japan and Tokyo", "B-b O B-b"),
    )
)
PLAIN = (
    "The river runs past the old mill\nParis is the capital of France\nand into the sea\nTokyo and Japan\nthe mill\n"
)


pytestmark = pytest.mark.usefixtures("lab_of_twins")


@pytest.fixture
def at() -> AppTest:
    """The page with a small file, so that no test runs all that ships."""
    page = open_page("cka", bootstrap="100", sentences="5")
    return bring(clean(page), BIO.encode())


def bring(at: AppTest, raw: bytes, key: str = "cka_file", name: str = "mine.bio") -> AppTest:
    at.file_uploader(key=key).set_value([(name, raw, "text/plain")])
    return clean(at.run())


def cells(at: AppTest, key: str = "map") -> np.ndarray:
    (found,) = [t for t in chart(at, key)["data"] if t["type"] == "heatmap"]
    return numbers(found["z"]).T  # [layer_a, layer_b]


def line(at: AppTest, key: str, name: str) -> np.ndarray:
    (found,) = [t for t in chart(at, key)["data"] if t["name"] == name]
    return numbers(found["y"])


def everything(at: AppTest) -> Any:
    """All that the page draws and says."""
    charts = [chart(at, key) for key in ("map", "alignment", "lead", "lens_curves")]
    return json.dumps(charts), [m.value for m in at.markdown], command(at), len(at.get("plotly_chart"))


def test_the_page_shows_the_probe(at: AppTest, pair: list[Handle]) -> None:
    texts, entities = take(read_sentences(BIO.encode(), "x"), "entity")
    config = CKAConfig(("engram-mini", "dense-mini"), texts, entities, bootstrap=100)
    report = cka.run(pair, config)
    result = report.result
    np.testing.assert_allclose(cells(at), result.cka, atol=1e-6)
    np.testing.assert_allclose(line(at, "map", "soft alignment"), result.alignment_a, atol=1e-5)
    np.testing.assert_allclose(line(at, "alignment", "dense-mini in engram-mini"), result.alignment_b, atol=1e-5)
    np.testing.assert_allclose(line(at, "lead", "lead"), result.lead, atol=1e-5)
    assert chart(at, "lens_curves")["data"], "the lens of the same pair stands beside it"
    said = " ".join(m.value for m in at.markdown).replace("\\", "")
    assert cka.looks_like(report, at.selectbox(key="layer_a").value) in said
    assert any(f"{result.n_points} points of 5 sentences" in c.value for c in at.caption)
    verdict = cka_figures.deeper(report, None).partition(": ")[2].rstrip(".").replace("\\", "")
    assert verdict in said


def test_the_biased_values_stand_beside(at: AppTest, pair: list[Handle]) -> None:
    change(at, "toggle", "biased", True)
    texts, entities = take(read_sentences(BIO.encode(), "x"), "entity")
    result = cka.run(pair, CKAConfig(("engram-mini", "dense-mini"), texts, entities)).result
    np.testing.assert_allclose(cells(at, "biased_map"), result.biased, atol=1e-6)
    np.testing.assert_allclose(cells(at), result.cka, atol=1e-6)
    off = result.biased - result.cka
    assert any(f"{off.mean():+.4f} on average" in m.value for m in at.markdown)


def test_one_model_is_offered_itself(at: AppTest) -> None:
    at.selectbox(key="against").set_value(runner.NOTHING)
    clean(at.run())
    assert "pick a second one in the sidebar" in at.info[0].value and not at.get("plotly_chart")
    change(at, "toggle", "itself", True)
    np.testing.assert_allclose(np.diag(cells(at)), 1, atol=1e-6)
    assert "--against=engram-mini" in command(at)
    said = " ".join(m.value for m in at.markdown).replace("\\", "")
    assert "of engram-mini (A) looks like" in said and "with itself, so neither is deeper" in said


def test_a_plain_file_has_no_entities(at: AppTest) -> None:
    bring(at, PLAIN.encode(), name="mine.txt")
    assert at.selectbox(key="points").options == ["all tokens", "ends of texts"]
    assert at.number_input(key="sentences").value == 5
    assert "--prompts=sentences.jsonl" in command(at) and "--points=all" in command(at)


def test_a_packed_file(at: AppTest) -> None:
    before = cells(at)
    bring(at, lzma.compress(BIO.encode()), name="mine.bio.xz")
    assert np.array_equal(cells(at), before)


def test_two_sets_of_texts(at: AppTest) -> None:
    bring(at, PLAIN.encode(), name="mine.txt")
    change(at, "selectbox", "points", "ends of texts")
    before = cells(at)
    bring(at, PLAIN.replace("the", "a").encode(), "cka_file_b", "other.txt")
    assert "--prompts-b=sentences_b.jsonl" in command(at)
    assert not np.array_equal(cells(at), before)


def test_a_constant_layer_is_named(at: AppTest) -> None:
    bring(at, PLAIN.replace("\n", ".\n").encode(), name="mine.txt")
    change(at, "selectbox", "points", "ends of texts")
    assert "Layer embed of engram-mini is the same at all 5 points" in at.info[0].value.replace("\\", "")
    assert cells(at).shape == (3, 3)


@pytest.mark.parametrize(
    ("raw", "says"), [(b"\xff\xfe\x00caf\xe9", "UTF-8"), (b"\n \n", "no text"), (b"a\n", "at least 4 points")]
)
def test_a_bad_file_is_one_sentence(at: AppTest, raw: bytes, says: str) -> None:
    at.file_uploader(key="cka_file").set_value([("bad.txt", raw, "text/plain")])
    assert says in sentence(at.run())


def test_a_link_reopens_the_request() -> None:
    query = {"points": "all tokens", "sentences": "5", "seed": "4", "bootstrap": "100"}
    at = clean(open_page("cka", **query, layer_a="0", biased="true"))
    assert at.selectbox(key="points").value == "all tokens" and at.selectbox(key="layer_a").value == "0"
    assert cells(at, "biased_map").shape == (4, 4)
    assert all(flag in command(at) for flag in ("--points=all", "--max-sentences=5", "--seed=4", "--bootstrap=100"))


def test_an_unchanged_request_runs_no_model(at: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handle, "residuals", lambda *_: pytest.fail("a model ran"))
    before = everything(at)
    assert everything(clean(at.run())) == before
    change(at, "selectbox", "layer_a", "1")


def test_the_command_gives_the_request_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("a model", "b")
    bio = take(read_sentences(BIO.encode(), "x"), "entity")
    plain = tuple(PLAIN.split("\n")[:4])
    for config in (
        CKAConfig(names, *take(front.shipped(), "entity", 7), seed=3, bootstrap=200),
        CKAConfig(names, *take(front.shipped(), "last"), points="last"),
        CKAConfig(names, *bio),
        CKAConfig(names, plain, None, "all"),
        CKAConfig(names, plain, None, "last", plain[::-1]),
    ):
        files = export.files("cka", config)
        for name, text in files.items():
            Path(name).write_text(text, encoding="utf-8")
        again = front.ASK.config(build_parser().parse_args(words(export.command_line("cka", config))))
        assert again == config
    assert front.ASK.files(CKAConfig(names, *take(front.shipped(), "entity", 7))) == {}


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.bio"
    file.write_text(BIO, encoding="utf-8")
    base = ["probe", "cka", "--model", "engram-mini", "--against", "dense-mini", "--bootstrap", "50"]
    assert main([*base, "--entities", str(file), "--json", "-", "--csv", str(tmp_path / "rows.csv")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["config"]["points"] == "entity" and np.shape(report["result"]["cka"]) == (4, 4)
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 17
    assert main([*base, "--entities", str(file), "--points", "all", "--max-sentences", "3"]) == 0
    assert json.loads(capsys.readouterr().out)["result"]["n_sentences"] == 3
    assert main([*base, "--max-sentences", "20"]) == 0
    assert len(json.loads(capsys.readouterr().out)["config"]["prompts"]) == 20
    for more, says in (
        (["--entities", str(tmp_path / "none.bio")], "none.bio"),
        (["--max-sentences", "0"], "must be 1 or more"),
        (["--prompts", str(file), "--prompts-b", str(file), "--points", "all"], 'choose the points "last"'),
    ):
        assert main([*base, *more]) == 2
        told = capsys.readouterr().err
        assert says in told and told.count("\n") == 1


def test_a_file_without_entities_is_told(tmp_path: Path, pair: list[Handle]) -> None:
    file = tmp_path / "plain.txt"
    file.write_text(PLAIN, encoding="utf-8")
    parse = build_parser().parse_args
    base = ["probe", "cka", "--model=a", "--against=b"]
    with pytest.raises(LabError, match="marks no entity"):
        front.ASK.config(parse([*base, "--entities", str(file)]))
    assert front.ASK.config(parse([*base, "--prompts", str(file)])).points == "all"
    assert front.ASK.config(parse([*base, "--prompts", str(file), "--prompts-b", str(file)])).points == "last"
    marked = tmp_path / "marked.jsonl"
    marked.write_text(to_json_lines(["The mill"], [[(4, 8)]]), encoding="utf-8")
    assert front.ASK.config(parse([*base, "--prompts", str(marked)])).entities == (((4, 8),),)
