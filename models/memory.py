"""One traced forward of an Engram that reads what its memory does, or runs it with the memory changed.

Axes: layer (memory layers, by block), batch, pos, order, head, head_dim, branch (always 1), d_model;
states alone have one entry for the embedding and one for each block. A change is made to what flows through the
forward, never to a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, get_args

import nnsight
import torch
from torch import Tensor

from engram_lab.models.engram import EngramMemory
from engram_lab.models.errors import LabError
from engram_lab.models.handle import Handle
from engram_lab.models.overlay import Patch
from engram_lab.models.tables import memories
from engram_lab.models.tracing import pin_source

pin_source(__file__)

Control = Literal["shuffled", "zeroed", "one_row", "off"]
CONTROLS: tuple[Control, ...] = get_args(Control)


@dataclass(frozen=True)
class Edit:
    """What is changed during one forward.

    `control` acts at the memory layers `layers` (block numbers; all of them if empty):
        shuffled: each head reads another row of its own table, by one fixed permutation drawn with `seed`;
        zeroed: every row that is read is zero, so that the value is zero whatever the gate says;
        one_row: every n-gram of a head reads the first row of its table, as if the table had one;
        off: the gate is 0, so that the memory writes nothing.
    `closed` [layer, batch, pos] is true where the gate is forced to 0: nothing is read there, neither by the token
    itself nor, through the convolution, by those behind it.
    `overlays` (models.overlay.prepare) are read as if they stood in the tables; a control acts on those.

        >>> ids = [handle.encode("The river runs past the old mill")]
        >>> without = edited_logits(handle, ids, Edit("off"))  # [batch, pos, vocab]
        >>> torch.equal(without, handle.residuals(ids).logits)
        False
    """

    control: Control | None = None
    layers: tuple[int, ...] = ()
    seed: int = 0
    closed: Tensor | None = None
    overlays: Patch | None = None

    def of(self, layer: int) -> Control | None:
        """The control at a memory layer."""
        return self.control if not self.layers or layer in self.layers else None

    def running(self, handle: Handle) -> AbstractContextManager[None]:
        """handle.running(), with the overlays."""
        return handle.running() if self.overlays is None else self.overlays.applied()


@dataclass(frozen=True)
class MemoryRead:
    """What one forward of ids [batch, pos] did; `residual` is the stream that the memory reads and adds to.

    rows [layer, batch, pos, order, head] int64, ids of rows of the layer's table; read [..., head_dim] what was in
    them; gate [layer, batch, pos, branch]; written, residual [layer, batch, pos, d_model];
    states [1 + block, batch, pos, d_model]; logits [batch, pos, vocab].
    """

    rows: Tensor
    read: Tensor
    gate: Tensor
    written: Tensor
    residual: Tensor
    states: Tensor
    logits: Tensor


def check_edit(handle: Handle, edit: Edit) -> None:
    """LabError if the edit names a layer without a memory, or overlays of another model."""
    memories(handle)
    if edit.overlays is not None and edit.overlays.handle is not handle:
        raise LabError(
            f"These overlays were made ready for {edit.overlays.handle.name}: prepare them for {handle.name}."
        )
    for layer in edit.layers:
        if layer not in handle.engram_layers:
            has = ", ".join(map(str, handle.engram_layers))
            raise LabError(f"{handle.name} has no memory at layer {layer}: its memory layers are {has}.")


def edited_rows(memory: EngramMemory, edit: Edit, layer: int) -> Tensor | None:
    """Which row is read in place of each row of the layer's table, [row] int64; None if every row is its own."""
    control = edit.of(layer)
    starts, sizes = memory.hash.offsets, memory.hash.primes
    if control == "one_row":
        return starts.repeat_interleave(sizes)
    if control != "shuffled":
        return None
    generator = torch.Generator().manual_seed(edit.seed * 1000 + layer)
    # Within each head's own rows, which are of one size and were trained together.
    heads = zip(starts.tolist(), sizes.tolist(), strict=True)
    return torch.cat([start + torch.randperm(size, generator=generator) for start, size in heads]).to(starts.device)


