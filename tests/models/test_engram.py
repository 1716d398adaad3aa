"""The memory module against a per-position re-implementation, and decoding against plain forwards."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from engram_lab.models.engram import EngramForCausalLM, gate_ceiling
from tests.models.plain_engram import (
    CANONICAL,
    LAYERS,
    PAD,
    VOCAB,
    D,
    build,
    cached,
    config_of,
    logits,
    plain_memory,
    plain_multipliers,
    plain_primes,
    plain_rows,
    record,
    tokens,
)

CLOSE = {"rtol": 0.0, "atol": 1e-5}


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def model() -> EngramForCausalLM:
    return build()


@pytest.mark.parametrize("variant", ["demo", "paper", "v41"])
def test_the_memory_is_what_the_formulas_give(variant: str) -> None:
    model = build(engram_gate=variant)
    ids = tokens(2, 29)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    positions = torch.arange(29).repeat(2, 1)
    positions[0, 13:] -= 13
    documents = [(0, 0, 13), (0, 13, 29), (1, 6, 29)]
    before: list[Tensor] = []
    memories = model.model.memories()
    hooks = [m.register_forward_pre_hook(lambda _, args: before.append(args[0])) for m in memories]
    kwargs = {"attention_mask": mask, "position_ids": positions}
    written = record(model, "written", lambda: logits(model, ids, **kwargs))
    rows = record(model, "hash", lambda: logits(model, ids, **kwargs))
    for hook in hooks:
        hook.remove()
    for k, layer in enumerate(LAYERS):
        for b, start, end in documents:
            canonical = [(int(i) * 7 + 5) % CANONICAL for i in ids[b, start:end]]
            expected_rows = plain_rows(canonical, layer)
            assert rows[k][b, start:end].tolist() == expected_rows
            h = before[k][b, start:end].double().numpy()
            expected = plain_memory(memories[k], h, expected_rows, variant)
            np.testing.assert_allclose(written[k][b, start:end].numpy(), expected, atol=1e-5)


def test_the_memory_is_added_before_attention(model: EngramForCausalLM) -> None:
    ids = tokens(1, 12)
    seen: list[Tensor] = []
    layer = model.model.layers[0]
    hook = layer.input_layernorm.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    written = record(model, "written", lambda: logits(model, ids))
    hook.remove()
    torch.testing.assert_close(seen[0], model.model.embed_tokens(ids) + written[0])


def test_only_the_addressed_rows_matter(model: EngramForCausalLM) -> None:
    model = copy.deepcopy(model)
    ids = tokens(1, 5)
    rows = record(model, "hash", lambda: logits(model, ids))
    base = logits(model, ids)
    for memory, used in zip(model.model.memories(), rows, strict=True):
        others = torch.ones(memory.table.num_embeddings, dtype=torch.bool)
        others[used.flatten()] = False
        memory.table.weight[others] += 100
    assert torch.equal(logits(model, ids), base)
    model.model.memories()[1].table.weight[rows[1][0, 2, 0]] += 1
    changed = (logits(model, ids) != base).any(-1)[0]
    assert not changed[:2].any()
    assert changed[2:].any()


def test_gates_can_be_read_and_stay_below_their_ceiling(model: EngramForCausalLM) -> None:
    model = copy.deepcopy(model)
    for memory in model.model.memories():
        memory.key_norm.weight.fill_(1)
        memory.query_norm.weight.fill_(1)
    # Aligned key and residual reach the ceiling: the embedding of one token is put where its key points.
    ids = tokens(2, 40)
    memory = model.model.memories()[0]
    first = record(model, "table", lambda: logits(model, ids))[0]
    model.model.embed_tokens.weight[ids[0, 0]] = memory.key(first[0, 0].flatten())
    gates = record(model, "gate", lambda: logits(model, ids))
    for gate in gates:
        assert gate.shape == (2, 40, 1)
        assert gate.min() > 0
        assert gate.max() <= gate_ceiling(D, "demo") + 1e-6 < 1
    assert gates[0][0, 0, 0].item() == pytest.approx(gate_ceiling(D, "demo"), abs=1e-5)


# --- decoding ---


def test_generate_is_greedy_decoding_without_a_cache(model: EngramForCausalLM) -> None:
    ids = tokens(1, 9)
    expected = ids
    for _ in range(64):
        expected = torch.cat([expected, logits(model, expected)[:, -1:].argmax(-1)], dim=1)
    assert len(set(expected[0, 9:].tolist())) > 5  # not one token over and over
    found = model.generate(ids, max_new_tokens=64, do_sample=False)
    assert torch.equal(found, expected)


def test_prompt_lookup_rolls_the_history_back_with_the_tokens(model: EngramForCausalLM) -> None:
    ids = tokens(1, 8).repeat(1, 3)
    expected = model.generate(ids, max_new_tokens=40, do_sample=False, use_cache=False)
    found = model.generate(ids, max_new_tokens=40, do_sample=False, prompt_lookup_num_tokens=4)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("size", [1, 7, 64])
def test_prefill_in_chunks(model: EngramForCausalLM, size: int) -> None:
    ids = tokens(2, 130)
    cache = DynamicCache(config=model.config)
    parts = [cached(model, chunk, cache) for chunk in ids.split(size, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), logits(model, ids), **CLOSE)
    assert cache.get_seq_length() == 130


@pytest.mark.parametrize("padding", [1, 2, 11])
def test_a_left_padded_text_has_the_logits_it_has_alone(model: EngramForCausalLM, padding: int) -> None:
    short, long = tokens(1, 14), tokens(1, 14 + padding, seed=1)
    ids = torch.cat([torch.cat([torch.full((1, padding), PAD + 1), short], dim=1), long])
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    padded = logits(model, ids, attention_mask=mask)
    torch.testing.assert_close(padded[:1, padding:], logits(model, short), **CLOSE)
    torch.testing.assert_close(padded[1:], logits(model, long), **CLOSE)
    together = model.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False)[:, -24:]
    alone = [model.generate(t, max_new_tokens=24, do_sample=False)[:, -24:] for t in (short, long)]
    assert torch.equal(together, torch.cat(alone))


def test_a_padded_prompt_in_chunks(model: EngramForCausalLM) -> None:
    ids = tokens(1, 30)
    mask = torch.ones_like(ids)
    mask[:, :7] = 0
    cache = DynamicCache(config=model.config)
    # The first two chunks are padding alone, and the text starts with the third.
    ends = [0, 6, 7, 8, 9, 20, 30]
    parts = [cached(model, ids[:, a:b], cache, attention_mask=mask[:, :b]) for a, b in itertools.pairwise(ends)]
    torch.testing.assert_close(torch.cat(parts, dim=1)[:, 7:], logits(model, ids[:, 7:]), **CLOSE)


def test_packed_documents_do_not_see_each_other(model: EngramForCausalLM) -> None:
    documents = [tokens(1, n, seed=n) for n in (17, 1, 2, 23)]
    ids = torch.cat(documents, dim=1)
    positions = torch.cat([torch.arange(d.shape[1]) for d in documents])[None]
    packed = record(model, "hash", lambda: logits(model, ids, position_ids=positions))
    alone = [record(model, "hash", lambda d=d: logits(model, d)) for d in documents]
    for k in range(len(LAYERS)):
        assert torch.equal(packed[k], torch.cat([rows[k] for rows in alone], dim=1))
    found = logits(model, ids, position_ids=positions)
    torch.testing.assert_close(found, torch.cat([logits(model, d) for d in documents], dim=1), **CLOSE)


@pytest.mark.parametrize("cut", [5, 17, 18, 19, 26])
def test_a_document_that_starts_inside_a_cached_continuation(model: EngramForCausalLM, cut: int) -> None:
    first, second = tokens(1, 17), tokens(1, 20, seed=1)
    ids = torch.cat([first, second], dim=1)
    positions = torch.cat([torch.arange(17), torch.arange(20)])[None]
    cache = DynamicCache(config=model.config)

    def run() -> Tensor:
        parts = [cached(model, ids[:, a:b], cache, position_ids=positions[:, a:b]) for a, b in ((0, cut), (cut, 37))]
        return torch.cat(parts, dim=1)

    results: list[Tensor] = []
    rows = record(model, "hash", lambda: results.append(run()))
    expected = [record(model, "hash", lambda d=d: logits(model, d)) for d in (first, second)]
    for k in range(len(LAYERS)):
        found = torch.cat(rows[k :: len(LAYERS)], dim=1)
        assert torch.equal(found, torch.cat([part[k] for part in expected], dim=1))
    alone = torch.cat([logits(model, first), logits(model, second)], dim=1)
    torch.testing.assert_close(results[0], alone, **CLOSE)


@pytest.mark.parametrize("removed", [1, 2, 5, 19])
def test_a_cropped_cache_goes_on_as_a_fresh_one(model: EngramForCausalLM, removed: int) -> None:
    ids, other = tokens(2, 20), tokens(2, 12, seed=1)
    cache = DynamicCache(config=model.config)
    cached(model, ids, cache)
    cache.crop(-removed)
    assert cache.get_seq_length() == 20 - removed
    kept = torch.cat([ids[:, : 20 - removed], other], dim=1)
    torch.testing.assert_close(cached(model, other, cache), logits(model, kept)[:, -12:], **CLOSE)


def test_a_copied_cache_is_independent(model: EngramForCausalLM) -> None:
    ids, a, b = tokens(1, 15), tokens(1, 6, seed=1), tokens(1, 6, seed=2)
    cache = DynamicCache(config=model.config)
    cached(model, ids, cache)
    twin = copy.deepcopy(cache)
    for text, which in ((a, cache), (b, twin)):
        expected = logits(model, torch.cat([ids, text], dim=1))[:, -6:]
        torch.testing.assert_close(cached(model, text, which), expected, **CLOSE)


def test_the_batch_of_a_cache_can_be_chosen_from_and_repeated(model: EngramForCausalLM) -> None:
    ids, more = tokens(3, 15), tokens(4, 6, seed=1)
    cache = DynamicCache(config=model.config)
    cached(model, ids, cache)
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    expected = logits(model, torch.cat([ids[[2, 2, 0, 0]], more], dim=1))[:, -6:]
    torch.testing.assert_close(cached(model, more, cache), expected, **CLOSE)


def test_beam_search_reorders_the_history(model: EngramForCausalLM) -> None:
    ids = tokens(2, 9)
    beams = [
        model.generate(ids, max_new_tokens=24, num_beams=4, do_sample=False, use_cache=use) for use in (True, False)
    ]
    assert torch.equal(*beams)
    assert not torch.equal(beams[0], model.generate(ids, max_new_tokens=24, do_sample=False))


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_both_names_of_the_cache_are_used(model: EngramForCausalLM, name: str) -> None:
    ids = tokens(1, 20)
    full = logits(model, ids)
    for module, read in ((model, lambda out: out.logits), (model.model, lambda out: model.lm_head(out[0]))):
        cache = DynamicCache(config=model.config)
        module(ids[:, :13], **{name: cache})
        assert cache.get_seq_length() == 13
        torch.testing.assert_close(read(module(ids[:, 13:], **{name: cache})), full[:, 13:], **CLOSE)
        assert cache.get_seq_length() == 20
    # As a caller that passes the other name on as None does.
    other = {"cache": "past_key_values", "past_key_values": "cache"}[name]
    found = model.model(ids, **{name: DynamicCache(config=model.config), other: None})[0]
    torch.testing.assert_close(model.lm_head(found), full, **CLOSE)


# --- checkpoints and wrong input ---


def test_a_saved_model_is_the_same_model(model: EngramForCausalLM, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is EngramForCausalLM
    assert torch.equal(loaded.model.canonical_ids, (torch.arange(VOCAB) * 7 + 5) % CANONICAL)
    for layer, memory in zip(LAYERS, loaded.model.memories(), strict=True):
        primes = plain_primes()[LAYERS.index(layer)]
        assert memory.hash.multipliers.tolist() == plain_multipliers(layer)
        assert memory.hash.primes.tolist() == primes
        assert memory.hash.offsets.tolist() == [sum(primes[:i]) for i in range(len(primes))]
    ids = tokens(2, 20)
    assert torch.equal(logits(loaded, ids), logits(model, ids))


def test_a_bfloat16_load_keeps_its_integers(model: EngramForCausalLM, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.model.memories()[0].table.weight.dtype == loaded.lm_head.weight.dtype == torch.bfloat16
    integers = [loaded.model.canonical_ids]
    for memory in loaded.model.memories():
        integers += [memory.hash.multipliers, memory.hash.primes, memory.hash.offsets]
    assert {t.dtype for t in integers} == {torch.int64}
    ids = tokens(1, 12)
    rows = [record(m, "hash", lambda m=m: logits(m, ids)) for m in (model, loaded)]
    assert all(torch.equal(a, b) for a, b in zip(*rows, strict=True))
    assert loaded.generate(ids, max_new_tokens=4, do_sample=False).shape == (1, 16)


def test_placing_the_tables_changes_no_bit(model: EngramForCausalLM) -> None:
    ids = tokens(2, 20)
    base = logits(model, ids)
    model.model.place_tables("cpu")
    assert torch.equal(logits(model, ids), base)


def test_wrong_row_counts_are_refused(model: EngramForCausalLM, tmp_path: Path) -> None:
    right = model.config.engram_num_embeddings
    assert right == [sum(primes) for primes in plain_primes()]
    with pytest.raises(ValueError, match=r"engram_num_embeddings is .* but the prime search gives"):
        config_of(engram_num_embeddings=[right[0], right[1] + 1])
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "engram_vocab_size": 60}))
    with pytest.raises(ValueError, match=r"engram_num_embeddings is .* but the prime search gives"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_wrong_configurations_are_refused() -> None:
    for bad in (3, -1):
        with pytest.raises(ValueError, match=r"not among the blocks 0\.\.2"):
            config_of(engram_layer_ids=[0, bad], engram_num_embeddings=None)
    with pytest.raises(ValueError, match="engram_gate is 'other'"):
        config_of(engram_gate="other")


@pytest.mark.parametrize("bad", [-1, -100, VOCAB, VOCAB + 1000])
def test_ids_outside_the_vocabulary_raise(model: EngramForCausalLM, bad: int) -> None:
    ids = tokens(1, 6)
    ids[0, 3] = bad
    with pytest.raises(IndexError, match=r"index out of range|out of bounds"):
        model.model.history(ids, None, None, None)
    with pytest.raises(IndexError, match=r"index out of range|out of bounds"):
        model(ids)


def test_embeddings_alone_cannot_address_the_memory(model: EngramForCausalLM) -> None:
    ids = tokens(1, 6)
    embedded = model.model.embed_tokens(ids)
    with pytest.raises(ValueError, match="needs input_ids"):
        model(inputs_embeds=embedded)
    both = model.model(input_ids=ids, inputs_embeds=embedded, use_cache=False)[0]
    assert torch.equal(model.lm_head(both), logits(model, ids))
