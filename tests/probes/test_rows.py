"""The row inspector against plain dictionaries, a direct path worked out in NumPy, and the shipped weights."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engram_lab.models import listing, row_counts
from engram_lab.models.canonical import canonical_map
from engram_lab.models.engram import EngramConfig, EngramForCausalLM
from engram_lab.models.errors import Cancelled, DataError, LabError, PromptError
from engram_lab.models.handle import Handle, open_model
from engram_lab.models.memory import read_memory
from engram_lab.models.ngrams import packed
from engram_lab.models.tables import memories
from engram_lab.probes import rows
from engram_lab.probes.base import Report
from engram_lab.probes.rows import RowsConfig
from tests.models import tiny

PROMPT = "The river runs past the old mill"
TEXT = ("the River runs past the sea", "THE mill and the sea", "past the old mill the river runs", "Paris", PROMPT) * 2
TEXT += tuple(" ".join(words) for words in itertools.permutations(("river", "Mill", "the sea", "Paris", "old")))
LAYERS = (0, 2)


@pytest.fixture(scope="module")
def handle() -> Handle:
    """A model of tiny tables, so that collisions are many; every weight matters."""
    tokenizer = tiny.byte_level()
    shape = tiny.SMALL_LLAMA | {"vocab_size": len(tokenizer), "tie_word_embeddings": False}
    config = EngramConfig(**shape, engram_layer_ids=list(LAYERS), engram_vocab_size=[17, 23], engram_n_heads=3)
    canonical = config.set_tokenizer(tokenizer)
    torch.manual_seed(4)
    model = EngramForCausalLM(config).eval()
    model.model.canonical_ids.copy_(torch.from_numpy(canonical))
    with torch.no_grad():
        model.model.norm.weight.normal_(1.0, 0.3)
        for memory in model.model.memories():
            memory.table.weight.normal_()
            memory.conv.weight.normal_(std=0.5)
    return Handle(model, tokenizer, "tiny")


def config(**changes: Any) -> RowsConfig:
    return RowsConfig(**{"models": ("tiny",), "prompts": (PROMPT,), "text": TEXT, "layer": 2, **changes})


@pytest.fixture(scope="module")
def report(handle: Handle) -> Report:
    return rows.run([handle], config())


def canonical_documents(handle: Handle, texts: tuple[str, ...]) -> list[list[int]]:
    canonical = canonical_map(handle.tokenizer)
    return [[int(canonical[i]) for i in handle.encode(text)] for text in texts]


def grams_of(documents: list[list[int]], order: int, pad: int) -> Counter[tuple[int, ...]]:
    """Counts of n-grams, oldest token first."""
    return Counter(
        tuple([pad] * (order - 1) + document)[t : t + order] for document in documents for t in range(len(document))
    )


def place(handle: Handle, layer: int, gram: tuple[int, ...], prime: int) -> int:
    """The row of an n-gram, oldest token first, in Python's own integers."""
    multipliers = memories(handle)[LAYERS.index(layer)].hash.constants()["multipliers"].tolist()
    mix = 0
    for token, multiplier in zip(reversed(gram), multipliers, strict=False):
        mix ^= token * multiplier
    return mix % prime


