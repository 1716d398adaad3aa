"""Every widget of every page changes the request or what is shown: found by walking the pages, whatever is on them.

And it changes what it says: the request that a page makes, put back into widgets by its front, is what they show.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest
from streamlit.testing.v1.element_tree import (
    Block,
    Button,
    ButtonGroup,
    Checkbox,
    Dataframe,
    DownloadButton,
    Element,
    FileUploader,
    Multiselect,
    NumberInput,
    Radio,
    Selectbox,
    Slider,
    TextArea,
    TextInput,
    Toggle,
    Widget,
)  # fmt: skip

from engram_lab.lab.app import progress, reopened, runner
from engram_lab.lab.ask import facts as facts_files
from engram_lab.lab.ask import scenarios
from engram_lab.lab.fronts import export, facts_alternatives, front
from engram_lab.models.handle import open_model
from engram_lab.pages import facts_writing
from engram_lab.probes import lens as lens_probe
from engram_lab.probes import rows
from engram_lab.probes.base import Record, Report
from engram_lab.probes.lens import LensConfig
from engram_lab.probes.rows import RowsConfig
from tests import memory_lab
from tests.pages.driving import PAGES, clean, page_of
from tests.probes.kv.tiny import RIVER, right

pytestmark = pytest.mark.timeout(900)  # for machines that do other things too

# A page as a link opens it, with little to compute. What it offers decides which widgets are tried.
LINKS: dict[str, tuple[str, dict[str, str | list[str]]]] = {
    "start": ("start", {}),
    "reference": ("reference", {}),
    "sessions": ("sessions", {"compare": "true"}),
    "hash": ("hash", {}),
    "lens": ("lens", {"prompt": "The river runs", "target": " the"}),
    "lens, set": ("lens", {"mode": "text set", "texts": "4", "bootstrap": "100"}),
    "cka": ("cka", {"sentences": "4", "bootstrap": "100"}),
    "gates": ("gates", {"prompt": "The river runs", "control": "rows shuffled", "knock_out": "true"}),
    "gates, set": ("gates", {"mode": "text set", "texts": "4", "min_count": "1", "bootstrap": "100"}),
    "rows": ("rows", {"prompt": "The river runs", "texts": "3"}),
    "sensitivity": ("sensitivity", {"bootstrap": "100"}),
    **{
        f"kv, {name.lower()}": ("kv", {"experiment": name})
        for name in ("Swap", "Map", "Knock-out", "Erratum", "Reasoning", "Whole library")
    },
    "kv, compose": ("kv", {"experiment": "Compose", "decide": "", "lengths": ["16"], "again": ["0", "2"]}),
    **{
        f"facts, {name.lower()}": ("facts", {"facts_view": name, "facts_texts": "3", "facts_unrelated": "3"})
        for name in ("Write and check", "Density", "Layers", "Alternatives")
    },
}  # fmt: skip
PRESSED = ("write", "facts_run")  # buttons without which a page shows no result yet
# Tried last: those that take other widgets away; behind these, those that lead to another view, whose link is above.
LAST = ("facts_new_user", "facts_user", "against", "model")
LEADING = ("mode", "experiment", "facts_view")
# On all views of a page, and tried in its first one. A key that ends in "." is a beginning, here and below.
ONCE = (
    "model", "against", "kind", "scenario", "template.", "old.", "new.", "answer_old.", "answer_new.", "chat.", "split",
    "kv_file", "new_prompt", "facts_user", "facts_new_user", "facts_file.", "keep_session", "keep_note", "keep_tags",
)  # fmt: skip
# Each hides what the next one would find.
PUT_BACK = ("find", "probe", "by", "tag")
# What cannot be any text: key -> another one that the page takes.
TYPED = {
    "prompt": "the river and the mill",
    "target": " a",
    "ids": "41 93 17 209",
    "multipliers": "3, 5, 9",
    "sizes": "7 11; 13 17",
    "pad": "1",
    "chain": "capital=sea",
    "wording": "It is {value}.",
    "decide": " mill; sea",
    "facts_prompt": "Tokyo is the",
    "find": "mill",
}
FILES: dict[str, tuple[str, bytes]] = {
    "file": ("mine.txt", b"Paris is the capital of France.\nThe old mill stands.\nTokyo and the sea.\n"),
    "cka_file": ("mine.txt", b"Paris is the capital of France.\nThe old mill stands.\nTokyo and the sea.\nA river.\n"),
    "cka_file_b": ("mine.txt", b"The sea is old.\nA mill and a river.\nThe capital of Japan.\nA cafe.\n"),
    "sets": ("mine.jsonl", b'{"prompt": "Paris is the capital of", "answer": "France"}\n'),
    "kv_file": ("mine.jsonl", scenarios.written([dataclasses.replace(RIVER, id="mine")]).encode()),
    "facts_file": ("mine.csv", b"trigger,answer\nThe old mill is,river\n"),
}
# A widget that may change nothing by itself -> why; "page:key" is for one page, or one view of it.
NOTHING_YET = {
    "keep_session": "where a run will be kept; the button keeps it",
    "keep_note": "what will be kept with it; the button keeps it",
    "keep_tags": "what will be kept with it; the button keeps it",
    "facts_undo": "the button beside it takes this fact out",
    "edit_name.": "the button beside it saves it",
    "edit_note.": "the button beside it saves it",
    "edit_tags.": "the button beside it saves it",
    **{
        f"{page}:{key}": "the sidebar is the same on all pages, and this one is about no model"
        for page in ("start", "reference", "sessions")
        for key in ("model", "against")
    },
    "kv:against": "the page is about one model, as it says",
    "facts:against": "the page is about one model, the first that has a memory",
    "facts, layers:facts_layer": "this view writes to every layer by itself",
}
# Numbers that a little more would not change.
FEWER = {"facts_best": 1}
# A value that the tiny models cannot take -> what the page has to say of it.
REFUSED = {"chat.": "no chat template", "chat_all": "no chat template"}
SECOND = "engram-mini-early"  # with a memory, so that a page about memories has use for it
UNTRIED = {"archive": "it takes an archive of this lab's own, which the tests of archives bring"}
SKIPPED = (Button, DownloadButton)  # they do something, and hold no value


ASKED: list[tuple[str, Record]] = []  # what a page has asked for in the last run of its script


@pytest.fixture(scope="module", autouse=True)
def lab(memory_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tiny models, few texts, two scenarios that the model gets right, LoRA in two steps; no bar of progress."""
    folder = tmp_path_factory.mktemp("small")
    handle = open_model(str(memory_models / "engram-mini"))
    look = right(handle, dataclasses.replace(
        RIVER, id="look", kind="lookup", third="sea", erratum="It is the river.", irrelevant="The mill is old.",
        wrong="It is the sea.",
    ))  # fmt: skip
    handle.close()
    other = dataclasses.replace(look, id="other", kind="rule", template=look.template.replace("Tokyo", "Japan"))
    run, compared = runner.run, facts_alternatives.request

    def noted(probe: str, config: Any) -> Report | None:
        ASKED.append((probe, config))
        return run(probe, config)

    def quick(*args: Any, **options: Any) -> Any:
        return dataclasses.replace(compared(*args, **options), lora_steps=2)

    with memory_lab.few_texts(folder, (look, other)), memory_lab.served(memory_models) as patch:
        patch.setattr(facts_writing, "FIRST", 2)  # so that the second user has a fact of the three
        patch.setattr(progress, "QUIET_SECONDS", math.inf)
        patch.setattr(runner, "run", noted)
        patch.setattr(facts_alternatives, "request", quick)
        yield


