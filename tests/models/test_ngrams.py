"""N-grams, hits and sharing against plain dictionaries and the model's own forward; expectations against all cases."""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from engram_lab.models import ngrams
from engram_lab.models.canonical import canonical_key, canonical_map
from engram_lab.models.engram import EngramConfig, EngramForCausalLM
from engram_lab.models.errors import LabError
from engram_lab.models.handle import Handle, open_model
from engram_lab.models.hashing import NgramHash, shift_right
from engram_lab.models.memory import read_memory
from engram_lab.models.ngrams import NgramCounter, Ngrams
from engram_lab.models.tables import memories
from tests.models import tiny
from tests.models.plain_engram import build, record

TEXTS = ("The river runs past the old mill", "the River, the river!", "a", "THE RIVER runs", "naïve café 東京 👍🏽")


@pytest.fixture(scope="module")
def handle() -> Handle:
    """An Engram whose canonical map is that of its tokenizer, with several memory layers and orders to 4."""
    tokenizer = tiny.byte_level()
    shape = tiny.SMALL_LLAMA | {"vocab_size": len(tokenizer)}
    config = EngramConfig(
        **shape, engram_layer_ids=[0, 2], engram_vocab_size=[40, 60, 30], engram_n_heads=3,
        engram_max_ngram_size=4, engram_pad_token_id=1,
    )  # fmt: skip
    canonical = config.set_tokenizer(tokenizer)
    torch.manual_seed(3)
    model = EngramForCausalLM(config).eval()
    model.model.canonical_ids.copy_(torch.from_numpy(canonical))
    return Handle(model, tokenizer, "grams")


def by_hand(handle: Handle, documents: list[list[int]], order: int) -> Counter[tuple[int, ...]]:
    """Counts of the n-grams (token itself first) of one order, document by document."""
    canonical = canonical_map(handle.tokenizer)
    pad = int(canonical[handle.model.config.engram_pad_token_id])
    found: Counter[tuple[int, ...]] = Counter()
    for document in documents:
        for t in range(len(document)):
            found[tuple(int(canonical[document[t - j]]) if t >= j else pad for j in range(order))] += 1
    return found


def as_counter(grams: Ngrams) -> Counter[tuple[int, ...]]:
    assert len({tuple(ids) for ids in grams.ids.tolist()}) == len(grams), "distinct ones only"
    return Counter({tuple(ids): int(n) for ids, n in zip(grams.ids.tolist(), grams.counts, strict=True)})


def test_counts_are_those_of_each_document_alone(handle: Handle) -> None:
    grams, tokens = ngrams.count_ngrams(handle, ngrams.packed(handle, TEXTS))
    documents = [list(handle.encode(text)) for text in TEXTS]
    assert tokens == sum(map(len, documents))
    assert [own.order for own in grams] == [2, 3, 4]
    for own in grams:
        assert as_counter(own) == by_hand(handle, documents, own.order)
    assert max(grams[0].counts) > 2, "The and THE are one n-gram"


def test_packed_documents_read_the_rows_that_a_forward_reads() -> None:
    """Hits of packed sequences against the hash of a real forward with position_ids, each layer and row."""
    handle = Handle(build(), tiny.byte_level(), "memory")
    ids = torch.randint(0, 97, (3, 41), generator=torch.Generator().manual_seed(5))
    positions = torch.arange(41).repeat(3, 1)
    positions[0, 13:] -= 13
    positions[1, 2:] -= 2
    positions[1, 3:] -= 1
    grams, tokens = ngrams.count_ngrams(handle, [(ids, positions)])
    assert tokens == ids.numel()
    read = record(handle.model, "hash", lambda: handle.model(ids, position_ids=positions, use_cache=False))
    for memory, rows in zip(memories(handle), read, strict=True):
        hits, distinct = ngrams.row_counts(memory.hash, grams)
        assert np.array_equal(hits, np.bincount(rows.flatten().numpy(), minlength=memory.hash.num_rows))
        assert hits.sum() == ids.numel() * rows.shape[-1]
        assert ((distinct > 0) == (hits > 0)).all() and (distinct <= hits).all()
        assert distinct.sum() == sum(map(len, grams)) * memory.hash.n_heads


