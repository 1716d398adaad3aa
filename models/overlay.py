"""Overlays: facts of one user as vectors for single rows of a memory's tables, read in place of what is stored there.

Axes: fact, layer (block number of a memory), row (a row that the overlay holds), batch, pos, order, head, head_dim.
An overlay is a value: nothing here changes a weight, and what it does at run time is bit for bit what a table with
these rows would do. Facts may share rows; a row stays as long as one of its facts does.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from engram_lab.models.errors import LabError
from engram_lab.models.files import whole
from engram_lab.models.handle import Handle
from engram_lab.models.tables import memories

FORMAT = "engram-lab overlay 1"
MAX_BYTES = 256 << 20  # of a file that is read
MAX_FACTS = 100_000
_LAST = torch.iinfo(torch.int64).max  # a key behind all others


class OverlayError(LabError):
    """An overlay that is damaged, or does not fit what it is applied to."""


@dataclass(frozen=True)
class Fact:
    """What a text is to be continued with; the answer as it follows the trigger, leading space included."""

    trigger: str
    answer: str

    def __str__(self) -> str:
        return f'"{self.trigger}{self.answer}"'


@dataclass(frozen=True, eq=False)
class LayerRows:
    """rows [row] int64, ascending; vectors [row, head_dim] float32; owners [pair, 2] int32: (fact, index of a row)."""

    rows: Tensor
    vectors: Tensor
    owners: Tensor

    def __post_init__(self) -> None:
        n = len(self.rows)
        kinds = (self.rows.dtype, self.vectors.dtype, self.owners.dtype)
        dims = (self.rows.ndim, self.vectors.ndim, self.owners.ndim)
        if kinds != (torch.int64, torch.float32, torch.int32) or dims != (1, 2, 2) or self.owners.shape[1] != 2:
            raise OverlayError(
                "An overlay needs rows [n] int64, vectors [n, head_dim] float32 and owners [m, 2] int32."
            )
        if len(self.vectors) != n or (self.rows.diff() <= 0).any() or (n and self.rows[0] < 0):
            raise OverlayError("The rows of an overlay must be ascending, none twice, with one vector each.")
        if not torch.isfinite(self.vectors).all():
            raise OverlayError(
                "The overlay holds numbers that are not finite (NaN or infinite): write the facts again."
            )
        if not torch.equal(self.owners[:, 1].unique(), torch.arange(n, dtype=torch.int32)):
            raise OverlayError("Each row of an overlay must belong to at least one fact of it.")


@dataclass(frozen=True, eq=False)
class Overlay:
    """The facts of one user, written for one model: layers {block number: its rows}; equal if every bit is."""

    user: str
    fingerprint: str
    facts: tuple[Fact, ...]
    layers: Mapping[int, LayerRows]
    method: str
    versions: Mapping[str, str]

    def __post_init__(self) -> None:
        for layer in self.layers.values():
            if len(layer.owners) and not 0 <= int(layer.owners[:, 0].min()) <= int(layer.owners[:, 0].max()) < len(
                self.facts
            ):
                raise OverlayError(f"The overlay of {self.user} has rows of a fact that it does not list.")

    def __eq__(self, other: object) -> bool:
        return self.to_bytes() == other.to_bytes() if isinstance(other, Overlay) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.to_bytes())

    @property
    def n_rows(self) -> int:
        """Rows in all layers."""
        return sum(len(layer.rows) for layer in self.layers.values())

    def without(self, fact: Fact) -> Overlay:
        """As it is but for `fact` and the rows that only it has; a row that others share keeps its vector."""
        if fact not in self.facts:
            raise OverlayError(f"{self.user} has no fact {fact}.")
        gone = self.facts.index(fact)
        layers = {}
        for number, layer in self.layers.items():
            owners = layer.owners[layer.owners[:, 0] != gone]
            kept, index = owners[:, 1].unique(return_inverse=True)
            owner = owners[:, 0] - (owners[:, 0] > gone).int()
            if len(kept):
                pairs = torch.stack([owner, index.int()], dim=1)
                layers[number] = LayerRows(layer.rows[kept.long()], layer.vectors[kept.long()], pairs)
        facts = self.facts[:gone] + self.facts[gone + 1 :]
        return Overlay(self.user, self.fingerprint, facts, layers, self.method, self.versions)

    def to_bytes(self) -> bytes:
        """A safetensors file with its manifest as metadata; the same overlay gives the same bytes."""
        manifest = {
            "format": FORMAT,
            "user": self.user,
            "fingerprint": self.fingerprint,
            "facts": [[fact.trigger, fact.answer] for fact in self.facts],
            "method": self.method,
            "versions": dict(self.versions),
        }
        tensors = {
            f"{number}.{name}": getattr(layer, name).contiguous()
            for number, layer in self.layers.items()
            for name in ("rows", "vectors", "owners")
        }
        text = json.dumps(manifest, ensure_ascii=False, sort_keys=True)
        return safetensors.torch.save(tensors, {"manifest": text})

    def save(self, file: Path) -> None:
        """Write the file whole or not at all."""
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole(file) as fresh:
            fresh.write_bytes(self.to_bytes())


def load_overlay(file: Path) -> Overlay:
    """Read what `save` wrote; OverlayError if the file is damaged, too large or something else."""
    try:
        size = file.stat().st_size
        if size > MAX_BYTES:
            raise OverlayError(f"{file} has {size >> 20} MiB; an overlay may have {MAX_BYTES >> 20}.")
        raw = file.read_bytes()
    except OSError as error:
        raise OverlayError(f"There is no overlay to read at {file} ({error.strerror or error}).") from error
    try:
        manifest = json.loads(_metadata(raw)["manifest"])
        if manifest["format"] != FORMAT:
            raise OverlayError(
                f"{file} is of another version of the lab ({manifest['format']}): write the facts again."
            )
        tensors = safetensors.torch.load(raw)
        facts = tuple(Fact(str(trigger), str(answer)) for trigger, answer in manifest["facts"])
        numbers = sorted({int(name.partition(".")[0]) for name in tensors})
        layers = {
            n: LayerRows(*(tensors.pop(f"{n}.{part}") for part in ("rows", "vectors", "owners"))) for n in numbers
        }
        if tensors or len(facts) > MAX_FACTS:
            raise OverlayError(f"{file} holds more than an overlay does: it was not written by this lab.")
        user, fingerprint, method = (str(manifest[key]) for key in ("user", "fingerprint", "method"))
        return Overlay(user, fingerprint, facts, layers, method, dict(manifest["versions"]))
    except OverlayError as error:
        raise OverlayError(str(error) if str(file) in str(error) else f"{file}: {error}") from error
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise OverlayError(f"{file} is not an overlay of this lab, or damaged: write the facts again.") from error


def _metadata(raw: bytes) -> dict[str, str]:
    """The metadata of a safetensors file; ValueError and the like for anything else."""
    found: dict[str, str] = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
    return found


@dataclass(frozen=True)
class Conflict:
    """A row that overlays of a stack give different vectors: who claims it, in order; the last one's is read."""

    layer: int
    row: int
    claims: tuple[tuple[str, Fact], ...]


