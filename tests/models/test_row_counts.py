"""Counts of row reads: kept and found again, and those that ship, against forwards over the same text."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from engram_lab.models import listing, row_counts
from engram_lab.models.data import prepare
from engram_lab.models.engram import EngramForCausalLM
from engram_lab.models.errors import DataError, LabError
from engram_lab.models.handle import Handle, open_model
from engram_lab.models.ngrams import packed
from engram_lab.models.row_counts import RowCounts, TrainingRun
from engram_lab.models.train import TrainConfig
from tests.models import tiny
from tests.models.plain_engram import CANONICAL, config_of, record

TEXTS = ("The river runs past the old mill", "and into the sea", "Paris")


def engram() -> EngramForCausalLM:
    torch.manual_seed(2)
    model = EngramForCausalLM(config_of(vocab_size=tiny.VOCAB)).eval()
    model.model.canonical_ids.copy_((torch.arange(tiny.VOCAB) * 7 + 5) % CANONICAL)
    return model


@pytest.fixture(scope="module")
def handle() -> Handle:
    return Handle(engram(), tiny.byte_level(), "memory")


@pytest.fixture
def counts(handle: Handle) -> RowCounts:
    return row_counts.count(handle, packed(handle, TEXTS), ("a", "b"))


def test_kept_counts_are_the_same(counts: RowCounts, tmp_path: Path) -> None:
    file = tmp_path / "counts.safetensors"
    counts.save(file)
    again = row_counts.load(file)
    for name in ("fingerprint", "sources", "tokens", "distinct"):
        assert getattr(again, name) == getattr(counts, name)
    for layer in (0, 2):
        assert np.array_equal(again.hits[layer], counts.hits[layer])
        assert np.array_equal(again.ngrams[layer], counts.ngrams[layer])
    assert [path.name for path in tmp_path.iterdir()] == ["counts.safetensors"]


@pytest.mark.parametrize(("largest", "size"), [(255, 1), (256, 2), (65_535, 2), (65_536, 4), (2**32, 8)])
def test_the_narrowest_type_that_holds_all(counts: RowCounts, tmp_path: Path, largest: int, size: int) -> None:
    hits = counts.hits[0].copy()
    hits[3] = largest
    changed = replace(counts, hits={0: hits, 2: counts.hits[2]})
    changed.save(tmp_path / "counts.safetensors")
    assert row_counts.load(tmp_path / "counts.safetensors").hits[0][3] == largest
    with safe_open(tmp_path / "counts.safetensors", framework="numpy") as stored:
        assert stored.get_tensor("hits.0").itemsize == size


def test_shipped_counts_are_found_by_the_fingerprint(
    counts: RowCounts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "SHIPPED", tmp_path / "models")
    assert row_counts.shipped(counts.fingerprint) is None
    folder = tmp_path / "row_hits"
    folder.mkdir()
    replace(counts, fingerprint="0" * 16, tokens=1).save(folder / "a.safetensors")
    counts.save(folder / "b.safetensors")
    found = row_counts.shipped(counts.fingerprint)
    assert found is not None and found.tokens == counts.tokens != 1
    assert row_counts.shipped("f" * 16) is None


def test_what_is_no_file_of_counts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="There is no file of row counts"):
        row_counts.load(tmp_path / "none")
    (tmp_path / "text").write_text("not a tensor in it")
    with pytest.raises(DataError, match="is no file of row counts"):
        row_counts.load(tmp_path / "text")
    save_file({"hits.1": np.zeros(3, np.uint8)}, tmp_path / "other")
    with pytest.raises(DataError, match="is no file of row counts"):
        row_counts.load(tmp_path / "other")


def test_no_text_and_no_memory(handle: Handle) -> None:
    with pytest.raises(DataError, match="holds no token"):
        row_counts.count(handle, packed(handle, ()), ())
    dense = Handle(tiny.make("llama"), tiny.byte_level(), "dense")
    with pytest.raises(LabError, match="no Engram memory"):
        row_counts.count(dense, packed(dense, TEXTS), ())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `engram-lab train` as it is left behind, with the tiny tokenizer."""
    folder = tmp_path_factory.mktemp("run")
    text = folder / "text.txt"
    text.write_text("\n\n".join(f"The river number {n} runs past the old mill {n % 7}." for n in range(400)))
    tiny.byte_level().save_pretrained(folder / "tokenizer")
    prepare(folder / "data", [text], tokenizer=str(folder / "tokenizer"))
    config = TrainConfig(context=32, short_context=16, long_share=0.4, batch_tokens=64, tokens=64 * 21, seed=9)
    final = folder / "engram" / "final"
    final.mkdir(parents=True)
    (final / "training.json").write_text(json.dumps({"config": asdict(config), "steps": 21}))
    return folder


def test_a_training_run_is_read_as_it_was_trained_on(handle: Handle, run: Path) -> None:
    """The very ids and positions of train_step, and so the hits of all its forwards."""
    training = TrainingRun.open(run, handle)
    config = training.config
    seen = [
        training.stream.batch(step * 64, 64 // config.context_at(step), config.context_at(step)) for step in range(21)
    ]
    assert {ids.shape[1] for ids, _, _ in seen} == {16, 32}
    for at_once in (1, 4, 100):
        batches = list(training.batches(steps_at_once=at_once))
        for part, name in ((0, "ids"), (1, "positions")):
            got = torch.cat([batch[part].flatten() for batch in batches])
            assert torch.equal(got, torch.cat([step[0 if part == 0 else 2].flatten() for step in seen])), name
    assert training.tokens == 21 * 64
    assert sum(ids.numel() for ids, _ in training.batches(tokens=200)) == 192
    counted = row_counts.count(handle, training.batches(), training.sources)
    expected = [np.zeros(memory.hash.num_rows, np.int64) for memory in handle.model.model.memories()]
    for ids, _, positions in seen:

        def forward(ids: torch.Tensor = ids, positions: torch.Tensor = positions) -> None:
            with torch.no_grad():
                handle.model(ids, position_ids=positions, use_cache=False)

        for total, rows in zip(expected, record(handle.model, "hash", forward), strict=True):
            total += np.bincount(rows.flatten().numpy(), minlength=len(total))
    for layer, total in zip((0, 2), expected, strict=True):
        assert np.array_equal(counted.hits[layer], total)
    assert counted.sources == ("text.txt", "in the order of seed 9")


def test_a_folder_that_is_no_run(handle: Handle, run: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no finished run"):
        TrainingRun.open(tmp_path, handle)
    other = Handle(engram(), tiny.sentencepiece(False), "other")
    with pytest.raises(DataError, match="another tokenizer than other"):
        TrainingRun.open(run, other)


def test_the_counts_that_ship_are_of_the_model_that_ships() -> None:
    handle = open_model("engram-mini", device="cpu")
    counts = row_counts.shipped(handle.fingerprint)
    assert counts is not None
    said = json.loads((listing.SHIPPED / "engram-mini" / "training.json").read_text())
    assert counts.tokens == said["tokens"]
    for layer, memory in zip(handle.engram_layers, handle.model.model.memories(), strict=True):
        hits, distinct = counts.hits[layer], counts.ngrams[layer]
        assert len(hits) == memory.hash.num_rows
        ends = np.cumsum(memory.hash.constants()["primes"])[:-1]
        assert [part.sum() for part in np.split(hits, ends)] == [counts.tokens] * 16
        assert [part.sum() for part in np.split(distinct, ends)] == [n for n in counts.distinct for _ in range(8)]
