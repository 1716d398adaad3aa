"""The KV cache of a text as a value, and its edits, which are pure functions. Runs are in models.kv_runs.

Axes: layer (decoder block), batch, kv_head, pos, head_dim. Keys are as cached: after the rotation.

An Engram keeps more at a position (models.memory_state.state_layers): the token history, by which later tokens are
addressed, and per memory layer what its convolution looks back on. The latter goes with its block; the history goes,
with the id, where K and V of all layers do. Sliding-window layers keep all tokens here; the mask does the window.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from engram_lab.models.engram import document_reach
from engram_lab.models.errors import LabError, first_line
from engram_lab.models.memory_state import MemoryState

PARTS = ("kv", "k", "v")


class KVError(LabError):
    """An edit that does not fit its cache, or a model whose cache cannot be edited so."""


@dataclass(frozen=True, eq=False)
class KV:
    """The cache of a text. Never write into its tensors: edits make new ones, and may share what did not change.

    keys, values: [layer][batch, kv_head, pos, head_dim]; layers may differ in all but batch and pos.
    ids [batch, pos] int64, the tokens that the positions stand for; positions [pos] int64, where they stand.
    state: only for an Engram, history [batch, 1, pos, (canonical id, reach, position)] int64, then per memory layer
    [batch, 1, pos, d_model]; state_layers are the blocks of the latter.

        >>> from engram_lab.models.kv_runs import continue_from, prefill
        >>> old, new = (prefill(handle, handle.encode(text)).kv for text in ("The mill is old.", "The sea. is old."))
        >>> edited = swap(old.first(5), new.first(5), positions=[2, 3])  # what later tokens will read there
        >>> continue_from(handle, edited, old.ids[:, 5:6]).shape == (1, 1, handle.vocab_size)
        True
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    ids: Tensor
    positions: Tensor
    state: tuple[Tensor, ...] = ()
    state_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        shape = self.ids.shape
        assert len(self.keys) == len(self.values) and self.positions.shape == shape[1:]
        assert len(self.state) == (1 + len(self.state_layers) if self.state else 0)
        assert all(t.dim() == 4 and (t.shape[0], t.shape[2]) == shape for t in self._cached())

    def _cached(self) -> tuple[Tensor, ...]:
        return (*self.keys, *self.values, *self.state)

    @property
    def n_layers(self) -> int:
        """Layers with keys and values."""
        return len(self.keys)

    @property
    def batch(self) -> int:
        """Rows of the batch: texts, or edits of one text."""
        return self.ids.shape[0]

    @property
    def n_tokens(self) -> int:
        """Cached positions."""
        return self.ids.shape[1]

    @property
    def next_position(self) -> int:
        """Where a token after the last one stands (0 after nothing)."""
        return int(self.positions[-1]) + 1 if self.n_tokens else 0

    @property
    def n_bytes(self) -> int:
        """Memory of the cache, all rows: by it a caller chooses how many edits go into one batch."""
        return sum(t.numel() * t.element_size() for t in self._cached())

    def map(self, change: Callable[[Tensor], Tensor], positions: Tensor | None = None) -> KV:
        """`change` applied to every cached tensor [batch, head, pos, dim] and to ids as [batch, 1, pos, 1]."""
        return replace(
            self,
            keys=tuple(map(change, self.keys)),
            values=tuple(map(change, self.values)),
            state=tuple(map(change, self.state)),
            ids=change(self.ids[:, None, :, None])[:, 0, :, 0],
            positions=self.positions if positions is None else positions,
        )

    def first(self, n: int) -> KV:
        """The cache of the first `n` tokens; KVError if there are not so many."""
        return self.span(0, n)

    def span(self, start: int, stop: int) -> KV:
        """Tokens start..stop-1 as they stand; KVError if they are not all there."""
        if not 0 <= start <= stop <= self.n_tokens:
            raise KVError(f"A cache of {self.n_tokens} tokens has no tokens {start} to {stop}.")
        return self.map(lambda t: t[:, :, start:stop], self.positions[start:stop])

    def row(self, index: int) -> KV:
        """One row as a batch of 1."""
        if not 0 <= index < self.batch:
            raise KVError(f"A batch of {self.batch} rows has no row {index}.")
        return self.map(lambda t: t[index : index + 1])

    def expand(self, batch: int) -> KV:
        """A batch of 1 as `batch` equal rows, without copying; other batches only as they are."""
        if self.batch not in (1, batch):
            raise KVError(f"A cache with {self.batch} rows cannot be taken as one with {batch}.")
        return self.map(lambda t: t.expand(batch, -1, -1, -1))

    def copy(self) -> KV:
        """The same in memory of its own."""
        return self.map(lambda t: t.clone(memory_format=torch.contiguous_format), self.positions.clone())

    def digest(self) -> str:
        """16 hex characters of the sha256 over every byte, shapes included: equal before and after, unchanged."""
        digest = hashlib.sha256()
        for tensor in (*self._cached(), self.ids, self.positions):
            digest.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
            flat = tensor.detach().cpu().contiguous().view(-1)
            digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class KVEdit:
    """What of a cache to replace: token indices, layers (None: all), part "kv", "k" or "v"."""

    positions: tuple[int, ...]
    layers: tuple[int, ...] | None = None
    part: str = "kv"