def test_n_grams_at_one_row(handle: Handle) -> None:
    """All n-grams of a row, by the mix modulo the prime, against the rows of a lookback of each."""
    grams, _ = ngrams.count_ngrams(handle, ngrams.packed(handle, TEXTS))
    hash_ = memories(handle)[1].hash
    sizes = ngrams.head_sizes(hash_)
    shared = 0
    for k, own in enumerate(grams):
        padded = np.pad(own.ids, ((0, 0), (0, 4 - own.order)))
        rows = (hash_(torch.from_numpy(padded)[None]) - hash_.offsets)[0].unflatten(-1, sizes.shape)[:, k]
        mixes = ngrams.mixes_of(hash_, own)
        for head, prime in enumerate(sizes[k].tolist()):
            assert np.array_equal(mixes % prime, rows[:, head].numpy())
            shared += len(own) - len(np.unique(mixes % prime))
    assert shared > 10, "a table this small has collisions"


def test_counting_in_pieces_is_counting_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lookback = torch.randint(0, 6, (500, 3), generator=torch.Generator().manual_seed(1))
    whole = NgramCounter(3, 6)
    whole.add(lookback)
    monkeypatch.setattr(ngrams, "PENDING", 7)
    pieces = NgramCounter(3, 6)
    for part in lookback.split(11):
        pieces.add(part)
    assert pieces.tokens == whole.tokens == 500
    for a, b in zip(whole.ngrams(), pieces.ngrams(), strict=True):
        expected = Counter(tuple(ids) for ids in lookback[:, : a.order].tolist())
        assert as_counter(a) == as_counter(b) == expected