@dataclass(frozen=True)
class Stack:
    """Overlays on top of each other: where two hold the same row, the later one's is read.

    >>> rows = LayerRows(torch.tensor([5]), torch.ones(1, 16), torch.tensor([[0, 0]], dtype=torch.int32))
    >>> fact = Fact("My cat is called", " Tom")
    >>> maya = Overlay("maya", handle.fingerprint, (fact,), {1: rows}, "by hand", {})
    >>> stack = Stack((maya,))
    >>> with prepare(handle, stack).applied():  # every forward inside reads ones in row 5 of block 1
    ...     logits = handle.residuals([handle.encode("My cat is called")]).logits
    >>> stack.without("maya", fact)
    Stack(overlays=())
    """

    overlays: tuple[Overlay, ...] = ()

    def add(self, overlay: Overlay) -> Stack:
        """With `overlay` on top."""
        return Stack((*self.overlays, overlay))

    def without(self, user: str, fact: Fact | None = None) -> Stack:
        """Without a user, or one fact of theirs; OverlayError if there is no such thing to remove."""
        if not any(own.user == user and fact in (None, *own.facts) for own in self.overlays):
            raise OverlayError(f"{user} has no {'overlay' if fact is None else f'fact {fact}'} here.")
        left = (
            (own.without(fact) if own.user == user and fact in own.facts else own for own in self.overlays)
            if fact
            else (own for own in self.overlays if own.user != user)
        )
        return Stack(tuple(own for own in left if own.facts))

    def layers(self) -> list[int]:
        """The layers that have rows, ascending."""
        return sorted({number for own in self.overlays for number in own.layers})

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """What is read at one of `layers()`: (rows [row] int64 ascending, vectors [row, head_dim] float32)."""
        parts = [own.layers[layer] for own in self.overlays if layer in own.layers]
        rows, vectors = (torch.cat([getattr(part, name) for part in parts]) for name in ("rows", "vectors"))
        order = rows.argsort(stable=True)  # of equal rows the last is the latest
        last = torch.ones(len(rows), dtype=torch.bool)
        last[:-1] = rows[order].diff() != 0
        return rows[order[last]], vectors[order[last]]

    def conflicts(self) -> tuple[Conflict, ...]:
        """Every row that two overlays give different vectors, by layer and row."""
        found = []
        for number in self.layers():
            holders: dict[int, list[tuple[Overlay, int]]] = {}
            for own in self.overlays:
                if number in own.layers:
                    for index, row in enumerate(own.layers[number].rows.tolist()):
                        holders.setdefault(row, []).append((own, index))
            for row, claims in sorted(holders.items()):
                vectors = [own.layers[number].vectors[index] for own, index in claims]
                if any(not torch.equal(vectors[0], other) for other in vectors[1:]):
                    facts = tuple((own.user, fact) for own, at in claims for fact in _facts_of(own, number, at))
                    found.append(Conflict(number, row, facts))
        return tuple(found)