def swap(stale: KV, donor: KV, positions: Sequence[int], layers: Sequence[int] | None = None, part: str = "kv") -> KV:
    """`stale` with K and/or V at `positions` from the same positions of `donor`, in every row.

    `donor` may be of another length, if it has the positions, and of batch 1. Raises KVError.
    """
    edit = KVEdit(tuple(positions), None if layers is None else tuple(layers), part)
    return _replace(stale, donor.expand(stale.batch), [edit] * stale.batch)


def swap_each(stale: KV, donor: KV, edits: Sequence[KVEdit]) -> KV:
    """A batch with one row for each edit of the one text `stale` (batch 1), so that all run in one forward."""
    return _replace(_single(stale).expand(len(edits)), _single(donor).expand(len(edits)), edits)


def blank_each(kv: KV, edits: Sequence[KVEdit], how: str = "zero") -> KV:
    """A batch with one row for each edit of the one text `kv` (batch 1): its positions are zero, or their mean.

    The mean is over all positions of the cache, of the keys as cached, after rotation. The token history of an Engram
    stays: it is the text's. KVError for a place that the cache does not have, or another `how`.
    """
    return _replace(_single(kv).expand(len(edits)), _blanked(kv, how).expand(len(edits)), edits)


def stack(caches: Sequence[KV]) -> KV:
    """One batch of caches of equal length at equal positions, such as edits of one text."""
    first = caches[0]
    if any(kv.n_tokens != first.n_tokens or not torch.equal(kv.positions, first.positions) for kv in caches):
        raise KVError("Only caches of the same length and positions can be stacked.")
    return join(caches, 0, first.positions)


def splice(prefix: KV, block: KV) -> KV:
    """`block` behind `prefix`, both as computed: the block's tokens have not seen the prefix.

    The block has to stand where the prefix ends (see models.rotary.move). What comes after an Engram's splice is
    addressed by the text as spliced, while the memory has written into the block's tokens, its first
    max_ngram - 1 among them, what it did when the block was alone; `recompute` makes these new. Raises KVError.
    """
    if block.n_tokens and int(block.positions[0]) != prefix.next_position:
        raise KVError(
            f"The block stands at position {int(block.positions[0])} and the prefix ends before "
            f"{prefix.next_position}: move the block there first."
        )
    batch = max(prefix.batch, block.batch)
    joined = join([prefix.expand(batch), block.expand(batch)], 2, torch.cat([prefix.positions, block.positions]))
    if not joined.state:
        return joined
    history = joined.state[0].clone()
    history[:, 0, :, 1] = document_reach(history[:, 0, :, 2], history[:, 0, :, 1] >= 0, None)
    return replace(joined, state=(history, *joined.state[1:]))


def _single(kv: KV) -> KV:
    if kv.batch != 1:
        raise KVError(f"A batch of edits is made from one text, not from a batch of {kv.batch}.")
    return kv


def join(caches: Sequence[KV], axis: int, positions: Tensor) -> KV:
    """Put behind one another along axis 0 (batch) or 2 (pos), `positions` [pos] being those of the whole."""
    if len({(kv.n_layers, kv.state_layers) for kv in caches}) > 1:
        raise KVError("Caches of different models cannot be put together.")
    columns = zip(*[(*kv.keys, *kv.values, *kv.state, kv.ids[:, None, :, None]) for kv in caches], strict=True)
    try:
        *cached, ids = (torch.cat(column, dim=axis) for column in columns)
    except RuntimeError as error:
        raise KVError(f"Caches of different models cannot be put together ({first_line(error)}).") from error
    n = caches[0].n_layers
    return KV(
        tuple(cached[:n]),
        tuple(cached[n : 2 * n]),
        ids[:, 0, :, 0],
        positions,
        tuple(cached[2 * n :]),
        caches[0].state_layers,
    )


