"""Overlays against written tables, bit for bit, and what may not be applied."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engram_lab.models import overlay as module
from engram_lab.models.errors import LabError
from engram_lab.models.handle import Handle
from engram_lab.models.memory import Edit, edited_logits, edited_rows, read_memory
from engram_lab.models.overlay import (
    Fact,
    LayerRows,
    Overlay,
    OverlayError,
    Stack,
    check_overlay,
    load_overlay,
    prepare,
)
from engram_lab.models.tables import addresses
from tests.full import examples
from tests.models import tiny
from tests.models.plain_engram import HEAD_DIM, LAYERS, build, logits, plain_rows, tokens

IDS = tokens(3, 17)
Plan = dict[int, dict[int, Tensor]]  # layer -> row -> vector


@pytest.fixture(scope="module")
def handle() -> Handle:
    return Handle(build(), tiny.byte_level(), "memory")


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def overlay_of(
    handle: Handle, spots: Sequence[tuple[int, int]], seed: int, user: str = "maya", layers: Sequence[int] = LAYERS
) -> Overlay:
    """One fact for each (batch, pos) of IDS: random vectors for the rows that are read there."""
    facts = tuple(Fact(f"{user} {b},{t}", f" {seed}") for b, t in spots)
    read, held = addresses(handle, IDS), {}
    for layer in layers:
        index = LAYERS.index(layer)
        rows, where = torch.stack([read[index, b, t] for b, t in spots]).unique(return_inverse=True)
        owners = torch.stack([torch.arange(len(spots)).repeat_interleave(where.shape[1]), where.flatten()], 1).unique(
            dim=0
        )
        vectors = torch.randn(len(rows), HEAD_DIM, generator=torch.Generator().manual_seed(seed + layer))
        held[layer] = LayerRows(rows, vectors, owners.int())
    return Overlay(user, handle.fingerprint, facts, held, "test", {"torch": "0"})


def written(handle: Handle, *overlays: Overlay) -> Any:
    """A copy of the model with the rows in its tables, one overlay after another."""
    model = copy.deepcopy(handle.model)
    for overlay in overlays:
        for layer, held in overlay.layers.items():
            model.model.layers[layer].memory.table.weight[held.rows] = held.vectors.to(handle.dtype)
    return model


def test_addresses_are_the_rows_that_a_forward_reads(handle: Handle) -> None:
    got = addresses(handle, IDS)
    assert torch.equal(got, read_memory(handle, IDS).rows.flatten(-2))
    canonical = [(int(i) * 7 + 5) % 71 for i in IDS[1]]
    assert got[1, 1].tolist() == plain_rows(canonical, LAYERS[1])


def test_an_applied_overlay_is_the_written_table(handle: Handle) -> None:
    overlay = overlay_of(handle, [(0, 5), (1, 9)], 1)
    base = logits(handle.model, IDS)
    model = written(handle, overlay)
    expected = logits(model, IDS)
    patch = prepare(handle, overlay)
    with patch.applied():
        assert torch.equal(logits(handle.model, IDS), expected)
        assert torch.equal(handle.residuals(IDS).logits, expected)
        generated = handle.model.generate(IDS, max_new_tokens=8, do_sample=False)
    assert torch.equal(generated, model.generate(IDS, max_new_tokens=8, do_sample=False))
    assert torch.equal(logits(handle.model, IDS), base)
    changed = (expected != base).any(-1)
    assert changed[0, 5] and changed[1, 9]
    read = addresses(handle, IDS)
    hit = sum(torch.isin(read[n], overlay.layers[layer].rows).any(-1) for n, layer in enumerate(LAYERS)) > 0
    for b in range(3):  # nothing before the first position that reads such a row
        first = int(hit[b].nonzero()[0]) if hit[b].any() else IDS.shape[1]
        assert not changed[b, :first].any()


def test_texts_that_read_none_of_the_rows_do_not_change_in_a_bit() -> None:
    handle = Handle(build(engram_vocab_size=5000), tiny.byte_level(), "wide")
    overlay = overlay_of(handle, [(0, 5)], 1)
    base = logits(handle.model, IDS)
    with prepare(handle, overlay).applied():
        changed = (logits(handle.model, IDS) != base).any(-1)
    assert not changed[0, :5].any() and changed[0, 5:].all() and not changed[1:].any()


def test_an_edit_reads_the_overlay_and_controls_act_on_it(handle: Handle) -> None:
    overlay = overlay_of(handle, [(0, 5), (2, 3)], 2)
    patch, model = prepare(handle, overlay), written(handle, overlay)
    read = read_memory(handle, IDS, Edit(overlays=patch))
    assert torch.equal(read.logits, logits(model, IDS))
    at = read.rows[0].flatten(-2)[0, 5]
    held = overlay.layers[LAYERS[0]]
    assert torch.equal(read.read[0, 0, 5].flatten(0, 1), held.vectors[torch.searchsorted(held.rows, at)])
    shuffle = Edit("shuffled", seed=3, overlays=patch)
    for layer in LAYERS:
        memory = model.model.layers[layer].memory
        memory.table.weight.copy_(memory.table.weight[edited_rows(memory, shuffle, layer)])
    assert torch.equal(read_memory(handle, IDS, shuffle).logits, logits(model, IDS))
    off = read_memory(handle, IDS, Edit("zeroed", overlays=patch))
    assert torch.equal(off.logits, read_memory(handle, IDS, Edit("zeroed")).logits)
    last = edited_logits(handle, IDS, Edit(overlays=patch), 11)
    torch.testing.assert_close(last, read.logits[:, 11], rtol=0, atol=1e-5)
    other = Handle(build(), tiny.byte_level(), "twin")
    with pytest.raises(LabError, match=r"made ready for memory: prepare them for twin"):
        read_memory(other, IDS, Edit(overlays=patch))


def test_each_element_of_a_batch_reads_its_own_rows_only(handle: Handle) -> None:
    ids = IDS[:1].repeat(4, 1)  # the same text, so that everyone's rows are asked for by everyone
    a, b = overlay_of(handle, [(0, 5)], 1, "a"), overlay_of(handle, [(0, 5), (0, 8)], 2, "b", LAYERS[1:])
    patch = prepare(handle, [a, None, Stack((a, b)), b])
    with patch.applied():
        got = logits(handle.model, ids)
    for element, overlays in enumerate([(a,), (), (a, b), (b,)]):
        assert torch.equal(got[element], logits(written(handle, *overlays), ids)[element])
    assert len({tuple(row.flatten().tolist()) for row in got}) == 4
    with patch.applied(), pytest.raises(OverlayError, match="overlays for 4 prompts, but the batch has 3"):
        logits(handle.model, IDS)
    assert torch.equal(logits(handle.model, IDS), logits(written(handle), IDS))


def test_what_fails_inside_leaves_nothing_behind_and_the_inner_overlay_is_alone(handle: Handle) -> None:
    a, b = overlay_of(handle, [(0, 5)], 1), overlay_of(handle, [(1, 7)], 2)
    with pytest.raises(RuntimeError, match="stop"), prepare(handle, a).applied():
        with prepare(handle, b).applied():
            assert torch.equal(logits(handle.model, IDS), logits(written(handle, b), IDS))
        assert torch.equal(logits(handle.model, IDS), logits(written(handle, a), IDS))
        raise RuntimeError("stop")
    assert torch.equal(logits(handle.model, IDS), logits(written(handle), IDS))


def test_in_bfloat16_the_vectors_are_rounded_as_in_a_table() -> None:
    handle = Handle(build().to(torch.bfloat16), tiny.byte_level(), "half")
    overlay = overlay_of(handle, [(0, 5)], 1)
    with prepare(handle, overlay).applied():
        assert torch.equal(logits(handle.model, IDS), logits(written(handle, overlay), IDS))


def test_a_stack_reads_the_later_and_names_every_conflict(handle: Handle) -> None:
    a, b = overlay_of(handle, [(0, 5), (1, 9)], 1, "a"), overlay_of(handle, [(0, 5), (2, 2)], 2, "b")
    same = overlay_of(handle, [(0, 5)], 1, "c", ())
    stack = Stack((a,)).add(b).add(same)
    with prepare(handle, stack).applied():
        assert torch.equal(logits(handle.model, IDS), logits(written(handle, a, b), IDS))
    expected = []
    for layer in LAYERS:
        one, two = (dict(zip(o.layers[layer].rows.tolist(), o.layers[layer].vectors, strict=True)) for o in (a, b))
        expected += [(layer, row) for row in sorted(one.keys() & two.keys()) if not torch.equal(one[row], two[row])]
    assert [(found.layer, found.row) for found in stack.conflicts()] == expected and len(expected) >= 8
    assert ("a", a.facts[0]) in stack.conflicts()[0].claims and ("b", b.facts[0]) in stack.conflicts()[0].claims
    assert Stack((a, a)).conflicts() == ()  # the same vectors


def test_rows_stay_as_long_as_a_fact_has_them(handle: Handle) -> None:
    overlay = overlay_of(handle, [(0, 5), (0, 5), (1, 9)], 1)
    overlay = Overlay("maya", overlay.fingerprint, (Fact("a", " x"), Fact("b", " y"), Fact("c", " z")), overlay.layers,
                      "test", {})  # fmt: skip
    assert overlay.without(Fact("a", " x")).n_rows == overlay.n_rows
    alone = overlay.without(Fact("a", " x")).without(Fact("b", " y"))
    for layer, index in zip(LAYERS, range(2), strict=True):
        rows = addresses(handle, IDS)[index, 1, 9]
        assert alone.layers[layer].rows.tolist() == sorted(set(rows.tolist()))
        where = torch.searchsorted(overlay.layers[layer].rows, alone.layers[layer].rows)
        assert torch.equal(alone.layers[layer].vectors, overlay.layers[layer].vectors[where])
    assert alone.without(Fact("c", " z")).layers == {}
    with pytest.raises(OverlayError, match='maya has no fact "a x"'):
        alone.without(Fact("a", " x"))


# --- any history ends as if it had never been ---

SPOTS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 16)), min_size=1, max_size=3, unique=True)
ADD = st.tuples(st.just("add"), st.sampled_from("abc"), SPOTS, st.integers(0, 9))
REMOVE = st.tuples(st.sampled_from(["user", "fact"]), st.integers(0, 9), st.integers(0, 9))


@examples()
@given(st.lists(ADD | REMOVE, max_size=8))
def test_any_sequence_of_writes_and_removals(handle: Handle, history: list[Any]) -> None:
    before = {name: value.clone() for name, value in handle.model.state_dict().items()}
    base = logits(handle.model, IDS)
    stack = Stack()
    # What should be left, kept apart: of each overlay its user, and the rows of each fact.
    left: list[tuple[str, Overlay, set[Fact]]] = []
    for step in history:
        if step[0] == "add":
            overlay = overlay_of(handle, step[2], step[3], step[1])
            stack = stack.add(overlay)
            left.append((step[1], overlay, set(overlay.facts)))
        elif left:
            user, overlay, facts = left[step[1] % len(left)]
            if step[0] == "user":
                stack = stack.without(user)
                left = [one for one in left if one[0] != user]
            else:
                fact = sorted(facts, key=str)[step[2] % len(facts)]
                stack = stack.without(user, fact)
                left = [(u, o, f - {fact} if u == user else f) for u, o, f in left]
                left = [one for one in left if one[2]]
        model = copy.deepcopy(handle.model)
        for _, overlay, facts in left:
            for layer, held in overlay.layers.items():
                for row, vector in zip(held.rows.tolist(), held.vectors, strict=True):
                    index = held.rows.tolist().index(row)
                    owners = {overlay.facts[f] for f, r in held.owners.tolist() if r == index}
                    if owners & facts:
                        model.model.layers[layer].memory.table.weight[row] = vector
        with prepare(handle, stack).applied():
            assert torch.equal(logits(handle.model, IDS), logits(model, IDS))
    for user in {one[0] for one in left}:
        stack = stack.without(user)
    assert stack == Stack()
    with prepare(handle, stack).applied():
        assert torch.equal(logits(handle.model, IDS), base)
    assert torch.equal(logits(handle.model, IDS), base)
    for name, value in handle.model.state_dict().items():
        assert torch.equal(value, before[name]), name


# --- files, and what is refused ---


def test_a_file_gives_the_same_overlay(handle: Handle, tmp_path: Path) -> None:
    overlay = overlay_of(handle, [(0, 5), (1, 9)], 1, "Zoë 東京")
    file = tmp_path / "deep" / "maya.safetensors"
    overlay.save(file)
    assert load_overlay(file) == overlay and hash(load_overlay(file)) == hash(overlay)
    assert file.read_bytes() == overlay.to_bytes()
    assert overlay != overlay_of(handle, [(0, 5), (1, 9)], 2, "Zoë 東京")
    overlay.without(overlay.facts[0]).without(overlay.facts[1]).save(file)  # an empty one
    assert load_overlay(file).facts == () and os.listdir(file.parent) == ["maya.safetensors"]


def test_a_failed_save_leaves_what_was_there(handle: Handle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "maya.safetensors"
    overlay_of(handle, [(0, 5)], 1).save(file)
    before = file.read_bytes()

    def fail(*args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("engram_lab.models.files.os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        overlay_of(handle, [(0, 5)], 2).save(file)
    assert file.read_bytes() == before and os.listdir(tmp_path) == ["maya.safetensors"]


def resaved(overlay: Overlay, tensors: dict[str, Any] | None = None, manifest: dict[str, Any] | None = None) -> bytes:
    raw = overlay.to_bytes()
    stored = safetensors.torch.load(raw) | (tensors or {})
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    text = json.loads(header["__metadata__"]["manifest"]) | (manifest or {})
    return safetensors.torch.save(stored, {"manifest": json.dumps(text)})


def test_damaged_files_are_refused_in_a_sentence(
    handle: Handle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlay = overlay_of(handle, [(0, 5)], 1)
    held = overlay.layers[LAYERS[0]]
    nan = held.vectors.clone()
    nan[2, 3] = float("nan")
    rows = f"{LAYERS[0]}.rows"
    cases = {
        b"": "not an overlay",
        b"\x10" + bytes(7) + b"{}": "not an overlay",
        b"\xff" * 64: "not an overlay",
        overlay.to_bytes()[:-8]: "not an overlay",
        safetensors.torch.save({"x": torch.zeros(2)}): "not an overlay",
        resaved(overlay, manifest={"format": "engram-lab overlay 9"}): "another version",
        resaved(overlay, manifest={"facts": []}): "rows of a fact that it does not list",
        resaved(overlay, manifest={"facts": [["a"]]}): "not an overlay",
        resaved(overlay, {"x.y": torch.zeros(1)}): "not an overlay",
        resaved(overlay, {f"{LAYERS[0]}.more": torch.zeros(1)}): "holds more",
        resaved(overlay, {f"{LAYERS[0]}.vectors": nan}): "not finite",
        resaved(overlay, {rows: held.rows.flip(0)}): "ascending",
        resaved(overlay, {rows: held.rows[:1].repeat(len(held.rows))}): "ascending",
        resaved(overlay, {rows: held.rows - 10**6}): "ascending",
        resaved(overlay, {rows: held.rows[1:]}): "one vector each",
        resaved(overlay, {rows: held.rows.float()}): "int64",
        resaved(overlay, {f"{LAYERS[0]}.owners": held.owners[1:]}): "at least one fact",
    }
    file = tmp_path / "bad.safetensors"
    for raw, sentence in cases.items():
        file.write_bytes(raw)
        with pytest.raises(OverlayError, match=sentence) as found:
            load_overlay(file)
        assert "\n" not in str(found.value) and str(file) in str(found.value)
    with pytest.raises(OverlayError, match=r"no overlay to read at .*gone"):
        load_overlay(tmp_path / "gone")
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    file.write_bytes(overlay.to_bytes())
    with pytest.raises(OverlayError, match="MiB; an overlay may have"):
        load_overlay(file)


def test_an_overlay_of_another_model_is_refused(handle: Handle) -> None:
    overlay = overlay_of(handle, [(0, 5)], 1)
    held = overlay.layers[0]

    def but(layers: Any = None, fingerprint: str = handle.fingerprint) -> Overlay:
        return Overlay("maya", fingerprint, overlay.facts, overlay.layers if layers is None else layers, "test", {})

    wide = LayerRows(held.rows, torch.zeros(len(held.rows), HEAD_DIM + 1), held.owners)
    count = handle.model.model.layers[0].memory.table.num_embeddings
    beyond = LayerRows(torch.cat([held.rows[:-1], torch.tensor([count])]), held.vectors, held.owners)
    cases = {
        but(fingerprint="0" * 16): rf"for the model 0000000000000000, but memory is {handle.fingerprint}",
        but({1: held}): "rows for layer 1, where memory has no memory",
        but({0: wide}): f"rows {HEAD_DIM + 1} wide; in memory they are {HEAD_DIM} wide",
        but({0: beyond}): f"has the row {count}; layer 0 has only {count} rows",
    }
    for bad, sentence in cases.items():
        for attempt in (lambda bad=bad: check_overlay(handle, bad), lambda bad=bad: prepare(handle, [None, bad])):
            with pytest.raises(OverlayError, match=sentence):
                attempt()
    with pytest.raises(OverlayError, match="zoe has no overlay here"):
        Stack((overlay,)).without("zoe")
    dense = Handle(tiny.make("llama"), tiny.byte_level(), "dense")
    with pytest.raises(LabError, match="has no Engram memory"):
        prepare(dense, but(fingerprint=dense.fingerprint))
