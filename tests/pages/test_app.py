"""The app through its entry, on tiny models in place of the shipped ones: every widget, every bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from engram_lab.lab.app import runner
from engram_lab.lab.ask import texts
from engram_lab.lab.command import card
from engram_lab.lab.fronts import lens_figures
from engram_lab.models import listing
from engram_lab.models.errors import LabError
from engram_lab.models.handle import Handle
from engram_lab.probes import lens as lens_probe
from engram_lab.probes import tuned_lens
from engram_lab.probes.lens import LensConfig
from tests.pages.driving import PAGES, change, chart, clean, command, numbers, open_page, sentence, table
from tests.probes.test_tuned_lens import translators

LENS = str(PAGES / "lens.py")
START = str(PAGES / "start.py")
LONG = "the old mill and the river " * 12


pytestmark = pytest.mark.usefixtures("lab_of_twins")


@pytest.fixture
def lens() -> AppTest:
    """The lens page as it opens."""
    return open_page("lens")


def curve(at: AppTest, name: str = "engram-mini") -> np.ndarray:
    (trace,) = [t for t in chart(at, "curves")["data"] if t["name"].startswith(name) and "markers" in t.get("mode", "")]
    return numbers(trace["y"])


def test_start_page_leads_to_the_first_experiment() -> None:
    at = clean(open_page("start"))
    shown = " ".join(element.value for element in (*at.markdown, *at.caption))
    assert "Engram" in shown and [m.value for m in at.metric].count("4.500") == 2, "both held-out losses"
    assert {"loss", "kl", "gates"} <= {c.key for c in at.get("plotly_chart")}
    at.button(key="example_2").click().run()
    assert clean(at).text_area(key="prompt").value == texts.examples()[2]["prompt"]
    assert chart(at, "curves")["data"]


def test_start_page_leads_to_the_text_set() -> None:
    at = open_page("start")
    at.button(key="open_set").click()
    at.session_state["texts"] = 2
    assert len(table(clean(at.run()), "texts")) == 3


def test_curves_are_those_of_the_probe(lens: AppTest, pair: list[Handle]) -> None:
    prompt = lens.text_area(key="prompt").value
    report = lens_probe.run(pair, LensConfig(("engram-mini", "dense-mini"), (prompt,)))
    for model in report.result.models:
        assert np.allclose(curve(clean(lens), model.name), model.mean_kl, atol=1e-5)


@pytest.fixture
def tuned(shipped: Path, pair: list[Handle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Translators of the tiny models, where the lens looks for a user's own."""
    monkeypatch.setenv("ENGRAM_LAB_CACHE", str(tmp_path))
    for n, name in enumerate(("engram-mini", "dense-mini")):
        handle = runner.handle(name)
        tuned_lens.save(translators(handle, 0.2, n), tuned_lens.places(handle)[0])


def test_both_lenses_are_shown_where_there_are_translators(tuned: None, lens: AppTest) -> None:
    assert clean(lens).toggle(key="tuned").value, "on by default"
    names = [t["name"] for t in chart(lens, "curves")["data"] if "markers" in t.get("mode", "")]
    assert sum("tuned lens" in name for name in names) == 2 and len(names) == 4
    assert "--tuned" in command(lens) and any(
        "fitted on 9 tokens of a.txt" in c.value.replace("\\", "") for c in lens.caption
    )
    cells, top = numbers(chart(lens, "map")["data"][0]["z"]), table(lens, "next token").values.tolist()
    change(lens, "selectbox", "layer", "0")
    change(lens, "selectbox", "lens", "tuned lens")
    assert not np.allclose(numbers(chart(lens, "map")["data"][0]["z"]), cells)
    assert table(lens, "next token").values.tolist() != top and "Tuned lens: KL" in " ".join(
        m.value for m in lens.markdown
    )
    change(lens, "toggle", "tuned", False)
    assert "--tuned" not in command(lens) and len(chart(lens, "settle")["data"]) == 2
    at = clean(text_set(lens))
    before = len(chart(at, "difference")["data"])
    assert len(chart(change(at, "toggle", "tuned", True), "difference")["data"]) == before + 2
    assert table(at, "texts").columns[-1] == "settle depth, tuned lens"


