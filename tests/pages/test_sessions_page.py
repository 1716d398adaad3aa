"""Keeping, finding, reopening, comparing and sharing runs in the app, on tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from engram_lab.lab.app import reopened
from engram_lab.lab.sessions import Store, archive, difference, open_store
from engram_lab.models import listing
from engram_lab.models.handle import Handle
from engram_lab.probes import lens as lens_probe
from engram_lab.probes.lens import LensConfig
from tests.pages.driving import chart, clean, numbers, open_page, page_of, sentence
from tests.pages.test_app import LENS, curve

PROMPT = "the old mill <b> $5 _x_"


pytestmark = pytest.mark.usefixtures("lab_of_twins")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """The store that the app uses, from outside."""
    opened = open_store()
    yield opened
    opened.dispose()


def kept_lens(name: str = "Mill", prompt: str = PROMPT) -> AppTest:
    """The lens page with a prompt, a target, a cell and a colour of its own, kept under a name."""
    at = open_page("lens")
    at.text_area(key="prompt").set_value(prompt)
    clean(at.run())
    at.text_input(key="target").set_value(" the")
    at.selectbox(key="colour").set_value("entropy")
    at.number_input(key="pos").set_value(2)
    at.number_input(key="top").set_value(3)
    clean(at.run())
    return keep(at, name)


def keep(at: AppTest, name: str) -> AppTest:
    for kind, key, value in (("selectbox", "keep_session", name), ("multiselect", "keep_tags", ["mills"])):
        box = getattr(at, kind)(key=key)
        box.options.extend([name, "mills"])  # AppTest cannot type a new option
        box.set_value(value)
        clean(at.run())
    at.text_area(key="keep_note").set_value("**Look** at ![x](http://a.example/p.png)")
    at.button(key="keep_go").click()
    return clean(at.run())


def test_a_run_is_kept_with_name_note_tags_and_the_view_of_its_page(store: Store, pair: list[Handle]) -> None:
    at = kept_lens()
    (session,) = store.sessions()
    assert (session.name, session.tags) == ("Mill", ("mills",)) and session.note.startswith("**Look**")
    (run,) = session.runs
    assert run.probe == "lens" and run.seconds is not None and run.seconds > 0
    assert [m.name for m in run.models] == ["engram-mini", "dense-mini"]
    assert run.view is not None and run.view["page"] == "lens"
    widgets = run.view["widgets"]
    assert widgets["prompt"] == PROMPT and widgets["colour"] == "entropy" and widgets["pos"] == 2
    assert not [key for key in widgets if key.startswith(("keep_", "csv", "png_"))], "buttons and the form are no view"
    config = LensConfig(("engram-mini", "dense-mini"), (PROMPT,), " the", 3)
    assert store.report(run.id).result == lens_probe.run(pair, config).result
    assert any("Kept in Mill" in c.value for c in at.caption)


def test_opening_puts_the_page_back_without_computing(
    store: Store, pair: list[Handle], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_lens()
    st.cache_resource.clear()  # no result is left in memory
    monkeypatch.setattr(lens_probe, "run", None)  # computing would fail
    at = open_page("sessions")
    (session,) = store.sessions()
    clean(at.button(key=f"choose_{session.id}").click().run())
    at.button(key="open_session").click()
    clean(at.run())
    assert at.text_area(key="prompt").value == PROMPT and at.text_input(key="target").value == " the"
    assert at.selectbox(key="colour").value == "entropy" and at.number_input(key="pos").value == 2
    assert at.number_input(key="top").value == 3
    (told,) = [i.value for i in at.info]
    assert "nothing was computed" in told and "Mill" in told
    line = curve(at)
    monkeypatch.undo()
    report = lens_probe.run(pair, LensConfig(("engram-mini", "dense-mini"), (PROMPT,), " the", 3))
    assert np.allclose(line, report.result.models[0].mean_kl, atol=1e-5)


def test_computing_anew_drops_the_kept_report(store: Store) -> None:
    kept_lens()
    at = open_page("sessions")
    (session,) = store.sessions()
    clean(at.button(key=f"choose_{session.id}").click().run())
    at.button(key=f"open_{session.runs[0].id}").click()
    clean(at.run())
    clean(at.switch_page(LENS).run())  # AppTest does not notice that the script itself has gone there
    at.button(key=f"anew_{session.runs[0].id}").click()
    assert not [i for i in clean(at.run()).info if "nothing was computed" in i.value]
    assert at.text_area(key="prompt").value == PROMPT


def test_find_edit_delete_and_undo(store: Store) -> None:
    kept_lens("Mill")
    kept_lens("River", "the river runs")
    at = open_page("sessions")
    mill, river = (store.session(name) for name in ("Mill", "River"))
    assert at.button(key=f"choose_{mill.id}") and at.button(key=f"choose_{river.id}")
    at.text_input(key="find").set_value("river runs")  # it stands in the prompt
    clean(at.run())
    keys = {b.key for b in at.button}
    assert f"choose_{river.id}" in keys and f"choose_{mill.id}" not in keys
    at.text_input(key="find").set_value("")
    clean(at.run())
    clean(at.button(key=f"choose_{mill.id}").click().run())
    (note,) = [m.value for m in at.markdown if "**Look**" in m.value]
    assert r"\![x]" in note, "a note fetches no picture"
    at.text_input(key=f"edit_name.{mill.id}").set_value("Old mill")
    at.multiselect(key=f"edit_tags.{mill.id}").set_value([])
    at.button(key="edit_go").click()
    clean(at.run())
    assert store.session("Old mill").id == mill.id and store.session("Old mill").tags == ()
    at.text_input(key=f"edit_name.{mill.id}").set_value("River")
    at.button(key="edit_go").click()
    assert "River" in sentence(at.run())
    clean(open_page("start"))
    at.button(key="delete").click()
    at.run()
    assert [s.name for s in store.sessions()] == ["River"]
    at.button(key="undo_deleted").click()
    at.run()
    assert {s.name for s in store.sessions()} == {"River", "Old mill"}
    at.button(key="duplicate").click()
    clean(at.run())
    assert len(store.session("Old mill (2)").runs) == 1
    run = store.session("Old mill (2)").runs[0]
    at.button(key=f"delete_{run.id}").click()
    clean(at.run())
    assert not store.session("Old mill (2)").runs and len(store.session("Old mill").runs) == 1
    at.button(key="undo_deleted_run").click()
    clean(at.run())
    assert len(store.session("Old mill (2)").runs) == 1


def test_what_was_deleted_is_removed_for_good(store: Store) -> None:
    kept_lens("Mill")
    kept_lens("River", "the river runs")
    store.delete("Mill")
    at = open_page("sessions")
    at.button(key="purge").click()
    clean(at.run())
    assert store.sessions(deleted=True) == [] and [session.name for session in store.sessions()] == ["River"]
    assert any("are free again" in toast.value for toast in at.toast)
    assert "purge" not in {button.key for button in at.run().button}


def test_two_runs_are_compared_and_their_difference_is_drawn(store: Store) -> None:
    kept_lens("Mill", "the old mill stands")
    kept_lens("Mill", "the new mill stands")
    (session,) = store.sessions()
    at = open_page("sessions")
    clean(at.button(key=f"choose_{session.id}").click().run())
    at.toggle(key="compare").set_value(True)
    clean(at.run())
    assert {"side_A", "side_B", "difference"} <= {c.key for c in at.get("plotly_chart")}
    a, b = (store.report(run.id).result.models[0].mean_kl for run in session.runs)
    path = difference.label(*(store.report(run.id) for run in session.runs), "models[0].mean_kl")
    at.selectbox(key="measure_of").set_value(path)
    drawn = [numbers(t["y"]) for t in chart(clean(at.run()), "difference")["data"] if "y" in t]
    assert any(line.shape == a.shape and np.allclose(line, b - a, atol=1e-6) for line in drawn)
    told = next(d.value for d in at.dataframe if "of the request" in d.value.columns)
    assert list(told["of the request"]) == ["prompts"]


def test_a_session_goes_out_and_comes_back(store: Store, tmp_path: Path) -> None:
    kept_lens()
    (session,) = store.sessions()
    path = tmp_path / "mill.zip"
    archive.export_session(store, session.id, path)
    at = open_page("sessions")
    at.file_uploader(key="archive").set_value(("mill.zip", path.read_bytes(), "application/zip"))
    clean(at.run())
    assert {s.name for s in store.sessions()} == {"Mill", "Mill (2)"}
    clean(at.run())
    assert len(store.sessions()) == 2, "the file is imported once"
    at = open_page("sessions")
    at.file_uploader(key="archive").set_value(("mill.zip", path.read_bytes()[:-40], "application/zip"))
    assert sentence(at.run())
    assert len(store.sessions()) == 2


def test_without_its_model_a_run_is_still_shown(store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept_lens()
    (session,) = store.sessions()
    monkeypatch.setattr(listing, "SHIPPED", tmp_path / "nothing")
    st.cache_resource.clear()
    at = open_page("sessions")
    clean(at.button(key=f"choose_{session.id}").click().run())
    at.toggle(key=f"show_{session.runs[0].id}").set_value(True)
    assert chart(clean(at.run()), f"figure_{session.runs[0].id}")["data"]


def test_an_upload_is_part_of_the_view(store: Store) -> None:
    at = open_page("lens")
    at.session_state["mode"] = "text set"
    clean(at.run())
    at.file_uploader(key="file").set_value(("mine.txt", b"the river\nthe old mill\nthe sea\n", "text/plain"))
    clean(at.run())
    clean(keep(at, "Mine"))
    (run,) = store.session("Mine").runs
    assert list(run.view["files"]) == ["file"]  # type: ignore[index]
    at = open_page("sessions")
    clean(at.button(key=f"choose_{store.session('Mine').id}").click().run())
    at.button(key="open_session").click()
    clean(at.run())
    clean(at.switch_page(LENS).run())
    assert any("nothing was computed" in i.value for i in at.info)
    assert any("mine" in c.value and "in use" in c.value for c in at.caption)
    at.button(key="drop_file").click()
    assert not any("nothing was computed" in i.value for i in clean(at.run()).info)


def test_a_bad_view_leaves_a_working_app(store: Store) -> None:
    at = page_of("lens")
    at.session_state["_reopened"] = reopened.State(views={"lens": reopened.View("lens", {"pos": "not a number"})})
    at.run()
    assert not at.exception
    clean(at.run())
