"""What release 0.1.0 (a9deba1) kept, wrote and was linked to is still valid: sessions, flags, views and links.

The files beside this one were made by that release on the tiny models of tests.memory_lab, and are never made anew:

- store.zip: its folder of sessions, a database with its blobs, from `engram-lab probe ... --save` and from pages;
- sessions.json.gz: what that store held, and every report of it as JSON;
- session.zip: one of the sessions by `engram-lab session export`;
- requests.json.gz: requests of every probe with the flags, files and view that were made of them, and others as they
  were typed. What is longer than 2000 characters is kept as the SHA-256 of its JSON;
- links.json: links to pages, and what each page then asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import json
import shlex
import zipfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from engram_lab.lab.app import reopened
from engram_lab.lab.ask import texts
from engram_lab.lab.ask.view import View
from engram_lab.lab.command.main import build_parser
from engram_lab.lab.fronts import FRONTS, front
from engram_lab.lab.sessions import Store, open_store
from engram_lab.lab.sessions.archive import import_session, read_archive
from engram_lab.lab.sessions.replay import Replayer
from engram_lab.models.errors import LabError
from engram_lab.probes import module_of, running
from engram_lab.probes.base import Record, Report
from tests import memory_lab
from tests.pages.driving import PAGES, clean, page_of
from tests.pages.viewing import noted
from tests.probes.kv.tiny import RIVER

HERE = Path(__file__).parent
LOOK = dataclasses.replace(
    RIVER, id="look", kind="lookup", third="sea", erratum="It is the river.", irrelevant="The mill is old.",
    wrong="It is the sea.",
)  # fmt: skip
# The library of the links.
LIBRARY = LOOK, dataclasses.replace(LOOK, id="other", kind="rule", template=LOOK.template.replace("Tokyo", "Japan"))
PRESSED = ("write", "facts_run")  # buttons without which a page asks for nothing


@functools.cache
def stored(name: str) -> Any:
    """The JSON of a file beside this one."""
    raw = (HERE / name).read_bytes()
    return json.loads(gzip.decompress(raw) if name.endswith(".gz") else raw)


def same(found: Any, kept: Any) -> bool:
    """Whether plain JSON is what was kept, itself or as its digest."""
    if isinstance(kept, dict) and kept.keys() == {"sha256"}:
        text = json.dumps(found, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest() == kept["sha256"]
    return bool(found == kept)


# --- Sessions ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """The store of that release, in a folder that a test may change; the app's own too."""
    with zipfile.ZipFile(HERE / "store.zip") as packed:
        packed.extractall(tmp_path / "store")
    url = f"sqlite:///{tmp_path / 'store' / 'store.db'}"
    monkeypatch.setenv("ENGRAM_LAB_STORE", url)
    reopened.store.clear()  # the app of an earlier test has another one
    opened = open_store(url)
    yield opened
    opened.dispose()
    reopened.store.clear()


def told(run: Any) -> dict[str, Any]:
    """A run of a listing, as sessions.json.gz has it."""
    names = ("id", "probe", "seconds", "request", "versions", "environment", "view")
    found = {name: getattr(run, name) for name in names}
    return found | {"models": [model.to_dict() for model in run.models], "created": run.created.isoformat()}


def test_sessions_are_listed_and_every_run_is_what_it_was(store: Store) -> None:
    kept, probes = stored("sessions.json.gz"), set()
    found = [(session, deleted) for deleted in (False, True) for session in store.sessions(deleted=deleted)]
    assert len(found) == len(kept["sessions"]) == 5
    for (session, deleted), then in zip(found, kept["sessions"], strict=True):
        assert (session.name, session.note, list(session.tags)) == (then["name"], then["note"], then["tags"])
        assert deleted == then["deleted"] == (session.name == "Thrown away")
        for run, before in zip(session.runs, then["runs"], strict=True):
            attachments = before.pop("attachments")
            assert told(run) == before and run.created == datetime.fromisoformat(before["created"])
            digests = {name: hashlib.sha256(store.attachment(run.id, name)).hexdigest() for name in run.attachments}
            assert digests == attachments
            report = store.report(run.id)
            assert report.to_dict() == kept["reports"][run.id]
            assert Report.from_dict(kept["reports"][run.id]) == report
            probes.add(run.probe)
    stored.cache_clear()
    assert probes == set(FRONTS)
    assert [session.name for session in store.sessions("old mill", probe="rows")] == ["The lens and the gates"]
    assert store.undelete(found[-1][0].id).name == "Thrown away" and len(store.sessions()) == 5


def test_an_archive_is_imported(store: Store) -> None:
    (then,) = [session for session in stored("sessions.json.gz")["sessions"] if session["name"] == "From the page"]
    session = import_session(store, HERE / "session.zip")
    assert (session.name, session.note) == ("From the page (2)", then["note"])
    for run, before in zip(session.runs, then["runs"], strict=True):
        names = ("probe", "models", "view", "seconds", "environment", "created", "request")
        assert {name: told(run)[name] for name in names} == {name: before[name] for name in names}
        assert store.report(run.id).to_dict() == stored("sessions.json.gz")["reports"][before["id"]]