def test_without_translators_one_sentence_says_how_to_fit_them(lens: AppTest) -> None:
    toggle = clean(lens).toggle(key="tuned")
    assert toggle.disabled and not toggle.value
    said = " ".join(c.value for c in lens.caption)
    assert "engram-lab lens fit --model dense-mini --text FILE" in said


def test_a_long_prompt_is_shown_in_windows(lens: AppTest) -> None:
    change(lens, "text_area", "prompt", LONG)
    starts = lens.selectbox(key="from")
    assert len(starts.options) > 1
    first = numbers(chart(lens, "map")["data"][0]["x"])
    assert first.tolist() == list(range(64))
    second = numbers(chart(change(lens, "selectbox", "from", 64), "map")["data"][0]["x"])
    assert second[0] == 64
    # A shorter prompt has no such window any more.
    assert numbers(chart(change(lens, "text_area", "prompt", "the river"), "map")["data"][0]["x"])[0] == 0


LINES = ("The river runs", "past the old mill", "and into the sea.", "Paris is", "the capital of France,")
LINES += ("and Tokyo", "that of Japan.", "A naïve café", "and a new line.")


def text_set(at: AppTest, lines: str = "\n\n".join(LINES)) -> AppTest:
    at.segmented_control(key="mode").set_value(texts.SET)
    at.session_state["texts"] = 2
    at.run()
    at.file_uploader(key="file").upload("mine.txt", lines.encode())
    return at.run()


def test_a_text_set(lens: AppTest, pair: list[Handle]) -> None:
    at = clean(text_set(lens))
    config = LensConfig(("engram-mini", "dense-mini"), LINES, detail=False)
    report = lens_probe.run(pair, config)
    assert np.allclose(curve(at), report.result.models[0].mean_kl, atol=1e-5)
    (difference,) = [t for t in chart(at, "difference")["data"] if "markers" in t.get("mode", "")]
    assert np.allclose(numbers(difference["y"]), report.result.difference.mean_kl, atol=1e-5)
    assert table(at, "texts").to_dict("records") == lens_figures.summary(report)
    band = chart(at, "curves")["data"][0]["y"]
    for key, value in (("seed", 1), ("bootstrap", 200), ("texts", 2)):
        change(at, "number_input", key, value)
        now = chart(at, "curves")["data"][0]["y"]
        assert now != band, f"{key} changes nothing"
        band = now


def type_in(at: AppTest, key: str, value: str) -> None:
    """What a person does in the box of a model; AppTest by itself only picks from the list."""
    box = at.selectbox(key=key)
    box.options.append(value)
    box.set_value(value)


BAD = [
    ("text_area", "prompt", "", "empty"),
    ("text_area", "prompt", "the " * 2000, "640"),
    ("text_input", "target", "the old mill", "not one token"),
    ("selectbox", "model", "no-such-model", "no-such-model"),
    ("selectbox", "model", "/no/such/folder", "/no/such/folder"),
    ("selectbox", "against", "no-such-model", "no-such-model"),
    ("selectbox", "against", "engram-mini", "compared with itself"),
]


@pytest.mark.parametrize(("kind", "key", "value", "says"), BAD, ids=[f"{b[1]}-{b[3]}" for b in BAD])
def test_a_bad_request_is_one_sentence(lens: AppTest, kind: str, key: str, value: str, says: str) -> None:
    if kind == "selectbox":
        type_in(lens, key, value)
    else:
        getattr(lens, kind)(key=key).set_value(value)
    assert says in sentence(lens.run())


def test_bad_folders_and_files_are_one_sentence(lens: AppTest, tmp_path: Path, shipped: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    cut = tmp_path / "cut"
    cut.mkdir()
    for file in (shipped / "dense-mini").iterdir():
        (cut / file.name).write_bytes(file.read_bytes())
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    gguf = tmp_path / "fake.gguf"
    gguf.write_bytes(b"no gguf at all")
    for path in (empty, cut, gguf):
        type_in(lens, "model", str(path))
        assert path.name in sentence(lens.run())


@pytest.mark.parametrize(("raw", "says"), [(b"\xff\xfe\x00caf\xe9", "UTF-8"), (b"\n \n", "no text")])
def test_a_bad_file_is_one_sentence(lens: AppTest, raw: bytes, says: str) -> None:
    at = text_set(lens)
    at.file_uploader(key="file").set_value([("bad.txt", raw, "text/plain")])
    assert says in sentence(at.run())


def test_a_split_target_names_its_ids(lens: AppTest, pair: list[Handle]) -> None:
    lens.text_input(key="target").set_value("old mill")
    said = sentence(lens.run())
    for token_id in pair[0].encode("old mill")[1:]:
        assert str(token_id) in said


def test_no_models_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "SHIPPED", tmp_path)
    monkeypatch.setattr(card, "MODELS", tmp_path)
    monkeypatch.setattr(runner, "model_names", lambda: [])
    at = clean(open_page("start"))
    assert at.info
    assert "No model is chosen" in sentence(at.switch_page(LENS).run())