def _facts_of(overlay: Overlay, layer: int, index: int) -> list[Fact]:
    owners = overlay.layers[layer].owners
    return [overlay.facts[n] for n in owners[owners[:, 1] == index, 0].tolist()]


def check_overlay(handle: Handle, overlay: Overlay) -> None:
    """OverlayError unless the overlay was written for this very model."""
    whose = f"The overlay of {overlay.user}"
    if overlay.fingerprint != handle.fingerprint:
        raise OverlayError(
            f"{whose} was written for the model {overlay.fingerprint}, but {handle.name} is {handle.fingerprint}: "
            "write the facts for it."
        )
    modules = dict(zip(handle.engram_layers, memories(handle), strict=True))
    for number, layer in overlay.layers.items():
        if number not in modules:
            raise OverlayError(f"{whose} has rows for layer {number}, where {handle.name} has no memory.")
        count, width = modules[number].table.weight.shape
        if layer.vectors.shape[1] != width:
            raise OverlayError(
                f"{whose} has rows {layer.vectors.shape[1]} wide; in {handle.name} they are {width} wide."
            )
        if len(layer.rows) and int(layer.rows[-1]) >= count:
            raise OverlayError(f"{whose} has the row {int(layer.rows[-1])}; layer {number} has only {count} rows.")


