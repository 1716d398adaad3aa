"""`engram-lab rows count` as a user runs it: counts over text files, interrupts, bad requests."""

from __future__ import annotations

import argparse
import lzma
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from engram_lab.lab.command import rows as rows_command
from engram_lab.lab.command.main import main
from engram_lab.models import listing, row_counts
from engram_lab.models.errors import DataError, LabError
from engram_lab.models.handle import open_model
from engram_lab.models.memory import read_memory
from tests import memory_lab

DOCUMENTS = ["The river runs\npast the old mill", "and into the sea.", "Paris, the capital " * 3]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, shipped: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    return memory_lab.make(tmp_path_factory.mktemp("lab"), shipped, tokenizer)


@pytest.fixture(autouse=True)
def lab(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "SHIPPED", models)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two documents in a plain file, one in a packed one."""
    plain, packed = tmp_path / "a.txt", tmp_path / "b.txt.xz"
    plain.write_text("\n\n".join(DOCUMENTS[:2]) + "\n")
    packed.write_bytes(lzma.compress(DOCUMENTS[2].encode()))
    return [plain, packed]


def command(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    rows_command.add_arguments(parser)
    args = parser.parse_args(["count", *map(str, arguments)])
    code: int = args.call(args)
    return code


def test_counts_are_the_reads_of_the_forwards(
    files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.safetensors"
    assert command("--model", "engram-mini", "--text", *files, "--out", out) == 0
    handle, counts = open_model("engram-mini"), row_counts.load(out)
    assert counts.fingerprint == handle.fingerprint and counts.sources == ("a.txt", "b.txt.xz")
    read = [read_memory(handle, [handle.encode(text.rstrip("\n"))]) for text in DOCUMENTS]
    assert counts.tokens == sum(r.rows.shape[2] for r in read)
    for n, layer in enumerate(handle.engram_layers):
        hits = Counter(int(i) for r in read for i in r.rows[n].flatten())
        assert dict(enumerate(counts.hits[layer].tolist())) == {i: hits[i] for i in range(len(counts.hits[layer]))}
    said = capsys.readouterr().out
    assert f"{counts.tokens} tokens" in said and f"the most {counts.hits[2].max()} times" in said
    again = tmp_path / "again.safetensors"
    command("--model", "engram-mini", "--text", *files, "--out", again)
    assert again.read_bytes() == out.read_bytes()
    command("--model", "engram-mini", "--text", *files, "--tokens", 5, "--out", again)
    few = row_counts.load(again)
    assert few.tokens == 5
    start = read_memory(handle, [handle.encode(DOCUMENTS[0])[:5]]).rows[0].flatten().numpy()
    assert np.array_equal(few.hits[0], np.bincount(start, minlength=len(few.hits[0])))


def test_bad_requests_are_one_sentence(files: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    for arguments, sentence in (
        (("--model", "engram-mini", "--text", tmp_path / "none.txt", "--out", out), "There is no text file"),
        (("--model", "dense-mini", "--text", *files, "--out", out), "no Engram memory"),
        (("--model", "engram-mini", "--text", *files, "--tokens", 0, "--out", out), "--tokens is 0"),
        (("--model", "engram-mini", "--text", *files, "--out", tmp_path / "no" / "x"), "There is no folder"),
        (("--model", "engram-mini", "--run", tmp_path, "--out", out), "is no finished run"),
    ):
        with pytest.raises(LabError, match=sentence) as caught:
            command(*arguments)
        assert str(caught.value).endswith(".") and "\n" not in str(caught.value)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match="is not UTF-8"):
        command("--model", "engram-mini", "--text", tmp_path / "latin.txt", "--out", out)
    assert not out.exists()


def test_an_interrupt_leaves_the_file_as_it_was(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of a text: no half-written file, and one from before is kept."""
    out, heard = tmp_path / "out.safetensors", list[int]()
    out.write_bytes(b"before")

    def interrupted(handle: Any, batches: Any, sources: Any, progress: Callable[[int], None]) -> Any:
        def pressed(tokens: int) -> None:
            progress(tokens)
            heard.append(tokens)
            raise KeyboardInterrupt

        return count(handle, batches, sources, pressed)

    count = row_counts.count
    monkeypatch.setattr(row_counts, "count", interrupted)
    assert main(["rows", "count", "--model", "engram-mini", "--text", *map(str, files), "--out", str(out)]) == 130
    assert len(heard) == 1 and heard[0] > 0
    assert out.read_bytes() == b"before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.txt.xz", "out.safetensors"]
