"""Text to tokens to batches: nothing lost, documents apart, the split fixed, bad files named."""

import gzip
import lzma
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from engram_lab.models.data import PackedStream, file_documents, is_held_out, prepare
from engram_lab.models.errors import DataError


@pytest.fixture(scope="module")
def texts() -> list[str]:
    rng = np.random.default_rng(0)
    words = [f"w{i}" for i in range(60)]
    return [" ".join(rng.choice(words, rng.integers(3, 40))) + f" end{i}" for i in range(700)]


@pytest.fixture(scope="module")
def folder(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("data")
    (base / "text.txt").write_text("\n\n".join(texts), encoding="utf-8")
    prepare(base / "out", [base / "text.txt"], vocab_size=400)
    return base / "out"


def test_documents_end_at_blank_lines_whatever_the_packing(tmp_path: Path) -> None:
    content = "\n one\ntwo\n\n \t\nthree é\n"
    (tmp_path / "a.txt").write_text(content, encoding="utf-8")
    with gzip.open(tmp_path / "a.gz", "wt", encoding="utf-8") as file:
        file.write(content)
    with lzma.open(tmp_path / "a.xz", "wt", encoding="utf-8") as file:
        file.write(content)
    for name in ("a.txt", "a.gz", "a.xz"):
        assert list(file_documents(tmp_path / name)) == [" one\ntwo", "three é"]


def test_every_document_is_in_one_split_whole_and_led_by_the_start_token(folder: Path, texts: list[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    found = {}
    for split in ("tokens", "held_out"):
        stream = PackedStream(folder, split, seed=None)
        for offset, length in zip(stream.offsets, stream.lengths, strict=True):
            ids = stream.tokens[offset : offset + length].tolist()
            assert ids[0] == tokenizer.bos_token_id and tokenizer.bos_token_id not in ids[1:]
            found[tokenizer.decode(ids[1:])] = split
    assert found == {text: "held_out" if is_held_out(text) else "tokens" for text in texts}
    assert set(found.values()) == {"tokens", "held_out"}


def test_a_pass_over_the_stream_gives_every_token_once_and_the_next_another_order(folder: Path) -> None:
    stream = PackedStream(folder, "tokens", seed=3)
    first = stream.sequence(0, stream.total)[0]
    second = stream.sequence(stream.total, stream.total)[0]
    assert sorted(first) == sorted(stream.tokens.tolist()) == sorted(second)
    assert first.tolist() != second.tolist()
    again = PackedStream(folder, "tokens", seed=3)
    assert again.sequence(stream.total, 50)[0].tolist() == second[:50].tolist()
    assert PackedStream(folder, "tokens", seed=4).sequence(0, 200)[0].tolist() != first[:200].tolist()


def test_batches_of_any_length_cut_the_same_stream(folder: Path) -> None:
    stream = PackedStream(folder, "tokens", seed=3)
    whole = torch.from_numpy(stream.sequence(0, 97)[0])
    for size, length in [(6, 16), (3, 32), (1, 96)]:
        ids, labels, positions = stream.batch(0, size, length)
        assert torch.equal(ids.reshape(-1), whole[:96]) and torch.equal(labels.reshape(-1), whole[1:])
        starts = (ids == 1) | (torch.arange(length) == 0)
        for row, first in zip(positions, starts, strict=True):
            edges = [*first.nonzero().flatten().tolist(), length]
            assert row.tolist() == [i for a, b in pairwise(edges) for i in range(b - a)]


def test_bad_text_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("Grüße\n".encode("latin-1") * 3)
    (tmp_path / "short.txt").write_text("only one document")
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "broken.xz").write_bytes(b"no archive")
    for name, words in {
        "latin.txt": "not UTF-8",
        "short.txt": "held-out",
        "empty.txt": "No document",
        "broken.xz": "could not be read",
        "missing.txt": "no text file",
    }.items():
        with pytest.raises(DataError, match=words) as error:
            prepare(tmp_path / "out" / name, [tmp_path / name], vocab_size=300)
        assert "\n" not in str(error.value)
    with pytest.raises(DataError, match="--text"):
        prepare(tmp_path / "none", [])