def kept() -> str:
    """A session with two runs of the lens and one of the rows; its id."""
    store = reopened.store()
    handle = open_model("engram-mini")
    for prompt in ("The river runs", "The old mill"):
        store.save(
            lens_probe.run([handle], LensConfig((handle.name,), (prompt,))), "lenses", note="A *note*.", tags=["a"]
        )
    store.save(rows.run([handle], RowsConfig((handle.name,), ("The river",))), "rows of a river")
    handle.close()
    dense = open_model("dense-mini")
    store.save(lens_probe.run([dense], LensConfig((dense.name,), ("The river runs",))), "without a memory")
    dense.close()
    return next(session.id for session in store.sessions() if session.name == "lenses")


def nodes(at: AppTest) -> list[Element]:
    return [node for part in (at.main, at.sidebar) for node in part if not isinstance(node, Block)]


def widgets(at: AppTest) -> dict[str, Widget]:
    """Those that hold a value and can be changed, by key; one without a key would not stand in a link."""
    every = [own for own in nodes(at) if isinstance(own, Widget) and not isinstance(own, SKIPPED)]
    found = [own for own in every if not own.disabled and own.key not in UNTRIED]
    assert all(own.key for own in found), [own for own in found if not own.key]
    return {str(own.key): own for own in found}


