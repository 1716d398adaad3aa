"""`engram-lab session ...` on a store of its own: what it prints, writes and refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from engram_lab.lab.command.main import main
from engram_lab.lab.sessions import open_store
from engram_lab.lab.sessions.archive import read_archive
from engram_lab.models import listing
from engram_lab.probes.base import Report


class Command:
    """`engram-lab session` with --store; the exit code, then what stood on stdout and stderr."""

    def __init__(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.url, self.capsys = url, capsys

    def __call__(self, *words: str) -> tuple[int, str, str]:
        self.capsys.readouterr()
        code = main(["session", *words, "--store", self.url])
        return (code, *self.capsys.readouterr())


@pytest.fixture
def command(
    tmp_path: Path, shipped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(listing, "SHIPPED", shipped)
    return Command(f"sqlite:///{tmp_path / 'store.db'}", capsys)


@pytest.fixture
def kept(command: Command, report: Report, set_report: Report) -> Command:
    """With a session of two runs."""
    store = open_store(command.url)
    store.save(report, "The mill", note="A *note*", tags=["river"], seconds=1.5)
    store.save(set_report, "The mill")
    store.dispose()
    return command


def refused(result: tuple[int, str, str], word: str) -> None:
    code, out, sentence = result
    assert (code, out) == (2, "") and word in sentence
    assert sentence.count("\n") == 1 and sentence.endswith(".\n")


def test_list_and_show(kept: Command) -> None:
    code, out, _ = kept("list")
    head, line = out.splitlines()
    assert code == 0 and head.split() == ["name", "runs", "probes", "models", "tags", "changed"]
    assert line.startswith("The mill  2     lens    engram-mini, dense-mini  river")
    assert kept("list", "RIVER", "--probe", "lens", "--model", "dense-mini", "--tag", "river")[1] == out
    assert kept("list", "--probe", "gates") == (0, "", "No session fits.\n")
    code, out, _ = kept("show", "The mill")
    assert code == 0 and "tags: river" in out and "A *note*" in out
    rows = [line.split() for line in out.splitlines()[-2:]]
    assert [row[:2] for row in rows] == [["1", "lens"], ["2", "lens"]] and "1.50" in rows[0]
    refused(kept("show", "The mile"), "The mile")


def test_an_empty_store(command: Command) -> None:
    assert command("list") == (0, "", "There are no sessions.\n")


def test_export_import_and_no_overwriting(kept: Command, report: Report) -> None:
    code, out, _ = kept("export", "The mill", "out.zip")
    assert code == 0 and out.startswith('out.zip: "The mill" with 2 runs, ')
    whole = Path("out.zip").read_bytes()
    assert read_archive(whole).runs[0].report == report
    Path("out.zip").write_bytes(b"mine")
    refused(kept("export", "The mill", "out.zip"), "--force")
    assert Path("out.zip").read_bytes() == b"mine"
    assert kept("export", "The mill", "out.zip", "--force")[0] == 0
    assert Path("out.zip").read_bytes() == whole
    refused(kept("export", "The mill", "nowhere/out.zip"), "no folder nowhere")
    refused(kept("export", "The mill", "."), "folder")
    code, out, _ = kept("import", "out.zip")
    assert code == 0 and 'Imported "The mill (2)" with 2 runs' in out
    assert 'Imported "Another"' in kept("import", "out.zip", "--name", "Another")[1]
    Path("bad.zip").write_bytes(whole[:-1])
    refused(kept("import", "bad.zip"), "bad.zip cannot be read")
    refused(kept("import", "missing.zip"), "missing.zip")
    assert len(kept("list")[1].splitlines()) == 1 + 3


def test_html_is_written_or_printed(kept: Command) -> None:
    code, out, _ = kept("html", "The mill", "out.html")
    assert code == 0 and 'out.html: "The mill" with 2 runs' in out
    page = Path("out.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and "<em>note</em>" in page
    refused(kept("html", "The mill", "out.html"), "exists already")
    refused(kept("html", "The mile", "other.html"), "The mile")
    assert not Path("other.html").exists()


def test_rename_and_note(kept: Command) -> None:
    assert kept("rename", "The mill", "The sea")[:2] == (0, '"The mill" is now "The sea"\n')
    refused(kept("rename", "The sea", ""), "one line")
    refused(kept("note", "The sea"), "nothing to change")
    Path("note.md").write_text("From *a file*", encoding="utf-8")
    assert kept("note", "The sea", "--file", "note.md", "--tag", "a", "--tag", "b")[1] == (
        '"The sea" has another note and other tags\n'
    )
    shown = kept("show", "The sea")[1]
    assert "From *a file*" in shown and "tags: a, b" in shown
    assert kept("note", "The sea", "--no-tags")[0] == 0
    shown = kept("show", "The sea")[1]
    assert "From *a file*" in shown and "tags:" not in shown
    Path("note.md").write_bytes(b"\xff")
    refused(kept("note", "The sea", "--file", "note.md"), "UTF-8")


def test_delete_and_undelete(kept: Command) -> None:
    code, out, _ = kept("delete", "The mill")
    assert code == 0 and "engram-lab session undelete 'The mill'" in out
    refused(kept("show", "The mill"), "The mill")
    assert kept("list")[1] == ""
    code, out, _ = kept("list", "--deleted")
    gone = out.splitlines()[1].split()[-1]
    refused(kept("undelete", "The mile"), "--deleted")
    assert kept("undelete", "The mill")[:2] == (0, '"The mill" is back with 2 runs\n')
    assert kept("list", "--deleted") == (0, "", "There are no deleted sessions.\n")
    assert kept("delete", gone)[0] == 0 and kept("undelete", gone)[0] == 0, "by its id too"


def test_purge_asks_first_and_frees_the_disk(kept: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def blobs() -> int:
        return sum(path.is_file() for path in (tmp_path / "blobs").rglob("*"))

    kept("delete", "The mill")
    refused(kept("purge"), "Remove 1 deleted session and all deleted runs for good? Say so with --yes")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: "")
    assert kept("purge")[:2] == (0, "Nothing was removed.\n") and blobs() == 2
    monkeypatch.setattr("builtins.input", lambda question: "y")
    code, out, _ = kept("purge")
    assert code == 0 and out.startswith("Removed 1 sessions and 0 single runs; ") and blobs() == 0
    assert kept("list", "--deleted")[2] == "There are no deleted sessions.\n"


def test_two_deleted_of_one_name_need_an_id(kept: Command, report: Report) -> None:
    kept("delete", "The mill")
    store = open_store(kept.url)
    store.save(report, "The mill")
    store.delete("The mill")
    ids = [session.id for session in store.sessions(deleted=True)]
    store.dispose()
    result = kept("undelete", "The mill")
    refused(result, "2 deleted sessions")
    assert all(own in result[2] for own in ids)
    assert kept("undelete", ids[1])[0] == 0


def test_names_go_to_the_screen_as_they_are(command: Command, report: Report) -> None:
    store = open_store(command.url)
    store.save(report, "naïve 東京 <b>", note="\x1b[2J\x07 gone")
    store.dispose()
    out = command("show", "naïve 東京 <b>")[1]
    assert out.startswith("naïve 東京 <b>\n") and "\x1b" not in out and "\x07" not in out