def test_a_failure_of_the_lab_is_no_traceback(lens: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(lens_figures, "lens_curves", broken)
    at = lens.run()
    assert "report" in sentence(at)
    assert any("a bug" in code.value for code in at.expander[-1].code)


def test_unchanged_request_runs_no_model(lens: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    clean(lens)
    monkeypatch.setattr(Handle, "residuals", lambda *_: pytest.fail("a model ran"))
    before = chart(lens, "curves")
    assert chart(clean(lens.run()), "curves") == before
    change(lens, "selectbox", "layer", "1")


def test_the_request_survives_a_change_of_page(lens: AppTest) -> None:
    change(lens, "text_area", "prompt", "the the the")
    change(lens, "selectbox", "colour", "entropy")
    lens.switch_page(START).run()
    at = clean(lens.switch_page(LENS).run())
    assert at.text_area(key="prompt").value == "the the the"
    assert at.selectbox(key="colour").value == "entropy"


def test_a_link_reopens_the_request() -> None:
    query = {"prompt": "the <mill> & $5", "target": " the", "top": "3", "against": runner.NOTHING}
    at = clean(open_page("lens", **query, colour="target rank", pos="2", layer="1"))
    config = LensConfig(("engram-mini",), ("the <mill> & $5",), " the", 3)
    from engram_lab.lab.fronts.export import command_line

    assert command(at) == command_line("lens", config)
    assert at.selectbox(key="colour").value == "target rank"
    assert (at.number_input(key="pos").value, at.selectbox(key="layer").value) == (2, "1")


def test_cancelled_runs_only_when_asked_again(lens: AppTest) -> None:
    config = LensConfig(("engram-mini", "dense-mini"), ("some other prompt",))
    opened = [runner.handle(name) for name in config.models]
    lens.session_state["cancelled"] = runner.request_key("lens", config, opened)
    lens.text_area(key="prompt").set_value("some other prompt").run()
    assert not lens.exception and "Cancelled" in lens.info[0].value
    assert not lens.get("plotly_chart")
    lens.button(key="run_again").click().run()
    assert not clean(lens).info and len(curve(lens)) == 4


def test_stopping_a_run_leaves_the_model_usable(pair: list[Handle]) -> None:
    class Stop(BaseException):
        """As Streamlit's own: no Exception."""

    def stop(*_: Any) -> None:
        raise Stop

    config = LensConfig(("engram-mini",), ("the river",))
    with pytest.raises(Stop):
        lens_probe.run(pair[:1], config, stop)
    assert lens_probe.run(pair[:1], config).result.models[0].kl.shape[0] == 4


def test_at_most_three_models_stay_open(shipped: Path, tmp_path: Path) -> None:
    import shutil

    names = []
    for n in range(4):
        shutil.copytree(shipped / "dense-mini", tmp_path / str(n))
        names.append(str(tmp_path / str(n)))
    opened = [runner.handle(name) for name in names]
    with pytest.raises(LabError, match="closed"):
        _ = opened[0].model
    assert all(handle.model is not None for handle in opened[1:])
    assert runner.handle(names[3]) is opened[3]


def test_results_are_bounded() -> None:
    kept = runner.Results(2)
    for n in range(3):
        kept.put(str(n), n)  # type: ignore[arg-type]
    assert [kept.get(str(n)) for n in range(3)] == [None, 1, 2]


def test_a_link_that_names_the_model_alone_is_about_it_alone() -> None:
    at = clean(open_page("kv", model="dense-mini"))
    assert at.selectbox(key="against").value == runner.NOTHING
    assert clean(open_page("kv", model="engram-mini")).selectbox(key="against").value == "dense-mini"