def read_memory(handle: Handle, ids: Tensor | Sequence[Sequence[int]], edit: Edit | None = None) -> MemoryRead:
    """One forward of ids [batch, pos]; without an edit it is torch.equal to the bare one. Raises LabError."""
    edit = edit or Edit()
    check_edit(handle, edit)
    with edit.running(handle):
        inputs = torch.as_tensor(ids, dtype=torch.int64, device=handle.device)
        modules = memories(handle)
        shape = (*inputs.shape, -1, modules[0].hash.n_heads)
        plan = _plan(handle, edit, inputs)
        traced, blocks = handle.traced, handle.blocks
        with traced.trace(input_ids=inputs, use_cache=False):
            stream = [blocks[0].input]
            rows, read, gate, written, residual = [], [], [], [], []
            for number, block in enumerate(blocks):
                if number in plan:
                    swapped, zeroed, opened = plan[number]
                    memory = block.memory
                    residual.append(block.input)
                    if swapped is not None:
                        memory.hash.output = swapped[memory.hash.output]
                    rows.append(memory.hash.output)
                    if zeroed:
                        memory.table.output = torch.zeros_like(memory.table.output)
                    read.append(memory.table.output)
                    if opened is not None:
                        memory.gate.output = memory.gate.output * opened
                    gate.append(memory.gate.output)
                    written.append(memory.written.output)
                output = block.output
                stream.append(output[0] if isinstance(output, tuple) else output)
            logits = nnsight.save(traced.output.logits)
            nnsight.save(stream)
            nnsight.save(rows)
            nnsight.save(read)
            nnsight.save(gate)
            nnsight.save(written)
            nnsight.save(residual)
        return MemoryRead(
            rows=torch.stack(rows).unflatten(-1, shape[2:]),
            read=torch.stack(read).unflatten(-2, shape[2:]),
            gate=torch.stack(gate),
            written=torch.stack(written),
            residual=torch.stack(residual),
            states=torch.stack(stream),
            logits=handle.finite(logits, inputs),
        )


def edited_logits(
    handle: Handle, ids: Tensor | Sequence[Sequence[int]], edit: Edit, position: int | None = None
) -> Tensor:
    """Logits [batch, vocab] at one position of ids [batch, pos], or [batch, pos, vocab], with the edit.

    Keeps nothing else of the forward. Raises LabError.
    """
    check_edit(handle, edit)
    with edit.running(handle):
        inputs = torch.as_tensor(ids, dtype=torch.int64, device=handle.device)
        inputs = inputs if position is None else inputs[:, : position + 1]
        plan = _plan(handle, edit, inputs)
        traced, blocks = handle.traced, handle.blocks
        with traced.trace(input_ids=inputs, use_cache=False, logits_to_keep=int(position is not None)):
            for number, (swapped, zeroed, opened) in plan.items():
                memory = blocks[number].memory
                if swapped is not None:
                    memory.hash.output = swapped[memory.hash.output]
                if zeroed:
                    memory.table.output = torch.zeros_like(memory.table.output)
                if opened is not None:
                    memory.gate.output = memory.gate.output * opened
            logits = nnsight.save(traced.output.logits)
        logits = handle.finite(logits, inputs)
        return logits if position is None else logits[:, -1]


def _plan(handle: Handle, edit: Edit, ids: Tensor) -> dict[int, tuple[Tensor | None, bool, Tensor | None]]:
    """Block -> (rows read in place of rows, whether rows are zeroed, what the gate is multiplied by)."""
    plan: dict[int, tuple[Tensor | None, bool, Tensor | None]] = {}
    for n, (layer, memory) in enumerate(zip(handle.engram_layers, memories(handle), strict=True)):
        opened = None
        if edit.closed is not None:
            closed = edit.closed[n, :, : ids.shape[1]].to(handle.device)
            opened = (~closed).unsqueeze(-1).to(handle.dtype)  # [batch, pos, branch]
        if edit.of(layer) == "off":
            opened = torch.zeros(1, 1, 1, dtype=handle.dtype, device=handle.device)
        plan[layer] = (edited_rows(memory, edit, layer), edit.of(layer) == "zeroed", opened)
    return plan
