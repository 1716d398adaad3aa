"""What one traced forward reads of the memory, and what a change does to it, against formulas and changed weights."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engram_lab.models.engram import EngramForCausalLM
from engram_lab.models.errors import LabError
from engram_lab.models.handle import Handle
from engram_lab.models.memory import CONTROLS, Control, Edit, edited_logits, edited_rows, read_memory
from engram_lab.models.tables import memories
from tests.models import tiny
from tests.models.plain_engram import CANONICAL, LAYERS, build, logits, plain_memory, plain_rows, record, tokens

HEADS = (2, 2)  # orders, heads
CLOSE = {"rtol": 0.0, "atol": 1e-5}


@pytest.fixture(scope="module")
def handle() -> Handle:
    return Handle(build(), tiny.byte_level(), "memory")


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def changed(handle: Handle, change: Callable[[Any, int], None], layers: tuple[int, ...] = LAYERS) -> EngramForCausalLM:
    """A copy of the model with the weights of these memories changed."""
    model = copy.deepcopy(handle.model)
    for layer in layers:
        change(model.model.layers[layer], layer)
    return model


def test_reading_is_the_bare_forward(handle: Handle) -> None:
    ids = tokens(3, 17)
    read = read_memory(handle, ids)
    assert torch.equal(read.logits, logits(handle.model, ids))
    assert torch.equal(read.states, handle.residuals(ids).states)
    for name, got in (("gate", read.gate), ("written", read.written)):
        expected = record(handle.model, name, lambda: logits(handle.model, ids))
        assert torch.equal(got, torch.stack(expected)), name
    for n, layer in enumerate(LAYERS):
        assert torch.equal(read.residual[n], read.states[layer])


@pytest.mark.parametrize("variant", ["demo", "paper", "v41"])
def test_what_is_read_against_the_formulas(variant: str) -> None:
    handle = Handle(build(engram_gate=variant), tiny.byte_level(), "memory")
    ids = tokens(2, 23)
    read = read_memory(handle, ids)
    for n, (layer, memory) in enumerate(zip(LAYERS, memories(handle), strict=True)):
        for b in range(2):
            rows = plain_rows([(int(i) * 7 + 5) % CANONICAL for i in ids[b]], layer)
            assert read.rows[n, b].flatten(1).tolist() == rows and read.rows.shape[3:] == HEADS
            assert torch.equal(read.read[n, b].flatten(1, 2), memory.table.weight[torch.tensor(rows)])
            expected = plain_memory(memory, read.residual[n, b].double().numpy(), rows, variant)
            np.testing.assert_allclose(read.written[n, b].numpy(), expected, atol=1e-5)
            # The gate is what remains of the written values where the convolution adds nothing.
            kept = memory.conv.weight.clone()
            memory.conv.weight.zero_()
            gated = plain_memory(memory, read.residual[n, b].double().numpy(), rows, variant)
            memory.conv.weight.copy_(kept)
            value = memory.value.weight.double().numpy() @ read.read[n, b].flatten(1).double().numpy().T
            gate = (gated * value.T).sum(-1) / (value * value).sum(0)
            np.testing.assert_allclose(read.gate[n, b, :, 0].numpy(), gate, atol=1e-5)


def shuffle(block: Any, layer: int) -> None:
    table = block.memory.table.weight
    table.copy_(table[edited_rows(block.memory, Edit("shuffled", seed=3), layer)])


def one_row(block: Any, layer: int) -> None:
    hashed = block.memory.hash
    for start, size in zip(hashed.offsets.tolist(), hashed.primes.tolist(), strict=True):
        block.memory.table.weight[start : start + size] = block.memory.table.weight[start].clone()


CHANGES: dict[Control, Callable[[Any, int], None]] = {
    "shuffled": shuffle,
    "zeroed": lambda block, layer: block.memory.table.weight.zero_(),
    "one_row": one_row,
    "off": lambda block, layer: setattr(block, "memory", None),
}


@pytest.mark.parametrize("layers", [(), (2,)], ids=["all", "one"])
@pytest.mark.parametrize("control", CONTROLS)
def test_a_control_is_that_change_of_the_weights(handle: Handle, control: Control, layers: tuple[int, ...]) -> None:
    ids = tokens(2, 19)
    before = {name: value.clone() for name, value in handle.model.state_dict().items()}
    edit = Edit(control, layers, seed=3)
    read = read_memory(handle, ids, edit)
    expected = logits(changed(handle, CHANGES[control], layers or LAYERS), ids)
    assert torch.equal(read.logits, expected)
    assert not torch.allclose(read.logits, logits(handle.model, ids), atol=1e-3)
    assert torch.allclose(edited_logits(handle, ids, edit, 11), expected[:, 11], **CLOSE)
    for name, value in handle.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    if layers:  # what lies before the changed layer stays
        intact = read_memory(handle, ids)
        assert torch.equal(read.written[0], intact.written[0]) and torch.equal(read.gate[0], intact.gate[0])


def test_zeroed_and_off_differ_only_in_the_gate(handle: Handle) -> None:
    """By construction: a zero row has a zero value, and so has a shut gate, behind which nothing is left to add."""
    ids = tokens(2, 19)
    zeroed, off = (read_memory(handle, ids, Edit(control)) for control in ("zeroed", "off"))
    assert torch.equal(zeroed.logits, off.logits)
    assert not zeroed.written.any() and not off.written.any()
    assert not off.gate.any() and torch.equal(zeroed.gate, torch.full_like(zeroed.gate, 0.5))
    assert not zeroed.read.any() and off.read.any()


def test_a_shuffle_is_a_permutation_within_each_head(handle: Handle) -> None:
    drawn = {}
    for seed in (0, 1):
        for layer, memory in zip(LAYERS, memories(handle), strict=True):
            rows = edited_rows(memory, Edit("shuffled", seed=seed), layer)
            assert rows is not None
            for start, size in zip(memory.hash.offsets.tolist(), memory.hash.primes.tolist(), strict=True):
                assert sorted(rows[start : start + size].tolist()) == list(range(start, start + size))
            assert (rows == torch.arange(len(rows))).float().mean() < 0.1
            drawn[seed, layer] = rows
    again = edited_rows(memories(handle)[0], Edit("shuffled"), 0)
    assert again is not None and torch.equal(again, drawn[0, 0])
    smallest = min(len(rows) for rows in drawn.values())
    assert len({tuple(rows[:smallest].tolist()) for rows in drawn.values()}) == 4, "each seed and layer has its own"


def test_closed_gates_against_a_hook(handle: Handle) -> None:
    ids = tokens(3, 14)
    closed = torch.rand(2, 3, 14, generator=torch.Generator().manual_seed(1)) < 0.3
    read = read_memory(handle, ids, Edit(closed=closed))
    masks = dict(zip(LAYERS, closed, strict=True))

    def shut(layer: int) -> Callable[..., Tensor]:
        return lambda module, args, output: output.masked_fill(masks[layer].unsqueeze(-1), 0.0)

    hooks = [handle.model.model.layers[n].memory.gate.register_forward_hook(shut(n)) for n in LAYERS]
    expected = logits(handle.model, ids)
    for hook in hooks:
        hook.remove()
    assert torch.equal(read.logits, expected)
    assert not read.gate[closed].any()
    assert torch.allclose(edited_logits(handle, ids, Edit(closed=closed), 8), expected[:, 8], **CLOSE)


def test_a_closed_gate_acts_only_from_there_on(handle: Handle) -> None:
    ids = tokens(1, 14)
    closed = torch.zeros(2, 1, 14, dtype=torch.bool)
    closed[1, 0, 6] = True
    intact, read = read_memory(handle, ids), read_memory(handle, ids, Edit(closed=closed))
    assert torch.equal(read.logits[:, :6], intact.logits[:, :6])
    assert not torch.allclose(read.logits[:, 6], intact.logits[:, 6], atol=1e-4)
    # Three positions on the convolution looks back at it: what is written changes, though no gate there does.
    assert torch.equal(read.gate[1, :, 7:], intact.gate[1, :, 7:])
    assert not torch.allclose(read.written[1, 0, 9], intact.written[1, 0, 9], atol=1e-4)
    assert torch.equal(read.written[1, 0, 7], intact.written[1, 0, 7])


def test_a_control_and_closed_gates_together(handle: Handle) -> None:
    ids = tokens(1, 9)
    everywhere = torch.ones(2, 1, 9, dtype=torch.bool)
    shut = read_memory(handle, ids, Edit("shuffled", closed=everywhere))
    assert torch.equal(shut.logits, read_memory(handle, ids, Edit("off")).logits)


def test_threads_do_not_meet(handle: Handle) -> None:
    """Sessions of the app share a model; a trace that another one disturbs reads wrong values or fails."""
    ids = [tokens(1, 12, seed=n) for n in range(4)]
    expected = [read_memory(handle, own, Edit("shuffled")).logits for own in ids]
    wrong: list[int] = []

    def work(n: int) -> None:
        for _ in range(5):
            if not torch.equal(read_memory(handle, ids[n], Edit("shuffled")).logits, expected[n]):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_cannot_be_asked(handle: Handle) -> None:
    dense = Handle(tiny.make("llama"), tiny.byte_level(), "dense")
    with pytest.raises(LabError, match="dense has no Engram memory"):
        read_memory(dense, tokens(1, 4))
    with pytest.raises(LabError, match=r"no memory at layer 1: its memory layers are 0, 2\."):
        edited_logits(handle, tokens(1, 4), Edit("off", layers=(1,)), 3)


def test_the_shuffle_of_a_layer_is_its_own() -> None:
    """One permutation for all layers would leave rows that two layers share in the same company."""
    memory = memories(Handle(tiny.engram(tiny.byte_level()), tiny.byte_level(), "m"))[0]
    drawn = [edited_rows(memory, Edit("shuffled", seed=3), layer) for layer in (1, 2)]
    again = edited_rows(memory, Edit("shuffled", seed=3), 1)
    assert drawn[0] is not None and drawn[1] is not None and again is not None
    assert not torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], again)