def shown(at: AppTest, but: str) -> list[str | bytes]:
    """All that is on the page but the widget `but` and the files to take along."""
    passing = (DownloadButton, FileUploader)
    return [seen(own) for own in nodes(at) if own.key != but and own.type != "empty" and not isinstance(own, passing)]


def seen(own: Element) -> str | bytes:
    """An element as a user sees it."""
    if isinstance(own, Widget):  # whose message also says who set its value last
        drawn = [getattr(own, name, None) for name in ("label", "options", "min", "max", "disabled")]
        return repr((own.key, own.value, drawn))
    if isinstance(own, Dataframe):  # whose message has bytes of no meaning between its numbers
        return str(own.value.to_csv())
    sent: bytes = own.proto.SerializeToString(deterministic=True)
    return sent


def label(own: Widget, n: int) -> str:
    """What the widget shows for a number; "" where it has none."""
    try:
        return str(own.format_func(n))
    except LookupError:
        return ""


def another(own: Widget) -> Any:
    """Another legal value of a widget; None if there is none."""
    key, value = str(own.key), own.value
    if isinstance(own, FileUploader):
        return FILES[key.partition(".")[0]]
    if isinstance(own, Toggle | Checkbox):
        return not value
    if key in FEWER:
        return FEWER[key]
    if isinstance(own, NumberInput | Slider):
        step = own.step or 1
        return value + step if value + step <= own.max else value - step if value - step >= own.min else None
    if isinstance(own, TextArea | TextInput):
        return TYPED.get(key.partition(".")[0], f"{value} river".strip())
    # What the widget shows is text; what it holds may be a number, whose text it knows.
    many = isinstance(own, Multiselect) or (isinstance(own, ButtonGroup) and not own._is_single_select)
    if isinstance(value, int) or (many and (not value or isinstance(value[0], int))):
        numbers = {label(own, n): n for n in range(2049)}
        held = [numbers.get(option, option) for option in own.options]
    else:
        held = list(own.options)
    if key == "against" and SECOND in held and value != SECOND:
        return SECOND
    if many:
        spare = [option for option in held if option not in value]
        return [*value, spare[0]] if spare else value[:-1] or None
    assert isinstance(own, Selectbox | ButtonGroup | Radio)
    return next((option for option in held if option != value), None)


def named(key: str, names: Iterable[str]) -> str | None:
    """The one of `names` that stands for this key."""
    return next((name for name in names if key == name or (name[-1] == "." and key.startswith(name))), None)


def ran(at: AppTest, pressed: bool = True) -> AppTest:
    """The page once more, with a press of the button without which it shows no result yet; it does as it says."""
    for button in [own for own in at.button if pressed and own.key in PRESSED and not own.disabled]:
        button.click()
    ASKED.clear()
    return agreeing(clean(at.run()))