def _blanked(kv: KV, how: str) -> KV:
    """What blank_each() puts in: every position zero or the mean, the token history as it is."""
    if how not in ("zero", "mean"):
        raise KVError(f'A position is blanked with "zero" or "mean", not with "{how}".')

    def wipe(tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor) if how == "zero" else tensor.mean(dim=2, keepdim=True).expand_as(tensor)

    return replace(
        kv,
        keys=tuple(map(wipe, kv.keys)),
        values=tuple(map(wipe, kv.values)),
        state=(*kv.state[:1], *map(wipe, kv.state[1:])),
    )


def _replace(kv: KV, donor: KV, edits: Sequence[KVEdit]) -> KV:
    """Row b of the result is row b of `kv` with edits[b] from row b of `donor`."""
    if (donor.n_layers, donor.state_layers) != (kv.n_layers, kv.state_layers):
        raise KVError(
            f"The donor has {donor.n_layers} layers and the cache {kv.n_layers}: both must come from the same model."
        )
    if not edits:
        raise KVError("There is no edit to make: give at least one.")
    key_mask, value_mask = _masks(kv, donor, edits)
    whole = key_mask & value_mask  # [batch, layer, pos]

    def mix(mask: Tensor, old: Tensor, new: Tensor) -> Tensor:
        if not bool(mask.any()):
            return old
        missing = kv.n_tokens - new.shape[2]
        new = torch.nn.functional.pad(new, (0, 0, 0, missing)) if missing > 0 else new[:, :, : kv.n_tokens]
        if (old.shape[1], old.shape[3]) != (new.shape[1], new.shape[3]):
            raise KVError("The donor's layers have another shape: both caches must come from the same model.")
        return torch.where(mask.to(old.device)[:, None, :, None], new, old)

    everywhere = whole.all(dim=1)  # [batch, pos]: the token itself
    state_masks = [everywhere, *(whole[:, layer] for layer in kv.state_layers)]
    return replace(
        kv,
        keys=tuple(mix(key_mask[:, i], *pair) for i, pair in enumerate(zip(kv.keys, donor.keys, strict=True))),
        values=tuple(mix(value_mask[:, i], *pair) for i, pair in enumerate(zip(kv.values, donor.values, strict=True))),
        state=tuple(
            mix(*triple) for triple in zip(state_masks if kv.state else (), kv.state, donor.state, strict=True)
        ),
        ids=mix(everywhere, kv.ids[:, None, :, None], donor.ids[:, None, :, None])[:, 0, :, 0],
    )


def _masks(kv: KV, donor: KV, edits: Sequence[KVEdit]) -> tuple[Tensor, Tensor]:
    """(keys, values) [batch, layer, pos] bool: what the edits replace. KVError if a number is out of range."""
    masks = torch.zeros(2, len(edits), kv.n_layers, kv.n_tokens, dtype=torch.bool)
    length = min(kv.n_tokens, donor.n_tokens)
    for row, edit in enumerate(edits):
        layers = range(kv.n_layers) if edit.layers is None else edit.layers
        if bad := [p for p in edit.positions if not 0 <= p < length]:
            raise KVError(f"Position {bad[0]} is not in both caches, which have the positions 0 to {length - 1}.")
        if bad := [layer for layer in layers if not 0 <= layer < kv.n_layers]:
            raise KVError(f"There is no layer {bad[0]}: the layers are 0 to {kv.n_layers - 1}.")
        if edit.part not in PARTS:
            raise KVError(f'"{edit.part}" is no part of a cache: use {", ".join(PARTS)}.')
        cells = torch.zeros(kv.n_layers, kv.n_tokens, dtype=torch.bool)
        cells[torch.tensor(list(layers), dtype=torch.int64)[:, None], list(edit.positions)] = True
        masks[0, row] = cells if "k" in edit.part else False
        masks[1, row] = cells if "v" in edit.part else False
    return masks[0], masks[1]


def shared_cache(kv: KV) -> Cache:
    """The cache over the tensors of `kv` themselves: a forward appends by making new ones."""
    cache = DynamicCache()
    attention = [(DynamicLayer(), *pair) for pair in zip(kv.keys, kv.values, strict=True)]
    for layer, keys, values in [*attention, *((MemoryState(), state, state[..., :0]) for state in kv.state)]:
        if kv.n_tokens:
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        cache.layers.append(layer)
    return cache