class RowLookup:
    """Gives rows that are held under their keys, and leaves others as they were read (see RowTable).

    A key is slot * num_rows + row; batch element b reads the slot `slots[b]`, everyone slot 0 without `slots`.
    """

    def __init__(self, keys: Tensor, vectors: Tensor, num_rows: int, slots: Tensor | None = None) -> None:
        """keys [key] int64 ascending, vectors [key, head_dim], slots [batch] int64."""
        # A last key that no row has keeps the search inside.
        self._keys = torch.cat([keys, keys.new_tensor([_LAST])])
        self._vectors = torch.nn.functional.pad(vectors, (0, 0, 0, 1))
        self._first = None if slots is None else (slots * num_rows).view(-1, 1, 1)

    def hits(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(index of the key, whether it is held), each like rows [batch, pos, order*head]."""
        if self._first is not None:
            if len(self._first) != len(rows):
                raise OverlayError(f"There are overlays for {len(self._first)} prompts, but the batch has {len(rows)}.")
            rows = rows + self._first
        index = torch.searchsorted(self._keys, rows)
        return index, self._keys[index] == rows

    def __call__(self, rows: Tensor, read: Tensor) -> Tensor:
        """read [batch, pos, order*head, head_dim] with the rows that are held put in."""
        index, held = self.hits(rows)
        return torch.where(held.unsqueeze(-1), self._vectors[index].to(read.dtype), read)


class Patch:
    """Overlays made ready for one model: `with patch.applied(): ...` runs it with them, then without again."""

    def __init__(self, handle: Handle, lookups: Mapping[int, RowLookup]) -> None:
        self.handle = handle
        # Weakly, so that a handle that is closed gives its weights back.
        tables = zip(handle.engram_layers, memories(handle), strict=True)
        self._lookups = [(weakref.ref(memory.table), lookups.get(layer)) for layer, memory in tables]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Hold the model (see Handle.running); every forward inside, traced or not, reads these overlays alone."""
        with self.handle.running(), self.put_in():
            yield

    @contextmanager
    def put_in(self) -> Iterator[None]:
        """As applied(), for code inside running() that has a grad mode of its own."""
        # Into the dictionary itself: setting an attribute of a module takes much longer.
        entries = [(vars(table), lookup) for ref, lookup in self._lookups if (table := ref()) is not None]
        before = [entry.get("overlay") for entry, _ in entries]
        try:
            for entry, lookup in entries:
                entry["overlay"] = lookup
            yield
        finally:
            for (entry, _), earlier in zip(entries, before, strict=True):
                entry["overlay"] = earlier


def prepare(handle: Handle, overlays: Overlay | Stack | Sequence[Overlay | Stack | None]) -> Patch:
    """Check overlays and build what applying them takes: one for all, or one (or None) for each batch element.

    OverlayError if one is not of this model; at run time if the batch has another size than the sequence.
    """
    each = [overlays] if isinstance(overlays, Overlay | Stack) else list(overlays)
    distinct: list[Overlay | Stack] = []
    slot_of: dict[int, int] = {}
    for one in each:
        if one is not None and id(one) not in slot_of:
            slot_of[id(one)] = len(distinct)
            distinct.append(one)
    stacks = [one if isinstance(one, Stack) else Stack((one,)) for one in distinct]
    for overlay in {id(own): own for stack in stacks for own in stack.overlays}.values():
        check_overlay(handle, overlay)
    lookups = {}
    for number, memory in zip(handle.engram_layers, memories(handle), strict=True):
        weight = memory.table.weight
        found = [(slot, *stack.rows(number)) for slot, stack in enumerate(stacks) if number in stack.layers()]
        if not found:
            continue
        keys = torch.cat([slot * len(weight) + rows for slot, rows, _ in found]).to(weight.device)
        vectors = torch.cat([own for _, _, own in found]).to(weight.device, weight.dtype)
        slots = None
        if not isinstance(overlays, Overlay | Stack):
            # Who has no overlay reads a slot behind all others.
            slots = torch.tensor([slot_of.get(id(one), len(stacks)) for one in each], device=weight.device)
        lookups[number] = RowLookup(keys, vectors, len(weight), slots)
    return Patch(handle, lookups)