def test_grams_rows_and_sharing_by_hand(handle: Handle, report: Report) -> None:
    result = report.result
    documents, (own,) = canonical_documents(handle, TEXT), canonical_documents(handle, (PROMPT,))
    pad = int(canonical_map(handle.tokenizer)[0])
    assert [row.prime for row in result.rows] == memories(handle)[1].hash.constants()["primes"].tolist()
    starts = np.cumsum([0] + [row.prime for row in result.rows])
    some = 0
    for n, row in enumerate(result.rows):
        assert (row.order, row.head) == (2 + n // 3, n % 3)
        gram, counts = tuple(own[-row.order :]), grams_of(documents, row.order, pad)
        assert result.ngrams[row.order - 2].canonical_ids == gram
        assert result.ngrams[row.order - 2].text_count == counts[gram] > 0
        assert row.row == place(handle, 2, gram, row.prime)
        assert row.row_id == starts[n] + row.row
        here = {g: c for g, c in counts.items() if place(handle, 2, g, row.prime) == row.row}
        assert row.text_hits == sum(here.values()) and row.text_ngrams == len(here)
        others = {g: c for g, c in here.items() if g != gram}
        assert row.shared_total == len(others)
        assert [other.count for other in row.shared] == sorted(others.values(), reverse=True)[:10]
        some += len(row.shared)
        assert row.training_hits is row.training_ngrams is None
    assert some > 5
    assert result.training is None


def test_the_rows_are_those_of_the_forward(handle: Handle, report: Report) -> None:
    ids = handle.encode(PROMPT)
    read = read_memory(handle, [ids])
    assert [row.row_id for row in report.result.rows] == read.rows[1, 0, -1].flatten().tolist()
    table = memories(handle)[1].table.weight.detach()
    for row in report.result.rows:
        assert row.norm == pytest.approx(float(table[row.row_id].norm()), rel=1e-6)
    assert report.result.gate == pytest.approx(float(read.gate[1, 0, -1]))
    assert report.result.written_norm == pytest.approx(float(read.written[1, 0, -1].norm()))
    assert (report.result.layer, report.result.position) == (2, len(ids) - 1)


def test_texts_of_the_n_grams(handle: Handle) -> None:
    found = rows.run([handle], config(position=2)).result.ngrams
    ids = handle.encode(PROMPT)
    for gram in found:
        assert gram.raw_ids == ids[max(0, 3 - gram.order) : 3]
        pieces = handle.pieces(ids)
        assert gram.raw_text.encode() == b"".join(pieces[max(0, 3 - gram.order) : 3])
    (first,) = (gram for gram in rows.run([handle], config(position=0)).result.ngrams if gram.order == 3)
    assert first.raw_ids == ids[:1] and len(first.canonical_ids) == 3, "before the start there is padding"
    assert first.canonical_texts == ("<|bos|>", "<|bos|>", "<|bos|>"), "the padding id of this model is its first"


def numpy_logits(handle: Handle, report: Report, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """(logits [row, vocab], values [row, d_model]) of the rows, from the weights and the last residual."""
    weights = {name: value.double().numpy() for name, value in handle.model.state_dict().items()}
    with handle.running():
        last = handle.residuals([handle.encode(PROMPT)]).states[-1, 0, report.result.position].double().numpy()
    rms = np.sqrt((last**2).mean() + handle.model.config.rms_norm_eps)
    prefix = f"model.layers.{layer}.memory."
    logits, values = [], []
    for n, row in enumerate(report.result.rows):
        vector = weights[prefix + "table.weight"][row.row_id]
        columns = weights[prefix + "value.weight"][:, n * len(vector) : (n + 1) * len(vector)]
        values.append(columns @ vector)
        full = weights["lm_head.weight"] @ (weights["model.norm.weight"] * values[-1] / rms)
        logits.append(full - full.mean())
    return np.array(logits), np.array(values)


def check_said(said: rows.Said, logits: np.ndarray) -> None:
    order = np.argsort(-logits, kind="stable")
    k = len(said.promoted_ids)
    assert list(said.promoted_ids) == order[:k].tolist()
    assert list(said.suppressed_ids) == np.argsort(logits, kind="stable")[:k].tolist()
    np.testing.assert_allclose(said.promoted, logits[list(said.promoted_ids)], atol=2e-5)
    np.testing.assert_allclose(said.suppressed, logits[list(said.suppressed_ids)], atol=2e-5)
    assert said.promoted[0] > 0 > said.suppressed[0]


@pytest.mark.parametrize("layer", LAYERS)
def test_the_direct_path_by_hand(handle: Handle, layer: int) -> None:
    report = rows.run([handle], config(layer=layer, top_k=5))
    logits, values = numpy_logits(handle, report, layer)
    for row, own in zip(report.result.rows, logits, strict=True):
        check_said(row.says, own)
    check_said(report.result.came_through, report.result.gate * logits.sum(axis=0))
    assert report.result.gated_norm == pytest.approx(report.result.gate * np.linalg.norm(values.sum(axis=0)), rel=1e-5)


def test_what_came_through_is_what_is_written_without_the_convolution(handle: Handle) -> None:
    """With a silent convolution the gated value is all that the memory writes."""
    weight = memories(handle)[1].conv.weight
    kept = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.zero_()
        result = rows.run([handle], config()).result
        assert result.gated_norm == pytest.approx(result.written_norm, rel=1e-5)
    finally:
        with torch.no_grad():
            weight.copy_(kept)
    assert rows.run([handle], config()).result.written_norm != pytest.approx(result.written_norm, rel=1e-2)


def test_usage_by_hand(handle: Handle, report: Report) -> None:
    usage = report.result.text
    documents = canonical_documents(handle, TEXT)
    assert usage.tokens == sum(map(len, documents))
    pad = int(canonical_map(handle.tokenizer)[0])
    for order in (2, 3):
        counts = grams_of(documents, order, pad)
        n = len(counts)
        assert usage.distinct[order - 2] == n
        for head in range(3):
            at = (order - 2, head)
            m = int(usage.rows[at])
            load: dict[int, list] = defaultdict(list)
            for gram in counts:
                load[place(handle, 2, gram, m)].append(gram)
            assert usage.coverage[at] == pytest.approx(len(load) / m)
            shared = sum(len(grams) for grams in load.values() if len(grams) > 1)
            assert usage.collisions[at] == pytest.approx(shared / n)
            sizes = [len(load.get(row, [])) for row in range(m)]
            assert usage.load_mean[at] == pytest.approx(n / m)
            assert usage.load[at].tolist() == pytest.approx(np.quantile(sizes, usage.quantiles).tolist())
            assert usage.spread[at] == pytest.approx(np.var(sizes, ddof=1) / np.mean(sizes))
            assert usage.hits_max[at] == max(sum(counts[g] for g in grams) for grams in load.values())
            assert usage.coverage_expected[at] == pytest.approx(1 - (1 - 1 / m) ** n)
            assert usage.collisions_expected[at] == pytest.approx(1 - (1 - 1 / m) ** (n - 1))


def test_limits_and_positions(handle: Handle, report: Report) -> None:
    length = len(handle.encode(PROMPT))
    for position in (0, 3, length - 1):
        one, other = (rows.run([handle], config(position=p)).result for p in (position, position - length))
        assert one == other and one.position == position
    short = rows.run([handle], config(top_shared=1, top_k=2)).result
    for row, whole in zip(short.rows, report.result.rows, strict=True):
        assert row.shared == whole.shared[:1] and row.shared_total == whole.shared_total
        assert row.says.promoted_ids == whole.says.promoted_ids[:2]
    assert rows.run([handle], config(layer=None)).result.layer == 0, "the first memory layer"


def test_without_a_text_nothing_is_counted(handle: Handle) -> None:
    result = rows.run([handle], config(text=())).result
    assert result.text is None
    assert all(gram.text_count is None for gram in result.ngrams)
    for row in result.rows:
        assert row.text_hits is row.text_ngrams is row.shared_total is None and row.shared == ()


def test_training_hits_of_a_file_and_of_what_ships(
    handle: Handle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = row_counts.count(handle, packed(handle, TEXT[:3]), ("three texts",))
    counts.save(tmp_path / "counts.safetensors")
    named = rows.run([handle], config(counts=str(tmp_path / "counts.safetensors"), text=TEXT[:3])).result
    assert named.training.sources == ("three texts",)
    for row in named.rows:
        assert (row.training_hits, row.training_ngrams) == (row.text_hits, row.text_ngrams)
    assert replace(named.training, sources=()) == replace(named.text, sources=())
    replace(counts, fingerprint="0" * 16).save(tmp_path / "other.safetensors")
    with pytest.raises(DataError, match="counts of the model 0000000000000000, and tiny is"):
        rows.run([handle], config(counts=str(tmp_path / "other.safetensors")))
    monkeypatch.setattr(listing, "SHIPPED", tmp_path / "models")
    (tmp_path / "row_hits").mkdir()
    counts.save(tmp_path / "row_hits" / "tiny.safetensors")
    assert rows.run([handle], config(text=TEXT[:3])).result == named


def test_a_report_goes_to_json_and_back(report: Report, handle: Handle) -> None:
    stored = json.loads(report.to_json())
    assert Report.from_dict(stored) == report
    assert stored["result"]["rows"][0]["training_hits"] is None
    assert report.to_json() == rows.run([handle], config()).to_json()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"models": ("a", "b")}, "takes one model, not 2"),
        ({"prompts": ()}, "takes one prompt, not 0"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_shared": -1}, "top_shared is -1"),
        ({"layer": 1}, "tiny has no memory at layer 1: its memory layers are 0, 2"),
        ({"position": 999}, "position 999 is not in the prompt"),
        ({"position": -999}, "position -999 is not in the prompt"),
        ({"counts": "nowhere"}, "There is no file of row counts nowhere"),
        ({"prompts": ("",)}, "prompt is empty"),
    ],
)
def test_bad_requests_are_one_sentence(handle: Handle, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LabError, match=sentence) as caught:
        rows.run([handle], config(**changes))
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)
    if "prompts" in changes:
        assert isinstance(caught.value, PromptError)


