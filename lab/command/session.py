"""`engram-lab session list | show | export | import | html | rename | note | delete | undelete | purge`: what was
kept."""

from __future__ import annotations

import argparse
import io
import os
import shlex
import sys
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram_lab.lab.draw.durations import digits
from engram_lab.models.files import check_target

if TYPE_CHECKING:
    from datetime import datetime

    from engram_lab.lab.sessions import SessionInfo, Store

WHICH = "its name, or its id"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommands of `engram-lab session`; each sets `args.call`."""
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=type(parser))

    def command(name: str, text: str, run: Callable[[Store, argparse.Namespace], None]) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
        made.add_argument("--store", metavar="URL", help="the database (default: a file in your data folder)")
        made.set_defaults(call=_with_store(run))
        return made

    listed = command("list", "list the sessions, the newest first", run_list)
    listed.add_argument("search", nargs="?", default="", help="words of a name, note, tag or prompt")
    for name in ("probe", "model", "tag"):
        listed.add_argument(f"--{name}", help=f"only those with this {name}")
    listed.add_argument("--deleted", action="store_true", help="those that were deleted and can be had back")

    command("show", "show a session with its runs", run_show).add_argument("name", help=WHICH)

    export = command("export", "write a session to a file that others can import and replay", run_export)
    html = command("html", "write a session to one HTML page with its figures, which needs no lab", run_html)
    for made, ending in ((export, "zip"), (html, "html")):
        made.add_argument("name", help=WHICH)
        made.add_argument("out", metavar=f"FILE.{ending}", help="the file to write; - is stdout")
        made.add_argument("--force", action="store_true", help="replace the file if there is one")

    imported = command("import", "take a session out of a file into the store", run_import)
    imported.add_argument("file", type=Path, metavar="FILE.zip", help="what engram-lab session export wrote")
    imported.add_argument("--name", dest="new_name", metavar="NEW", help="a name for it (default: its own)")

    rename = command("rename", "give a session another name", run_rename)
    rename.add_argument("name", help=WHICH)
    rename.add_argument("new_name", metavar="NEW", help="one line of at most 120 characters")

    note = command("note", "replace a session's note, in Markdown, or its tags", run_note)
    note.add_argument("name", help=WHICH)
    text = note.add_mutually_exclusive_group()
    text.add_argument("--text", help="the note")
    text.add_argument("--file", type=Path, help="a UTF-8 file that holds it")
    note.add_argument("--tag", action="append", help="a tag; may be repeated, and replaces those there are")
    note.add_argument("--no-tags", dest="tag", action="store_const", const=[], help="take all tags off")

    command("delete", "delete a session; undelete brings it back", run_delete).add_argument("name", help=WHICH)
    command("undelete", "bring back a deleted session", run_undelete).add_argument("name", help=WHICH)
    purge = command("purge", "remove what was deleted for good, and free its space on the disk", run_purge)
    purge.add_argument("--yes", action="store_true", help="do not ask first")


def _with_store(run: Callable[[Store, argparse.Namespace], None]) -> Callable[[argparse.Namespace], int]:
    def call(args: argparse.Namespace) -> int:
        from engram_lab.lab.sessions import open_store

        store = open_store(args.store)
        try:
            run(store, args)
        finally:
            store.dispose()
        return 0

    return call


def run_list(store: Store, args: argparse.Namespace) -> None:
    """One line for each session."""
    found = store.sessions(args.search, probe=args.probe, model=args.model, tag=args.tag, deleted=args.deleted)
    if not found:
        asked = args.search or args.probe or args.model or args.tag
        nothing = "There are no deleted sessions." if args.deleted else "There are no sessions."
        print("No session fits." if asked else nothing, file=sys.stderr)
        return
    rows = [
        [
            session.name,
            str(len(session.runs)),
            ", ".join(dict.fromkeys(run.probe for run in session.runs)),
            ", ".join(dict.fromkeys(model.name for run in session.runs for model in run.models)),
            ", ".join(session.tags),
            _moment(session.updated),
            session.id if args.deleted else "",  # where names need not differ
        ]
        for session in found
    ]
    _table(["name", "runs", "probes", "models", "tags", "changed", "id"], rows)


def run_show(store: Store, args: argparse.Namespace) -> None:
    """The session, then one line for each run."""
    session = store.session(args.name)
    print(session.name)
    print(f"id {session.id}, begun {_moment(session.created)}, changed {_moment(session.updated)}")
    if session.tags:
        print("tags:", ", ".join(session.tags))
    if session.note.strip():
        print(f"\n{_harmless(session.note.strip())}")
    print()
    rows = [
        [
            str(n),
            run.probe,
            ", ".join(f"{model.name} ({model.device}, {model.dtype})" for model in run.models),
            str(run.seed),
            "" if run.seconds is None else digits(run.seconds, 2),
            _moment(run.created),
            ", ".join(run.attachments),
        ]
        for n, run in enumerate(session.runs, 1)
    ]
    _table(["run", "probe", "models", "seed", "seconds", "made", "attached"], rows)


def run_export(store: Store, args: argparse.Namespace) -> None:
    """The zip."""
    from engram_lab.lab.sessions.archive import export_session

    if args.out == "-":
        whole = io.BytesIO()
        export_session(store, args.name, whole)
        sys.stdout.buffer.write(whole.getvalue())
        return
    out = _new_file(args)
    session = export_session(store, args.name, out)
    print(f'{out}: "{session.name}" with {_runs(session)}, {_size(out)}')


def run_html(store: Store, args: argparse.Namespace) -> None:
    """The page."""
    from engram_lab.lab.command.console import write
    from engram_lab.lab.sessions.report import html_report

    if args.out == "-":
        write("-", html_report(store, args.name))
        return
    out = _new_file(args)
    session = store.session(args.name)
    write(str(out), html_report(store, session.id))
    print(f'{out}: "{session.name}" with {_runs(session)}, {_size(out)}')


def run_import(store: Store, args: argparse.Namespace) -> None:
    """Into the store, under the session's own name or another one."""
    from engram_lab.lab.sessions.archive import import_session

    session = import_session(store, args.file, args.new_name)
    print(f'Imported "{session.name}" with {_runs(session)}; see: engram-lab session show {shlex.quote(session.name)}')


