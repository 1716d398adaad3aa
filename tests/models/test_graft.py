"""A grafted memory: bit for bit nothing while its rows are zero, and rightly addressed once they are not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from engram_lab.models.canonical import canonical_map
from engram_lab.models.engram import CACHE_ARGUMENT
from engram_lab.models.errors import CheckpointError, LabError, TokenizerMismatchError, UnknownModelError
from engram_lab.models.graft import load_graft, orthogonal
from engram_lab.models.grafting import graft, graft_of, save_graft
from engram_lab.models.handle import Handle, open_model
from engram_lab.models.hashing import NgramHash, shift_right
from engram_lab.models.memory import read_memory
from engram_lab.models.overlay import Fact, LayerRows, Overlay, prepare
from engram_lab.models.tables import addresses, memories
from tests.models import tiny
from tests.models.plain_engram import build

FAMILIES = list(tiny.configs())
SMALL: dict[str, Any] = {"rows_per_head": 500, "heads": 2}
IDS = torch.randint(5, 350, (3, 19), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[0, :4], MASK[1, :1] = 0, 0
PLACES = (MASK.cumsum(-1) - 1).clamp_min(0)


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def pair(family: str, **options: Any) -> tuple[Handle, Handle]:
    base = Handle(tiny.make(family), tiny.byte_level(), family)
    return base, graft(base, [1, 2], **{**SMALL, **options})


def logits(model: PreTrainedModel, ids: Tensor, **kwargs: Any) -> Tensor:
    return model(input_ids=ids, **{"use_cache": False, **kwargs}).logits


def filled(handle: Handle) -> Overlay:
    """Random vectors in every row of both layers."""
    layers = {}
    for layer, memory in zip(handle.engram_layers, memories(handle), strict=True):
        count, width = memory.table.weight.shape
        vectors = torch.randn(count, width, generator=torch.Generator().manual_seed(layer))
        owners = torch.stack([torch.zeros(count, dtype=torch.int32), torch.arange(count, dtype=torch.int32)], dim=1)
        layers[layer] = LayerRows(torch.arange(count), vectors, owners)
    return Overlay("maya", handle.fingerprint, (Fact("a", " b"),), layers, "test", {})


@pytest.mark.parametrize("gate", ["demo", "paper", "v41"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_empty_memory_changes_no_bit(family: str, gate: str) -> None:
    base, grafted = pair(family, gate=gate)
    for kwargs in ({}, {"attention_mask": MASK, "position_ids": PLACES}, {"attention_mask": MASK}, {"use_cache": True}):
        assert torch.equal(logits(base.model, IDS, **kwargs), logits(grafted.model, IDS, **kwargs))
    assert torch.equal(base.residuals(IDS).states, grafted.residuals(IDS).states)
    assert torch.equal(base.residuals(IDS, MASK).logits, grafted.residuals(IDS, MASK).logits)
    read = read_memory(grafted, IDS)
    assert torch.equal(read.logits, base.residuals(IDS).logits) and not read.written.any() and not read.read.any()
    states = [h.model(IDS, output_hidden_states=True).hidden_states for h in (base, grafted)]
    assert len(states[0]) == len(states[1]) == 4 and all(torch.equal(*both) for both in zip(*states, strict=True))
    if gate == "demo":
        for kwargs in ({}, {"num_beams": 3}, {"use_cache": False}):
            wanted = {"attention_mask": MASK, "max_new_tokens": 9, "do_sample": False, "pad_token_id": 1, **kwargs}
            assert torch.equal(base.model.generate(IDS, **wanted), grafted.model.generate(IDS, **wanted))


@pytest.mark.parametrize("family", FAMILIES)
def test_filled_rows_are_addressed_by_the_last_tokens_of_the_same_text(family: str) -> None:
    base, grafted = pair(family)
    with prepare(grafted, filled(grafted)).applied():
        full = logits(grafted.model, IDS)
        assert not torch.allclose(full, logits(base.model, IDS), atol=1e-3)
        # Token by token with a cache, a left-padded batch, and generate() are what one forward gives.
        cache = DynamicCache(config=grafted.model.config)
        parts = [logits(grafted.model, part, use_cache=True, **{CACHE_ARGUMENT: cache}) for part in IDS.split(4, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), full, rtol=0, atol=1e-5)
        padded = logits(grafted.model, IDS, attention_mask=MASK, position_ids=PLACES)
        torch.testing.assert_close(padded[:1, 4:], logits(grafted.model, IDS[:1, 4:]), rtol=0, atol=1e-5)
        wanted = {"attention_mask": MASK, "max_new_tokens": 9, "do_sample": False, "pad_token_id": 1}
        cached = grafted.model.generate(IDS, **wanted)
        assert torch.equal(cached, grafted.model.generate(IDS, use_cache=False, **wanted))
        alone = grafted.model.generate(IDS[:1, 4:], max_new_tokens=9, do_sample=False, pad_token_id=1)
        assert torch.equal(cached[:1, 4 : 4 + alone.shape[1]], alone)
    assert torch.equal(logits(grafted.model, IDS), logits(base.model, IDS))


def test_the_rows_are_those_of_the_hash_over_canonical_ids() -> None:
    _, grafted = pair("gpt2", seed=3)
    canonical = torch.from_numpy(canonical_map(tiny.byte_level()))
    spec = graft_of(grafted)
    lookback = shift_right(canonical[IDS], int(canonical[spec.pad_token_id]), 3)
    for got, memory in zip(addresses(grafted, IDS), memories(grafted), strict=True):
        own = memory.hash.constants()
        assert torch.equal(got, NgramHash(own["multipliers"], own["primes"].reshape(2, 2))(lookback))
    assert not torch.equal(addresses(grafted, IDS), addresses(pair("gpt2")[1], IDS))


def test_projections_are_orthogonal_and_a_position_can_write_any_vector() -> None:
    _, grafted = pair("llama")
    for memory in memories(grafted):
        for weight in (memory.key.weight, memory.value.weight):
            assert weight.shape == (32, 32)
            torch.testing.assert_close(weight @ weight.T, torch.eye(32), rtol=0, atol=1e-6)
    again = memories(pair("llama")[1])
    for one, two in zip(memories(grafted), again, strict=True):
        assert torch.equal(one.key.weight, two.key.weight) and not torch.equal(one.key.weight, one.value.weight)
    assert not torch.equal(again[0].key.weight, again[1].key.weight)
    for shape in ((5, 9), (9, 5)):
        found = orthogonal(*shape, np.random.default_rng(0))
        product = found @ found.T if shape[0] < shape[1] else found.T @ found
        torch.testing.assert_close(product, torch.eye(5), rtol=0, atol=1e-6)


def test_the_base_is_shared_and_stays_as_it_was() -> None:
    base = Handle(tiny.make("llama_tied"), tiny.byte_level(), "base")
    kinds = [type(module) for module in base.model.modules()]
    before, names = base.residuals(IDS), set(base.model.state_dict())
    grafted = graft(base, [0], **SMALL)
    assert [type(module) for module in base.model.modules()] == kinds and set(base.model.state_dict()) == names
    assert base.engram_layers == () and not hasattr(base.model.config, "engram_layer_ids")
    own = {name: value.data_ptr() for name, value in grafted.model.named_parameters()}
    for name, value in base.model.named_parameters():
        assert own[name] == value.data_ptr()
    with prepare(grafted, filled(grafted)).applied():
        assert torch.equal(base.residuals(IDS).logits, before.logits)
    assert (grafted.engram_layers, grafted.name) == ((0,), "base+memory@0")
    assert grafted.n_table_parameters == memories(grafted)[0].table.weight.numel() >= 4 * 500 * 8


def test_a_saved_graft_opens_as_the_same_model(checkpoint: Path, tmp_path: Path) -> None:
    base = open_model(str(checkpoint))
    grafted = graft(base, [1], **SMALL)
    folder = tmp_path / "grafted"
    save_graft(grafted, folder)
    assert os.listdir(folder) == ["graft.json"] and (folder / "graft.json").stat().st_size < 1000
    opened = open_model(str(folder))
    assert opened.fingerprint == grafted.fingerprint != base.fingerprint
    overlay = filled(grafted)
    assert torch.equal(logits(opened.model, IDS), logits(base.model, IDS))
    with prepare(opened, overlay).applied(), prepare(grafted, overlay).applied():
        assert torch.equal(logits(opened.model, IDS), logits(grafted.model, IDS))
    assert graft_of(opened) == graft_of(grafted) == load_graft(folder)
    save_graft(opened, tmp_path / "again")
    half = open_model(str(folder), dtype="bfloat16")
    assert {p.dtype for p in half.model.parameters()} == {torch.bfloat16}
    # Another name for the same base is the same graft, beside which it may lie.
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    checkpoint.rename(moved / "checkpoint")
    folder.rename(moved / "grafted")
    assert open_model(str(moved / "grafted")).fingerprint == grafted.fingerprint


def test_a_graft_without_its_base_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "grafted"
    save_graft(graft(open_model(str(checkpoint)), [1], **SMALL), folder)
    stored = json.loads((folder / "graft.json").read_text())

    def refused(kind: type[LabError], sentence: str) -> None:
        with pytest.raises(kind, match=sentence) as found:
            open_model(str(folder))
        assert "\n" not in str(found.value)

    for change, sentence in (
        ({"layers": ["1"]}, "not a graft of this lab"),
        ({"layers": 1}, "not a graft"),
        ({"heads": 2.5}, r"not a graft of this lab \(heads is 2\.5\)"),
        ({"seed": True}, r"seed is True"),
        ({"gate": 1}, r"gate is 1"),
        ({"format": "x"}, "another version"),
        ({"more": 1}, "not a graft"),
        ({"rows_per_head": 10**12}, "rows_per_head 1000000000000"),
        ({"gate": "open"}, "engram_gate is 'open'"),
        ({"layers": [7]}, r"layers 0 to 2: a memory cannot go to \[7\]"),
    ):
        (folder / "graft.json").write_text(json.dumps(stored | change))
        refused(LabError, sentence)
    (folder / "graft.json").write_text("{")
    refused(CheckpointError, "not a graft")
    (folder / "graft.json").write_text(json.dumps(stored | {"map_sha256": "0" * 64}))
    refused(TokenizerMismatchError, "other canonical ids")
    (folder / "graft.json").write_text(json.dumps(stored))
    tiny.make("llama", seed=1).save_pretrained(checkpoint)
    refused(CheckpointError, f"with the fingerprint {stored['base_fingerprint']}, but that model is now")
    checkpoint.rename(tmp_path / "gone")
    refused(CheckpointError, r"grafted onto a model that is not here\. There is no file or folder")
    with pytest.raises(UnknownModelError):
        open_model(stored["base"])


def test_what_cannot_carry_a_memory_is_refused(tmp_path: Path) -> None:
    base, grafted = pair("llama")
    with pytest.raises(LabError, match="layers 0 to 2: a memory cannot go to none"):
        graft(base, [])
    with pytest.raises(LabError, match=r"cannot go to \[-1, 3\]"):
        graft(base, [3, 1, -1])
    with pytest.raises(LabError, match="has a memory already"):
        graft(grafted, [0])
    with pytest.raises(LabError, match="has a memory already"):
        graft(Handle(build(), tiny.byte_level(), "engram"), [1])
    for options in ({"heads": 0}, {"head_dim": 0}, {"max_ngram": 1}, {"rows_per_head": 0}, {"gate": "open"}):
        with pytest.raises(LabError):
            graft(base, [1], **options)
    with pytest.raises(LabError, match="no grafted memory"):
        save_graft(base, tmp_path)
    base.model.save_pretrained(tmp_path / "model")
    with pytest.raises(LabError, match="holds a model"):
        save_graft(grafted, tmp_path / "model")
    memories(grafted)[0].table.weight[3] = 1
    with pytest.raises(LabError, match="rows that are not zero"):
        save_graft(grafted, tmp_path / "graft")
    with pytest.raises(ValueError, match="needs input_ids"):
        grafted.model(inputs_embeds=torch.zeros(1, 2, 32))