def test_a_model_without_memory(handle: Handle) -> None:
    dense = Handle(tiny.make("llama"), tiny.byte_level(), "dense")
    with pytest.raises(LabError, match="dense has no Engram memory"):
        rows.run([dense], config())
    with pytest.raises(LabError, match="names one model, and 2 were given"):
        rows.run([handle, dense], config())


def test_progress_rises_and_can_stop_the_run(handle: Handle) -> None:
    told: list[float] = []
    rows.run([handle], config(), lambda fraction, doing: told.append(fraction))
    assert told == sorted(told) and 0 < told[0] <= 1

    def stop(fraction: float, doing: str) -> None:
        raise Cancelled

    with pytest.raises(Cancelled):
        rows.run([handle], config(), stop)
    assert rows.run([handle], config()).result.layer == 2


def test_the_shipped_memory_says_what_follows() -> None:
    """After "of the United" the memory alone promotes what it read there in training."""
    handle = open_model("engram-mini", device="cpu")
    asked = RowsConfig(("engram-mini",), ("Washington, D.C., is the capital of the United",), top_k=3)
    result = rows.run([handle], asked).result
    assert set(result.came_through.promoted_texts) == {" States", " Kingdom", " Nations"}
    assert [gram.canonical_texts for gram in result.ngrams] == [("the", "united"), ("of", "the", "united")]
    assert all(row.training_hits > row.training_ngrams > 10 for row in result.rows)
    assert np.abs(result.training.spread - 1).max() < 0.05, "the hash spreads the training text evenly"