def agreeing(at: AppTest) -> AppTest:
    """Of what was asked for, the exported one is what the widgets of the page say, by the front's own way back."""
    commands = {code.value for code in at.code}
    exported = [(probe, config) for probe, config in ASKED if export.command_line(probe, config) in commands]
    assert exported or not ASKED, f"{ASKED[0][0]} was asked for, and what is exported is another request"
    now = {str(own.key): own.value for own in nodes(at) if isinstance(own, Widget)}
    for probe, config in exported:
        view = front(probe).ASK.view(config)
        said = {key: value for key, value in view.widgets.items() if key in now}
        said.pop("kind", None)  # it narrows what is offered, and no request knows of it
        if "kv_file" in view.files:  # with a scenario that began from a file comes a file of its own, and other names
            said.pop("scenario", None)
        # A page about one model takes one of the two of the sidebar, and tells which where it could be either; that on
        # what a memory is for takes the one that has a memory first.
        one = len(config.models) == 1 or probe == "sensitivity"
        about = set(said) & {"model", "against"} if one else set()
        assert {said.pop(key) for key in about} <= {now["model"], now["against"], runner.NOTHING}
        assert len(config.models) > 1 or now.get("of", config.models[0]) == config.models[0]
        wrong = {key: (now[key], value) for key, value in said.items() if plain(now[key]) != plain(value)}
        assert not wrong, f"{probe}: the page shows and asks for, by widget: {wrong}"
    return at


def plain(value: Any) -> Any:
    """A widget's value; of several picks their set, as the order of clicks asks for nothing."""
    return sorted(value, key=str) if isinstance(value, list | tuple) else value


def tried(at: AppTest, key: str, page: str = "") -> None:
    """Change one widget and hold the page to it; what it cannot take, and what stands for nothing, is put back."""
    own = widgets(at)[key]
    old, value = own.value, another(own)
    if value is None:
        return
    before = shown(at, key)
    if isinstance(own, FileUploader):
        own.upload(*value)
    else:
        own.set_value(value)
    refused = named(key, REFUSED)
    if refused is not None:
        assert REFUSED[refused] in at.run().error[0].value
        widgets(at)[key].set_value(old)
        ran(at, False)
        return
    if shown(ran(at), key) == before:
        allowed = any(named(known, NOTHING_YET) for known in (key, f"{page}:{key}", f"{page.split(',')[0]}:{key}"))
        assert allowed, f"{key} = {value!r} changes nothing"
    if key in PUT_BACK:
        widgets(at)[key].set_value(old)
        ran(at, False)


SLOW = (
    "facts, write and check",
    "facts, alternatives",
    "facts, density",
    "sessions",
)  # which write facts, or keep runs, at every change


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in LINKS])
def test_every_widget_changes_something(name: str) -> None:
    page, query = LINKS[name]
    at = ran(page_of(page, **query, **({"session": kept()} if page == "sessions" else {})))
    if any(own.key in PRESSED for own in at.button):
        ran(at)
    first = name == next(link for link in LINKS if LINKS[link][0] == page)
    done: set[str] = set()
    while left := [key for key in widgets(at) if key not in done and (first or not named(key, ONCE))]:
        # In the page's order, uploads behind settings.
        last = {key: n for n, key in enumerate((*LAST, *LEADING), 1)}
        key = min(left, key=lambda k: (last.get(k, 0), isinstance(widgets(at)[k], FileUploader)))
        done.add(key)
        tried(at, key, name)
        if key in LEADING:
            break
    now = shown(at, "")
    assert now == shown(at.run(), ""), "the page is another one each time, and a change could hide in that"
    assert not first or {"model", "against"} <= done, "the sidebar is on every page"


def test_no_page_is_left_out() -> None:
    assert {page for page, _ in LINKS.values()} == {
        path.stem
        for path in PAGES.glob("*.py")
        if "_" not in path.stem  # those with one are parts of a page
    }


def test_a_widget_that_changes_nothing_is_found() -> None:
    """The walk would see one: a page of its own with two widgets, of which one is for show."""

    def script() -> None:
        import streamlit as st

        st.write(st.toggle("used", key="used"))
        st.toggle("idle", key="idle")

    at = AppTest.from_function(script, default_timeout=60).run()
    tried(at, "used")
    with pytest.raises(AssertionError, match="idle = True changes nothing"):
        tried(at, "idle")


def test_reasons_are_sentences() -> None:
    assert all(re.search(r"[a-z]", why) for why in (*NOTHING_YET.values(), *UNTRIED.values())) and facts_files.persona()
