"""Sessions as files: there and back with every bit, the same bytes each time, and files made to do harm refused."""

from __future__ import annotations

import hashlib
import io
import json
import stat
import struct
import tracemalloc
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from engram_lab.lab.sessions import Store, UnknownSessionError, archive, open_store
from engram_lab.lab.sessions.archive import ArchiveError, export_session, import_session, read_archive
from engram_lab.models.errors import LabError
from engram_lab.probes.base import Report
from tests.full import examples

VIEW = {
    "page": "lens",
    "widgets": {"prompt": "naïve 東京 👍🏽", "pos": -1, "kinds": ["a", "b"]},
    "files": {"file": ["mine.txt", "b25lCnR3bwo="]},  # one, two
}
MOMENT = datetime(2026, 3, 4, 5, 6, 7, 890, tzinfo=UTC)


def opened(folder: Path) -> Store:
    return open_store(f"sqlite:///{folder / 'store.db'}", folder)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = opened(tmp_path / "empty")
    yield found
    found.dispose()


@pytest.fixture(scope="module")
def good(report: Report, set_report: Report, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A session of two runs, exported."""
    source = opened(tmp_path_factory.mktemp("source"))
    source.save(
        report, "Naïve <b>🧪</b>", note="# Seen\n**bold**", tags=["paper", "<i>"], seconds=1.25, view=VIEW,
        attachments={"facts.safetensors": b"\x00\x01"},
    )  # fmt: skip
    source.save(set_report, "Naïve <b>🧪</b>", view=VIEW)
    file = io.BytesIO()
    export_session(source, "Naïve <b>🧪</b>", file)
    source.dispose()
    return file.getvalue()


def state(store: Store, folder: Path) -> tuple[Any, list[tuple[str, bytes]]]:
    """All that a store holds: what it lists, and its files but those of the database."""
    files = [(str(p), p.read_bytes()) for p in sorted(folder.rglob("*")) if p.is_file() and "store.db" not in p.name]
    return (store.sessions(), store.sessions(deleted=True)), files


def members(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return {name: file.read(name) for name in file.namelist()}


def zipped(content: dict[str, bytes], change: Callable[[zipfile.ZipInfo], None] | None = None) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in content.items():
            member = zipfile.ZipInfo(name)
            member.compress_type = zipfile.ZIP_DEFLATED
            if change:
                change(member)
            file.writestr(member, data)
    return out.getvalue()


def with_manifest(good: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    content = members(good)
    manifest = json.loads(content["manifest.json"])
    change(manifest)
    return zipped(content | {"manifest.json": json.dumps(manifest).encode()})


def test_there_and_back(good: bytes, report: Report, set_report: Report, store: Store) -> None:
    session = import_session(store, good)
    assert (session.name, session.note, session.tags) == ("Naïve <b>🧪</b>", "# Seen\n**bold**", ("paper", "<i>"))
    assert [store.report(run.id) for run in session.runs] == [report, set_report]
    first, second = session.runs
    assert first.view == second.view == VIEW
    assert (first.seconds, second.seconds) == (1.25, None)
    assert store.attachment(first.id, "facts.safetensors") == b"\x00\x01"
    assert first.environment["machine"] and first.created < second.created
    again = io.BytesIO()
    export_session(store, session.id, again)
    assert again.getvalue() == good, "from another store the same bytes"
    assert import_session(store, good).name == "Naïve <b>🧪</b> (2)"
    assert import_session(store, good, "Another").name == "Another"


def test_a_file_that_runs_share_is_held_once(good: bytes) -> None:
    content = members(good)
    assert len(content) == 1 + 2 + 1 + 1, "the manifest, two reports, the upload, the attachment"
    for name, data in content.items():
        assert name == "manifest.json" or name == f"blobs/{hashlib.sha256(data).hexdigest()}"


def test_export_to_a_path_is_whole_or_not_at_all(good: bytes, store: Store, tmp_path: Path) -> None:
    import_session(store, good)
    target = tmp_path / "out.zip"
    target.write_bytes(b"before")
    with pytest.raises(UnknownSessionError):
        export_session(store, "nothing", target)
    assert target.read_bytes() == b"before"
    export_session(store, "Naïve <b>🧪</b>", target)
    assert target.read_bytes() == good
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["out.zip"], "nothing is left beside it"
    assert read_archive(target).name == "Naïve <b>🧪</b>"


def test_too_large_to_be_imported_is_not_exported(
    good: bytes, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_session(store, good)
    monkeypatch.setattr(archive, "MOST_BYTES", 1000)
    with pytest.raises(ArchiveError, match="more than"):
        export_session(store, "Naïve <b>🧪</b>", tmp_path / "out.zip")
    assert not (tmp_path / "out.zip").exists()


# What a hostile file may be made of: name -> (the file, a word of the sentence that says why not)


def lying_bomb(good: bytes, says: int) -> bytes:
    """A member of 8 MB whose headers say another size; its checksum fits what they say or the whole."""
    zeros = bytes(8 << 20)
    name = f"blobs/{hashlib.sha256(zeros).hexdigest()}".encode()
    data = bytearray(zipped({**members(good), name.decode(): zeros}))
    checksum = zlib.crc32(zeros[:says])
    local = data.index(name) - 30
    central = data.rindex(name) - 46
    struct.pack_into("<I", data, local + 14, checksum)
    struct.pack_into("<I", data, local + 22, says)
    struct.pack_into("<I", data, central + 16, checksum)
    struct.pack_into("<I", data, central + 24, says)
    return bytes(data)


def many(good: bytes) -> bytes:
    """With a last record that speaks of more members than are read, let alone listed."""
    return good[:-12] + struct.pack("<H", archive.MOST_MEMBERS + 1) + good[-10:]


def twice(good: bytes) -> bytes:
    out = io.BytesIO(good)
    with warnings.catch_warnings(), zipfile.ZipFile(out, "a") as file:
        warnings.simplefilter("ignore")
        file.writestr("manifest.json", members(good)["manifest.json"])
    return out.getvalue()


def link(member: zipfile.ZipInfo) -> None:
    member.external_attr = (stat.S_IFLNK | 0o777) << 16


def encrypted(good: bytes) -> bytes:
    data = bytearray(good)
    for signature, flags in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):
        data[data.index(signature) + flags] |= 1
    return bytes(data)


def named(good: bytes, name: str) -> bytes:
    return zipped(members(good) | {name: b"x"})


def blob_of(report: bytes, good: bytes) -> bytes:
    """The first run's report replaced, its hash right."""
    content = members(good)
    manifest = json.loads(content["manifest.json"])
    del content[f"blobs/{manifest['runs'][0]['report']}"]
    manifest["runs"][0]["report"] = hashlib.sha256(report).hexdigest()
    content |= {"manifest.json": json.dumps(manifest).encode(), f"blobs/{manifest['runs'][0]['report']}": report}
    return zipped(content)


def run_with(**values: Any) -> Callable[[bytes], bytes]:
    return lambda good: with_manifest(good, lambda manifest: manifest["runs"][0].update(values))


def session_with(**values: Any) -> Callable[[bytes], bytes]:
    return lambda good: with_manifest(good, lambda manifest: manifest.update(values))


HOSTILE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "no zip": (lambda good: b"PK, but no zip", "no zip"),
    "nothing": (lambda good: b"", "no zip"),
    "something behind it": (lambda good: good + b"x", "behind"),
    "cut": (lambda good: good[: len(good) // 2], "no zip"),
    "a bomb that says it is small": (lambda good: lying_bomb(good, 10), "not what its name says"),
    "a member that says it is larger": (lambda good: lying_bomb(good, (8 << 20) + 1), "cut off|damaged"),
    "too many members": (many, "more than 8000 members"),
    "a path outside": (lambda good: named(good, "../outside"), "does not belong"),
    "an absolute path": (lambda good: named(good, "/tmp/outside"), "does not belong"),
    "a path of Windows": (lambda good: named(good, "blobs\\..\\x"), "does not belong"),
    "a folder": (lambda good: named(good, "blobs/"), "does not belong"),
    "a stranger": (lambda good: named(good, "evil.pkl"), "does not belong"),
    "a name in capitals": (lambda good: named(good, "blobs/" + "A" * 64), "does not belong"),
    "a name with a line break": (lambda good: named(good, f"blobs/{'a' * 64}\n"), "does not belong"),
    "a name with an escape": (lambda good: named(good, "\x1b[2J"), r"'\\x1b\[2J' does not belong"),
    "a member twice": (twice, "twice"),
    "links": (lambda good: zipped(members(good), link), "link"),
    "encrypted": (encrypted, "encrypted"),
    "another compression": (
        lambda good: zipped(members(good), lambda m: setattr(m, "compress_type", zipfile.ZIP_LZMA)), "compressed"
    ),
    "no manifest": (lambda good: zipped({k: v for k, v in members(good).items() if k[0] == "b"}), "no manifest"),
    "a blob of another content": (
        lambda good: zipped({k: v if k[0] == "m" else v + b"x" for k, v in members(good).items()}), "not what its name"
    ),
    "a blob too many": (
        lambda good: named(good, f"blobs/{hashlib.sha256(b'x').hexdigest()}"), "that no run names"
    ),
    "a blob too few": (
        lambda good: zipped({"manifest.json": members(good)["manifest.json"]}), "run 1: it names a blob"
    ),
    "a manifest that is no JSON": (lambda good: zipped(members(good) | {"manifest.json": b"{"}), "damaged"),
    "a manifest in Latin-1": (lambda good: zipped(members(good) | {"manifest.json": b'"\xe9"'}), "damaged"),
    "a manifest that is a list": (lambda good: zipped(members(good) | {"manifest.json": b"[]"}), "format number"),
    "a manifest too deep": (
        lambda good: zipped(members(good) | {"manifest.json": b"[" * 100_000 + b"]" * 100_000}), "damaged"
    ),
    "a manifest too long": (
        lambda good: zipped(members(good) | {"manifest.json": b" " * (archive.LARGEST_MANIFEST + 1)}), "unpacks to more"
    ),
    "a newer version": (session_with(format=2), "newer version of the lab.*update"),
    "a format that never was": (session_with(format=0), "never was"),
    "a format that is true": (session_with(format=True), "format number"),
    "an unknown key": (session_with(pickle="x"), "these alone"),
    "a missing key": (lambda good: with_manifest(good, lambda m: m.pop("note")), "needs the keys"),
    "a name of two lines": (session_with(name="a\nb"), "one line"),
    "an empty name": (session_with(name=" "), "one line"),
    "a name too long": (session_with(name="x" * 121), "120 characters"),
    "a name that is a number": (session_with(name=3), '"name"'),
    "half a surrogate": (session_with(note="\ud800"), "damaged"),
    "a note with a NUL": (session_with(note="\x00"), "NUL"),
    "tags that are a text": (session_with(tags="abc"), '"tags"'),
    "a tag that is a list": (session_with(tags=[["a"]]), '"tags"'),
    "a local time": (session_with(created="2026-03-04T05:06:07.000000+02:00"), "moment in UTC"),
    "a date that is none": (session_with(created="2026-13-04T05:06:07.000000+00:00"), "damaged|moment"),
    "runs that are a dictionary": (session_with(runs={}), '"runs"'),
    "a run that is a text": (session_with(runs=["x"]), "run 1: a run needs the keys"),
    "a probe that there is not": (run_with(probe="os.system"), "no probe 'os.system'"),
    "another probe": (run_with(probe="gates"), "says that it is of gates"),
    "a duration that is a text": (run_with(seconds="1"), "duration"),
    "a duration that is true": (run_with(seconds=True), "duration"),
    "a duration below nothing": (run_with(seconds=-1), "duration"),
    "a duration without end": (run_with(seconds=float("inf")), "Infinity"),
    "a number of 5000 digits": (
        lambda good: zipped(members(good) | {"manifest.json": b'{"format": 1' + b"0" * 5000 + b"}"}), "damaged"
    ),
    "an environment of lists": (run_with(environment={"a": []}), "environment"),
    "a view that is a text": (run_with(view="x"), "view"),
    "a view with a function": (run_with(view={"page": "../x", "widgets": {}, "files": {}}), "page"),
    "a view of a file that is not there": (
        run_with(view={"page": "lens", "widgets": {}, "files": {"f": ["n", "0" * 64]}}), "names a blob"
    ),
    "an attachment by a path": (run_with(attachments={"x": "../../etc/passwd"}), "names a blob"),
    "a report that is a pickle": (lambda good: blob_of(b"\x80\x04cos\nsystem\n", good), "run 1"),
    "a report by number": (run_with(report=7), "names a blob"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_bad_file_says_why_and_changes_nothing(case: str, good: bytes, store: Store, tmp_path: Path) -> None:
    make, word = HOSTILE[case]
    import_session(store, good, "There already")
    before = state(store, tmp_path)
    hostile = make(good)
    with pytest.raises(ArchiveError, match=word) as caught:
        import_session(store, hostile)
    sentence = str(caught.value)
    assert sentence.startswith("The file cannot be read as a session of the lab: ") and sentence.endswith(".")
    assert sentence.isprintable() and not sentence.endswith("..") and len(sentence) < 400
    assert state(store, tmp_path) == before


def test_no_more_is_unpacked_than_allowed(good: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a bomb of 32 MB, with a limit of 2 MB, never more than a few MB lie in memory."""
    hostile = zipped(members(good) | {"blobs/" + "0" * 64: bytes(32 << 20)})
    monkeypatch.setattr(archive, "MOST_BYTES", 2 << 20)
    tracemalloc.start()
    with pytest.raises(ArchiveError, match="unpacks to more"):
        read_archive(hostile)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 << 20


def test_the_file_is_named(tmp_path: Path) -> None:
    bad = tmp_path / "holiday.zip"
    bad.write_bytes(b"no")
    with pytest.raises(ArchiveError, match=r"^holiday\.zip cannot"):
        read_archive(bad)
    with pytest.raises(FileNotFoundError):
        read_archive(tmp_path / "not there.zip")


QUICK = examples(suppress_health_check=list(HealthCheck))


def fuzzed(data: bytes) -> None:
    """Only a sentence may come of it; or what was read is what was written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            read_archive(data)
        except LabError as error:
            assert "\n" not in str(error)


@pytest.fixture(scope="module")
def small(set_report: Report, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A session of one small run, exported."""
    source = opened(tmp_path_factory.mktemp("small"))
    source.save(set_report, "Small", view=VIEW)
    file = io.BytesIO()
    export_session(source, "Small", file)
    source.dispose()
    return file.getvalue()


@QUICK
@given(data=st.data())
def test_truncated_files(data: st.DataObject, small: bytes) -> None:
    cut = data.draw(st.integers(0, len(small) - 1))
    with pytest.raises(LabError):
        read_archive(small[:cut])


@QUICK
@given(data=st.data())
def test_flipped_bytes(data: st.DataObject, small: bytes) -> None:
    broken = bytearray(small)
    for _ in range(data.draw(st.integers(1, 8))):
        broken[data.draw(st.integers(0, len(small) - 1))] = data.draw(st.integers(0, 255))
    fuzzed(bytes(broken))


@QUICK
@given(data=st.data())
def test_flipped_bytes_in_the_list_of_members(data: st.DataObject, small: bytes) -> None:
    """Where zipfile itself reads numbers and names."""
    start = small.index(b"PK\x01\x02")
    broken = bytearray(small)
    for _ in range(data.draw(st.integers(1, 4))):
        broken[data.draw(st.integers(start, len(small) - 1))] = data.draw(st.integers(0, 255))
    fuzzed(bytes(broken))


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@QUICK
@given(data=st.data())
def test_any_json_in_any_place_of_the_manifest(data: st.DataObject, small: bytes) -> None:
    def change(manifest: dict[str, Any]) -> None:
        place = data.draw(st.sampled_from([manifest, *manifest["runs"], manifest["runs"][0]["view"]]))
        place[data.draw(st.sampled_from([*place, "new"]))] = data.draw(PLAIN)

    fuzzed(with_manifest(small, change))


@QUICK
@given(data=st.data())
def test_any_byte_of_a_report_with_its_hash_mended(data: st.DataObject, small: bytes) -> None:
    content = members(small)
    blob = bytearray(content[f"blobs/{json.loads(content['manifest.json'])['runs'][0]['report']}"])
    end = 8 + int.from_bytes(blob[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        blob[data.draw(st.integers(0, end))] = data.draw(st.integers(0, 255))
    fuzzed(blob_of(bytes(blob), small))