@pytest.mark.usefixtures("lab_with_memories")
def test_an_archive_comes_out_the_same_again() -> None:
    runs = read_archive(HERE / "session.zip").runs
    with Replayer(runs, range(1, len(runs) + 1)) as replayer:
        again = [replayer.run(n) for n in replayer.chosen]
    assert [(run.probe, run.wrong) for run in again] == [("facts check", ()), ("lens", ())]


@pytest.mark.usefixtures("lab_with_memories")
@pytest.mark.parametrize(
    ("name", "pages"),
    [
        ("The lens and the gates", ("cka", "lens", "gates", "rows", "sensitivity")),
        ("Caches", ("kv",)),
        ("From the page", ("lens", "facts")),
    ],
)
def test_the_pages_of_a_session_stand_as_they_were(
    store: Store, name: str, pages: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each shows its kept report, with nothing computed but the lens that the page of CKA has beside it."""
    computed: list[str] = []
    compute = running.compute

    def spied(probe: str, *args: Any) -> Any:
        computed.append(probe)
        return compute(probe, *args)

    monkeypatch.setattr(running, "compute", spied)
    session = store.session(name)
    at: AppTest = page_of("sessions", session=session.id)
    clean(clean(at.run()).button(key="open_session").click().run())
    for n, page in enumerate(pages):
        if n:
            clean(at.switch_page(str(PAGES / f"{page}.py")).run())
        shown = [own.value for own in (*at.info, *at.warning)]
        assert any("nothing was computed" in text and name in text for text in shown), (page, shown)
    assert computed == (["lens"] if "cka" in pages else [])


# --- Requests ---------------------------------------------------------------------------------------------------------


def asked(probe: str, words: list[str]) -> Record:
    """The request that a command makes."""
    config: Record = front(probe).ASK.config(build_parser().parse_args(["probe", *probe.split(), *words]))
    return config


def put(files: dict[str, Any]) -> dict[str, str]:
    """Write the files of a command here; of our own sentences only the number was kept."""
    whole = {
        name: text if isinstance(text, str) else "\n".join(texts.held_out()[: text["held_out"]]) + "\n"
        for name, text in files.items()
    }
    for name, text in whole.items():
        Path(name).write_text(text, encoding="utf-8")
    return whole


@pytest.mark.parametrize("probe", FRONTS)
def test_a_request_has_the_flags_files_and_view_that_it_had(
    probe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mine = [row for row in stored("requests.json.gz") if row["probe"] == probe and "flags" in row]
    assert len(mine) >= 4
    for row in mine:
        files = put(row.get("files", {}))
        if "apart" in row:  # no command makes it
            config = module_of(probe).CONFIG.from_dict(row["config"])
        else:
            config = asked(probe, shlex.split(" ".join(row["flags"])))
        assert same(config.to_dict(), row["config"]), row["flags"]
        if "apart" in row and front(probe).ASK.options(config) != row["flags"]:  # now a command does
            put(front(probe).ASK.files(config))
            assert asked(probe, shlex.split(" ".join(front(probe).ASK.options(config)))) == config
            assert front(probe).ASK.view(config)
            continue
        assert front(probe).ASK.options(config) == row["flags"]
        assert front(probe).ASK.files(config) == files
        try:
            view = front(probe).ASK.view(config)
        except LabError as error:
            assert str(error) == row.get("refused")
        else:
            assert same(view.to_dict(), row["view"]), row["flags"]
            assert View.from_dict(view.to_dict()) == view


@pytest.mark.parametrize("probe", FRONTS)
def test_what_was_typed_asks_for_the_same(probe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all defaults first, so that none has changed."""
    monkeypatch.chdir(tmp_path)
    mine = [row for row in stored("requests.json.gz") if row["probe"] == probe and "typed" in row]
    assert len(mine) >= 3
    for row in mine:
        put(row.get("files", {}))
        assert same(asked(probe, row["typed"]).to_dict(), row["config"]), row["typed"]


# --- Links ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_lab(memory_models: Path, tmp_path: Path) -> Iterator[None]:
    """Few texts and the scenarios of LIBRARY."""
    with memory_lab.few_texts(tmp_path, LIBRARY), memory_lab.served(memory_models):
        yield


@pytest.mark.usefixtures("small_lab")
@pytest.mark.parametrize("link", stored("links.json"), ids=lambda link: link["name"])
def test_a_link_asks_for_what_it_did(link: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found = noted(monkeypatch)
    at = clean(page_of(link["page"], **link["query"]).run())
    for key in [button.key for button in at.button if button.key in PRESSED]:
        clean(at.button(key=key).click().run())
    ((probe, config),) = link["asks"]
    assert found and found[0][0] == probe and same(found[0][1].to_dict(), config)
