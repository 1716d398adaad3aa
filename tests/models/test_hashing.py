"""The n-gram hash against values of an independent implementation, and its primes against a sieve."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from engram_lab.models.engram import EngramConfig, document_reach, gate_ceiling, gate_value
from engram_lab.models.hashing import (
    INT64_MAX,
    NgramHash,
    is_prime,
    layer_multipliers,
    ngram_mixes,
    rows_per_order,
    shift_right,
    table_primes,
)

GOLDEN = json.loads((Path(__file__).parent / "golden_engram.json").read_text())
TINY = GOLDEN["C_tiny"]
TINY_CONFIG = TINY["config"]
EDGES = GOLDEN["C3_edges"]
N = TINY_CONFIG["max_ngram"]
PAD = TINY_CONFIG["pad_canon"]


def tiny_hash(layer: int) -> NgramHash:
    primes = table_primes(TINY_CONFIG["layer_ids"], N, TINY_CONFIG["heads"], TINY_CONFIG["sizes"])
    multipliers = layer_multipliers(layer, N, TINY_CONFIG["V"], TINY_CONFIG["seed"])
    return NgramHash(multipliers, primes[TINY_CONFIG["layer_ids"].index(layer)])


def hashes(hash_: NgramHash, ids: list[list[int]], pad: int = PAD) -> torch.Tensor:
    return hash_(shift_right(torch.tensor(ids), pad, N)) - hash_.offsets


def test_primes_and_rows_are_those_published_with_deepseek_v41_flash() -> None:
    golden = GOLDEN["A_deepseek_v41_flash"]
    config = golden["config"]
    layers = config["engram_layer_ids"]
    sizes = rows_per_order(config["engram_vocab_size"], config["max_ngram"])
    primes = table_primes(layers, config["max_ngram"], config["heads"], sizes)
    assert {str(layer): rows for layer, rows in zip(layers, primes, strict=True)} == golden["primes"]
    sums = [sum(sum(row) for row in layer) for layer in primes]
    assert sums == golden["computed_row_sums"] == golden["published_engram_num_embeddings"]
    for layer in layers:
        found = layer_multipliers(layer, config["max_ngram"], config["compressed_vocab_size"], config["seed"])
        assert found.dtype == np.int64
        assert found.tolist() == golden["multipliers"][str(layer)]
        assert found.max() < 2 * golden["half_bound"]


def test_primes_and_multipliers_of_the_public_demo() -> None:
    golden = GOLDEN["B_demo_default"]
    config = golden["config"]
    primes = table_primes(
        config["layer_ids"], config["max_ngram"], config["heads"],
        rows_per_order(config["engram_vocab_size"], config["max_ngram"]),
    )  # fmt: skip
    for layer, found in zip(config["layer_ids"], primes, strict=True):
        assert found == golden["primes"][str(layer)]
        rows = sum(map(sum, found))
        assert rows == golden["rows_per_layer"][str(layer)]
        assert rows * 64 == golden["embedding_params_per_layer_D64"][str(layer)]
    for compressed, layers in golden["multipliers_if_compressed_vocab"].items():
        for layer, expected in layers.items():
            found = layer_multipliers(int(layer), config["max_ngram"], int(compressed), config["seed"])
            assert found.tolist() == expected


@pytest.mark.parametrize("layer", TINY_CONFIG["layer_ids"])
def test_tiny_layer_step_by_step(layer: int) -> None:
    golden = TINY["layers"][str(layer)]
    hash_ = tiny_hash(layer)
    ids = torch.tensor(TINY["canonical_ids"])
    lookback = shift_right(ids, PAD, N)
    mixes = ngram_mixes(lookback, hash_.multipliers)
    assert hash_.multipliers.tolist() == TINY["multipliers"][str(layer)]
    assert hash_.primes.reshape(N - 1, -1).tolist() == TINY["primes"][str(layer)]
    assert mixes[..., 0].tolist() == golden["mix_2gram"]
    assert mixes[..., 1].tolist() == golden["mix_3gram"]
    rows = hash_(lookback)
    assert rows.dtype == torch.int64
    assert hash_.offsets.tolist() == golden["offsets"]
    assert (rows - hash_.offsets).tolist() == golden["hash_ids"]
    assert rows.tolist() == golden["row_ids"]
    assert hash_.num_rows == golden["total_rows"]
    assert hash_.multipliers.max() < 2 * TINY["half_bound"]


def test_the_configuration_derives_the_same_tables() -> None:
    config = EngramConfig(
        num_hidden_layers=5, engram_layer_ids=TINY_CONFIG["layer_ids"], engram_max_ngram_size=N,
        engram_n_heads=TINY_CONFIG["heads"], engram_vocab_size=TINY_CONFIG["sizes"],
    )  # fmt: skip
    assert config.engram_primes() == [TINY["primes"][str(layer)] for layer in TINY_CONFIG["layer_ids"]]
    assert config.engram_num_embeddings == [layer["total_rows"] for layer in TINY["layers"].values()]


def test_hand_example() -> None:
    golden = GOLDEN["C2_hand_example"]
    hash_ = NgramHash(np.array(golden["multipliers"]), golden["primes"])
    lookback = shift_right(torch.tensor([golden["ids"]]), golden["pad"], 3)
    assert ngram_mixes(lookback, hash_.multipliers)[0, -1].tolist() == golden["last_pos_mix"]
    found = (hash_(lookback) - hash_.offsets)[0]
    assert found.tolist() == golden["all"]
    assert found[-1].tolist() == golden["last_pos_hash"]


def test_a_negative_product_takes_the_floor_modulo() -> None:
    golden = EDGES["negative_id_-100_passthrough"]
    found = hashes(tiny_hash(golden["layer"]), golden["ids"])
    assert found.tolist() == golden["hash"]
    assert found.min() >= 0


def test_an_id_beyond_the_vocabulary_wraps_as_two_s_complement() -> None:
    golden = EDGES["id_1000000_exceeds_V37_overflow_wraps"]
    hash_ = tiny_hash(golden["layer"])
    mixes = ngram_mixes(shift_right(torch.tensor(golden["ids"]), PAD, N), hash_.multipliers)
    assert mixes[0, 0, 0] == golden["mix2"]
    assert hashes(hash_, golden["ids"]).tolist() == golden["hash"]


def test_valid_ids_never_overflow() -> None:
    golden = EDGES["no_overflow_bound"]
    assert golden["int64_max"] == INT64_MAX
    assert golden["max_multiplier"] == 2 * TINY["half_bound"] - 1
    assert golden["max_id"] * golden["max_multiplier"] == golden["product"] < INT64_MAX
    for compressed in (1, 2, 37, 8192, 99092):
        for layer in range(40):
            multipliers = layer_multipliers(layer, 4, compressed, seed=0).tolist()
            assert all(m % 2 == 1 and m > 0 and m * (compressed - 1) <= INT64_MAX for m in multipliers)
    for layer in TINY_CONFIG["layer_ids"]:
        assert tiny_hash(layer).multipliers.max() <= golden["max_multiplier"]


def test_incremental_hash_needs_and_is_satisfied_with_the_last_ids() -> None:
    ids = TINY["canonical_ids"]
    for layer in TINY_CONFIG["layer_ids"]:
        hash_ = tiny_hash(layer)
        full = hashes(hash_, ids)[0]
        with_history = [hashes(hash_, [ids[0][max(0, t + 1 - N) : t + 1]])[0, -1] for t in range(len(ids[0]))]
        assert torch.equal(torch.stack(with_history), full) is EDGES["incremental_equals_full"]
    hash_ = tiny_hash(1)
    alone = torch.cat([hashes(hash_, [[i]])[0] for i in ids[0]])
    wrong = (alone != hashes(hash_, ids)[0]).any(-1).nonzero().flatten().tolist()
    assert wrong == EDGES["one_token_decode_without_history_mismatches_at"]


def test_a_document_boundary_changes_exactly_the_positions_that_would_look_across() -> None:
    ids = torch.tensor(TINY["canonical_ids"])
    hash_ = tiny_hash(1)
    lookback = shift_right(ids, PAD, N)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    reach = document_reach(positions, torch.ones_like(ids, dtype=torch.bool), None)
    packed = hash_(torch.where(reach.unsqueeze(-1) >= torch.arange(N), lookback, PAD))
    halves = torch.cat([hash_(shift_right(half, PAD, N)) for half in ids.split(4, dim=1)], dim=1)
    assert torch.equal(packed, halves)
    differs = (packed != hash_(lookback)).any(-1)[0].nonzero().flatten().tolist()
    assert differs == EDGES["packed_doc_boundary_at_4_differs_positions"]


def test_the_padding_is_a_canonical_id() -> None:
    golden = EDGES["raw_pad_not_mapped"]
    for pad in (2, 9):
        found = hashes(tiny_hash(1), TINY["canonical_ids"], pad)[0, :2]
        assert found.tolist() == golden[f"hash_pad{pad}"]


def test_a_real_padding_id_reads_as_missing_history() -> None:
    with_pads = hashes(tiny_hash(1), [[PAD, PAD, *TINY["canonical_ids"][0]]])
    assert torch.equal(with_pads[:, 2:], hashes(tiny_hash(1), TINY["canonical_ids"]))


def test_canonical_id_zero_adds_nothing_to_the_mix() -> None:
    golden = GOLDEN["C4_id_zero_absorbs"]
    multipliers = tiny_hash(golden["layer"]).multipliers
    mixes = ngram_mixes(shift_right(torch.tensor(golden["ids"]), PAD, N), multipliers)
    assert mixes[:, -1, 0].tolist() == golden["last_mix2"]


def test_is_prime_against_a_sieve() -> None:
    limit = 20_000
    sieve = np.ones(limit, dtype=bool)
    sieve[:2] = False
    for i in range(2, int(limit**0.5) + 1):
        if sieve[i]:
            sieve[i * i :: i] = False
    assert [is_prime(i) for i in range(limit)] == sieve.tolist()
    assert [i for i in range(-3, 3) if is_prime(i)] == [2]
    # Strong pseudoprimes to the bases 2..23, 2..7 and 2..5, a Carmichael number; then a Mersenne prime.
    assert not any(is_prime(n) for n in (3825123056546413051, 3215031751, 25326001, 561))
    assert is_prime(2**61 - 1)


def test_primes_follow_on_and_are_unique_across_layers_and_orders() -> None:
    sizes = [200, 150, 200]
    flat = [p for layer in table_primes([0, 3, 9], 4, 5, sizes) for row in layer for p in row]
    assert len(set(flat)) == len(flat) == 3 * 3 * 5
    taken: set[int] = set()
    for i, found in enumerate(flat):
        start = sizes[i // 5 % 3] if i % 5 == 0 else flat[i - 1] + 1
        free = (n for n in range(start, 10**4) if n not in taken)
        assert found == next(n for n in free if all(n % q for q in range(2, int(n**0.5) + 1)))
        taken.add(found)


def test_rows_per_order() -> None:
    assert rows_per_order(50, 4) == [50, 50, 50]
    assert rows_per_order([50, 60], 3) == [50, 60]
    with pytest.raises(ValueError, match=r"2 entries, but orders 2\.\.4 need 3"):
        rows_per_order([50, 60], 4)


@pytest.mark.parametrize("key", ["demo", "paper_eq4", "v41_copysign"])
def test_gate_values(key: str) -> None:
    golden = GOLDEN["F_gate_scalar"]
    variant = key.split("_")[0]
    found = gate_value(torch.tensor(golden["score"], dtype=torch.float64), variant)
    np.testing.assert_allclose(found.numpy(), golden[key], rtol=1e-12)


def test_gate_ceilings() -> None:
    for d_model, bounds in GOLDEN["F_gate_bounds_unit_norm_weights"].items():
        assert gate_ceiling(int(d_model), "demo") == pytest.approx(bounds["demo_max"], rel=1e-12)
        assert gate_ceiling(int(d_model), "v41") == pytest.approx(bounds["demo_max"], rel=1e-12)
        assert 1 - gate_ceiling(int(d_model), "demo") == pytest.approx(bounds["demo_min"], rel=1e-9)
        assert gate_ceiling(int(d_model), "paper") == pytest.approx(bounds["paper_max"], rel=1e-12)


def test_a_size_that_is_a_prime_is_the_first_heads_own() -> None:
    """The search takes the smallest primes that are not below the size (the paper's reference code)."""
    (layer,) = table_primes([0], 2, 3, rows_per_order(101, 2))
    assert layer == [[101, 103, 107]]