@pytest.mark.parametrize("base", [1, 2, 2**13, 2**16, 2**31, 2**40, 2**62])
def test_ids_too_large_to_pack_into_one_number(base: int) -> None:
    values = torch.tensor([0, base - 1, base // 2])
    lookback = values[torch.randint(0, 3, (200, 4), generator=torch.Generator().manual_seed(2))]
    counter = NgramCounter(4, base)
    counter.add(lookback)
    for own in counter.ngrams():
        assert as_counter(own) == Counter(tuple(ids) for ids in lookback[:, : own.order].tolist())


def test_nothing_counted_is_no_n_gram() -> None:
    assert [len(own) for own in NgramCounter(3, 10).ngrams()] == [0, 0]


def test_packing_keeps_documents_and_stops_in_time(handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = [list(handle.encode(text)) for text in TEXTS]
    flat = list(itertools.chain(*encoded))
    for chunk in (1, 9, 10**6):
        monkeypatch.setattr(ngrams, "CHUNK", chunk)
        batches = list(ngrams.packed(handle, TEXTS))
        assert torch.cat([ids[0] for ids, _ in batches]).tolist() == flat
        starts = torch.cat([positions[0] for _, positions in batches]) == 0
        assert starts.nonzero().flatten().tolist() == [0, *itertools.accumulate(map(len, encoded[:-1]))]
        for tokens in (1, len(encoded[0]), len(encoded[0]) + 2, len(flat) + 5):
            cut = list(ngrams.packed(handle, TEXTS, tokens))
            assert torch.cat([ids[0] for ids, _ in cut]).tolist() == flat[:tokens]
    assert list(ngrams.packed(handle, ())) == []


def test_a_model_without_memory_says_so(handle: Handle) -> None:
    dense = Handle(tiny.make("llama"), tiny.byte_level(), "dense")
    with pytest.raises(LabError, match="dense has no Engram memory"):
        ngrams.lookbacks(dense, torch.tensor([[1, 2]]))


def test_canonical_texts_are_the_keys_of_the_map(handle: Handle) -> None:
    tokenizer, canonical = handle.tokenizer, canonical_map(handle.tokenizer)
    names = ngrams.canonical_texts(handle, set(canonical.tolist()))
    assert len(names) == handle.model.config.engram_compressed_vocab_size == len(set(names.values()))
    for raw in range(len(tokenizer)):
        key = canonical_key(tokenizer.decode([raw]), tokenizer.convert_ids_to_tokens(raw))
        assert names[int(canonical[raw])] == key


def outcomes(grams: int, rows: int) -> list[np.ndarray]:
    """The loads [row] of every way in which n-grams can draw rows."""
    return [np.bincount(draw, minlength=rows) for draw in itertools.product(range(rows), repeat=grams)]


@pytest.mark.parametrize(("grams", "rows"), [(1, 2), (2, 2), (5, 2), (1, 3), (2, 3), (4, 3), (3, 5), (5, 5), (3, 7)])
def test_what_even_hashing_gives_against_all_cases(grams: int, rows: int) -> None:
    loads = outcomes(grams, rows)
    coverage = [(load > 0).mean() for load in loads]
    collisions = [load[load > 1].sum() / grams for load in loads]
    spread = [ngrams.load_spread(load) for load in loads]
    for expected, values in (
        (ngrams.expected_coverage, coverage),
        (ngrams.expected_collisions, collisions),
        (ngrams.expected_spread, spread),
    ):
        assert expected(grams, rows) == pytest.approx((np.mean(values), np.std(values)), abs=1e-7)


def test_no_n_gram_covers_nothing() -> None:
    assert ngrams.expected_coverage(0, 11) == (0.0, 0.0)
    assert ngrams.expected_collisions(0, 11) == ngrams.expected_collisions(1, 11) == (0.0, 0.0)
    assert ngrams.load_spread(np.zeros(4, dtype=np.int64)) == 1.0


@pytest.mark.parametrize(("grams", "rows"), [(300, 101), (40, 20_011), (2_000, 20_011)])
def test_deviations_in_exact_fractions(grams: int, rows: int) -> None:
    """Numbers like those of a real table, where two nearly equal ones are subtracted."""
    one, two = 1 - Fraction(1, rows), 1 - Fraction(2, rows)
    empty = rows * one**grams + rows * (rows - 1) * two**grams - (rows * one**grams) ** 2
    mean, sd = ngrams.expected_coverage(grams, rows)
    assert mean == pytest.approx(float(1 - one**grams), rel=1e-12)
    assert sd == pytest.approx(float(empty) ** 0.5 / rows, rel=1e-7)
    alone = grams * one ** (grams - 1)
    pairs = grams * (grams - 1) * one * two ** (grams - 2)
    mean, sd = ngrams.expected_collisions(grams, rows)
    assert mean == pytest.approx(float(1 - alone / grams), rel=1e-12)
    assert sd == pytest.approx(float(pairs + alone - alone**2) ** 0.5 / grams, rel=1e-7)


def test_steps_of_the_published_example() -> None:
    golden = json.loads((Path(__file__).parent / "golden_engram.json").read_text())["C2_hand_example"]
    hash_ = NgramHash(np.array(golden["multipliers"]), golden["primes"])
    lookback: Tensor = shift_right(torch.tensor([golden["ids"]]), golden["pad"], 3)[0]
    steps = ngrams.hash_steps(hash_, lookback)
    assert steps.places.flatten(1).tolist() == golden["all"]
    assert steps.mixes[-1].tolist() == golden["last_pos_mix"] == [624 ^ 85, 624 ^ 85 ^ 651]
    assert steps.terms[-1].tolist() == [208 * 3, 17 * 5, 93 * 7]
    assert steps.rows[-1].flatten().tolist() == [44, 101 + 34, 204 + 67, 311 + 65]


def test_case_and_spaces_address_the_same_rows_on_shipped_weights() -> None:
    handle = open_model("engram-mini", device="cpu")
    one, other = (ngrams.lookbacks(handle, torch.tensor([handle.encode(text)])) for text in (" the River", "The river"))
    assert handle.encode(" the River") != handle.encode("The river")
    assert torch.equal(one[0, -1, :2], other[0, -1, :2])
    for memory in memories(handle):
        heads = memory.hash.n_heads
        assert torch.equal(memory.hash(one)[..., -1, :heads], memory.hash(other)[..., -1, :heads])


def test_hash_steps_leave_a_trace_in_another_thread_alone() -> None:
    """Called as a module, the hash was taken for a part of the forward that another thread traces at the moment."""
    tokenizer = tiny.byte_level()
    own = Handle(tiny.engram(tokenizer), tokenizer, "tiny")
    ids = [list(own.encode("the river runs"))]
    (memory,) = memories(own)
    lookback = ngrams.lookbacks(own, torch.tensor(ids))[0]
    expected = read_memory(own, ids).logits
    ended = threading.Event()

    def hash_on() -> None:
        while not ended.is_set():
            ngrams.hash_steps(memory.hash, lookback)

    beside = threading.Thread(target=hash_on)
    beside.start()
    try:
        for _ in range(60):
            assert torch.equal(read_memory(own, ids).logits, expected)
    finally:
        ended.set()
        beside.join()