def run_rename(store: Store, args: argparse.Namespace) -> None:
    """Another name."""
    session = store.session(args.name)
    store.rename(session.id, args.new_name)
    print(f'"{session.name}" is now "{store.session(session.id).name}"')


def run_note(store: Store, args: argparse.Namespace) -> None:
    """The note, the tags, or both."""
    from engram_lab.models.errors import DataError

    if args.text is None and args.file is None and args.tag is None:
        raise DataError("There is nothing to change: give --text or --file for the note, or --tag or --no-tags.")
    text = args.text
    if args.file is not None:
        try:
            text = args.file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            raise DataError(f"{args.file} is not UTF-8 text: save it as UTF-8.") from None
    session = store.session(args.name)
    store.annotate(session.id, note=text, tags=args.tag)
    changed = ["another note"] * (text is not None) + ["other tags"] * (args.tag is not None)
    print(f'"{session.name}" has {" and ".join(changed)}')


def run_delete(store: Store, args: argparse.Namespace) -> None:
    """Out of sight, until it is brought back."""
    session = store.session(args.name)
    store.delete(session.id)
    print(f'Deleted "{session.name}" with {_runs(session)}; bring it back with: '
          f"engram-lab session undelete {shlex.quote(session.name)}")  # fmt: skip


def run_undelete(store: Store, args: argparse.Namespace) -> None:
    """Back among the others."""
    from engram_lab.models.errors import DataError

    gone = [own for own in store.sessions(deleted=True) if own.name == args.name or own.id == args.name]
    if not gone:
        raise DataError(
            f'No deleted session is named "{args.name}"; list them with: engram-lab session list --deleted.'
        )
    if len(gone) > 1:
        ids = ", ".join(own.id for own in gone)
        raise DataError(f'{len(gone)} deleted sessions are named "{args.name}": name one by its id, {ids}.')
    store.undelete(gone[0].id)
    session = store.session(gone[0].id)
    print(f'"{session.name}" is back with {_runs(session)}')


def run_purge(store: Store, args: argparse.Namespace) -> None:
    """Gone for good, once the user has said so."""
    from engram_lab.models.errors import DataError

    if not args.yes:
        count = len(store.sessions(deleted=True))
        question = f"Remove {count} deleted session{'' if count == 1 else 's'} and all deleted runs for good?"
        if not sys.stdin.isatty():
            raise DataError(f"{question} Say so with --yes: they cannot be brought back.")
        if input(f"{question} [y/N] ").strip().lower() not in ("y", "yes"):
            print("Nothing was removed.")
            return
    purged = store.purge()
    print(
        f"Removed {purged.sessions} sessions and {purged.runs} single runs; {purged.freed / 1e6:.3g} MB are free again."
    )


def _new_file(args: argparse.Namespace) -> Path:
    """The file to write; DataError where it cannot be, before any work is done."""
    from engram_lab.models.errors import DataError

    out = Path(args.out)
    check_target(out)
    if out.is_file() and not args.force:
        raise DataError(f"{out} exists already: name another file, or add --force to replace it.")
    return out


def _runs(session: SessionInfo) -> str:
    return f"{len(session.runs)} run{'' if len(session.runs) == 1 else 's'}"


def _size(path: Path) -> str:
    return f"{os.path.getsize(path) / 1e6:.2f} MB"


def _harmless(text: str) -> str:
    """Text without what a terminal would obey; a session may come from somebody else."""
    return "".join(char for char in text if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cf"))


def _moment(when: datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M} UTC"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as what they hold; one that is empty throughout is left out."""
    kept = [n for n in range(len(head)) if any(row[n] for row in rows)]
    lines: list[Any] = [[row[n] for n in kept] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
