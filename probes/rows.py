"""What one position reads from the memory: its n-grams, the rows they address, who else does, and what the rows say.

Axes: order (n = 2..N), head, k (best first), vocab, d_model, head_dim. One model, one prompt, one memory layer.
The row of a head is (x_t m_0 XOR x_t-1 m_1 XOR ...) mod its prime, of canonical ids x (Engram, arXiv 2601.07372).
With g the weight of the final norm and h the last residual at the position, a row r of a head adds to the logits,
on the direct path and with the gate fully open,
    W_U (g * W_V[:, slice of the head] r) / rms(h)
The sum over all rows of the position, times its gate, is what came through; the convolution is left out of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from engram_lab.models import ngrams, row_counts
from engram_lab.models.engram import EngramMemory
from engram_lab.models.errors import DataError, LabError, PromptError
from engram_lab.models.handle import Handle
from engram_lab.models.memory import read_memory
from engram_lab.models.ngrams import Ngrams
from engram_lab.models.row_counts import RowCounts
from engram_lab.models.tables import memories
from engram_lab.probes.base import Array, Progress, Protocol, Record, Report, only, role
from engram_lab.probes.row_usage import Usage, usage
from engram_lab.probes.spans import text_of

# One sentence for each figure, to print beside it.
MAX_TOP_K, MAX_SHARED = 100, 1000


@dataclass(frozen=True, eq=False)
class RowsConfig(Record):
    """A request: one model, one prompt, a position of it (negative from the end) and a memory layer (null: the first).

    `text` holds the documents that hits, sharing and usage are counted over; `counts` is a file of
    `engram-lab rows count` to take the training hits from, if not those that ship. At most `top_shared` of the
    n-grams that share a row are listed. Raises PromptError or LabError.
    """

    models: tuple[str, ...]
    prompts: tuple[str, ...]
    position: int = -1
    layer: int | None = None
    text: tuple[str, ...] = ()
    top_k: int = 8
    top_shared: int = 10
    counts: str | None = None

    def __post_init__(self) -> None:
        if len(self.models) != 1:
            raise LabError(f"The row inspector takes one model, not {len(self.models)}.")
        if len(self.prompts) != 1:
            raise PromptError(f"The row inspector takes one prompt, not {len(self.prompts)}.")
        if not 1 <= self.top_k <= MAX_TOP_K:
            raise LabError(f"top_k is {self.top_k}; it must be from 1 to {MAX_TOP_K}.")
        if not 0 <= self.top_shared <= MAX_SHARED:
            raise LabError(f"top_shared is {self.top_shared}; it must be from 0 to {MAX_SHARED}.")


@dataclass(frozen=True, eq=False)
class Gram(Record):
    """The n-gram of one order that ends at the position, oldest token first.

    raw_ids, raw_text: what of it the prompt has; canonical ids and texts: all of it, filled up with padding.
    text_count, alone: how often the brought text has it (null without a text).
    """

    order: int = field(metadata=role("name"))
    raw_ids: tuple[int, ...] = field(metadata=role("name"))
    raw_text: str
    canonical_ids: tuple[int, ...] = field(metadata=role("name"))
    canonical_texts: tuple[str, ...]
    text_count: int | None


@dataclass(frozen=True, eq=False)
class Shared(Record):
    """Another n-gram at the same row, and how often the text has it."""

    canonical_texts: tuple[str, ...]
    count: int


@dataclass(frozen=True, eq=False)
class Said(Record):
    """The tokens that something promotes and suppresses most, on the direct path (DEFINITIONS["says"] of its front)."""

    promoted_ids: tuple[int, ...] = field(metadata=role("name"))
    promoted_texts: tuple[str, ...] = field(metadata=role("spelled"))
    promoted: Annotated[np.ndarray, Array("k", unit="logits", ranks="promoted_ids")]
    suppressed_ids: tuple[int, ...] = field(metadata=role("name"))
    suppressed_texts: tuple[str, ...] = field(metadata=role("spelled"))
    suppressed: Annotated[np.ndarray, Array("k", unit="logits", ranks="suppressed_ids")]


@dataclass(frozen=True, eq=False)
class Row(Record):
    """One row that the position reads. `row` counts within the head, `row_id` within the layer's table.

    training_*, text_*: hits and distinct n-grams, over the text counted before and the one brought; null if none.
    shared_total counts the others at this row, of which `shared` lists the most frequent.
    """

    order: int = field(metadata=role("name"))
    head: int = field(metadata=role("name"))
    prime: int = field(metadata=role("name"))
    row: int = field(metadata=role("name"))
    row_id: int = field(metadata=role("name"))
    norm: float
    training_hits: int | None
    training_ngrams: int | None
    text_hits: int | None
    text_ngrams: int | None
    shared_total: int | None
    shared: tuple[Shared, ...]
    says: Said


@dataclass(frozen=True, eq=False)
class RowsResult(Record):
    """What the position reads; `position` counts from the start. Norms and gate are those of this forward."""

    layer: int = field(metadata=role("name"))
    position: int = field(metadata=role("name"))
    token_id: int = field(metadata=role("name"))
    token_text: str
    gate: float
    gated_norm: float  # of the gated value, before the convolution
    written_norm: float
    residual_norm: float
    ngrams: tuple[Gram, ...]
    rows: tuple[Row, ...]
    came_through: Said
    text: Usage | None
    training: Usage | None


CONFIG, RESULT = RowsConfig, RowsResult


def run(
    handles: Sequence[Handle], config: RowsConfig, progress: Progress | None = None
) -> Report[RowsConfig, RowsResult]:
    """The rows behind one position, and the usage of the layer over the brought text.

    The result has one entry for each order of n-gram and head that the position reads. Raises LabError for a model
    without memory, a layer that has none, a position that is not in the prompt, or counts that are of another model.

        >>> report = run([handle], RowsConfig((handle.name,), ("The river runs",)))
        >>> report.result.layer in handle.engram_layers
        True
    """
    handle = only(handles)
    modules = dict(zip(handle.engram_layers, memories(handle), strict=True))
    layer = handle.engram_layers[0] if config.layer is None else config.layer
    if layer not in modules:
        has = ", ".join(map(str, modules))
        raise LabError(f"{handle.name} has no memory at layer {layer}: its memory layers are {has}.")
    ids = handle.encode(config.prompts[0])
    position = config.position + len(ids) if config.position < 0 else config.position
    if not 0 <= position < len(ids):
        raise LabError(
            f"The position {config.position} is not in the prompt, which has {len(ids)} tokens for {handle.name}: "
            f"give one from 0 to {len(ids) - 1}, or from -{len(ids)} to -1."
        )
    training = _training_counts(handle, config)
    text = _count_text(handle, config.text, progress)
    if progress is not None:
        progress(0.95, "reading the rows")
    memory, at = modules[layer], handle.engram_layers.index(layer)
    read = read_memory(handle, [ids])
    gate = float(read.gate[at, 0, position, 0])
    values, logits = direct_logits(handle, memory, read.read[at, 0, position], read.states[-1, 0, position])
    said = _said(handle, torch.cat([logits, gate * logits.sum(dim=0, keepdim=True)]), config.top_k)
    lookback = ngrams.lookbacks(handle, torch.tensor([ids]))[0, position]
    counted: list[tuple[np.ndarray, np.ndarray] | None] = [None, None]  # (hits, n-grams) in training and in the text
    usages: list[Usage | None] = [None, None]
    if training is not None:
        hits, loads = counted[0] = training.hits[layer], training.ngrams[layer]
        usages[0] = usage(memory.hash, training.distinct, hits, loads, training.sources, training.tokens)
    if text is not None:
        grams, tokens = text
        hits, loads = counted[1] = ngrams.row_counts(memory.hash, grams)
        usages[1] = usage(memory.hash, list(map(len, grams)), hits, loads, ("the text given",), tokens)
    result = RowsResult(
        layer=layer,
        position=position,
        token_id=ids[position],
        token_text=text_of(handle.pieces(ids)[position]),
        gate=gate,
        gated_norm=abs(gate) * float(values.sum(dim=0).norm()),
        written_norm=float(read.written[at, 0, position].float().norm()),
        residual_norm=float(read.residual[at, 0, position].float().norm()),
        ngrams=_grams(handle, ids[: position + 1], lookback.tolist(), text[0] if text else None),
        rows=tuple(_rows(handle, memory, lookback, read.read[at, 0, position], counted, text, said, config)),
        came_through=said[-1],
        training=usages[0],
        text=usages[1],
    )
    return Report("rows", config, Protocol.of(handles, [[ids]], 0), result)


def direct_logits(handle: Handle, memory: EngramMemory, read: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
    """(values [row, d_model], logits [row, vocab]) of rows read [order, head, head_dim], each with the gate open.

    `final` [d_model] is the last residual at the position, whose norm scales them; logits have mean 0.
    """
    with handle.running():
        rows = read.flatten(0, 1).float()  # [order*head, head_dim], the columns of W_V in their order
        slices = memory.value.weight.float().unflatten(1, rows.shape)
        values = torch.einsum("dhk,hk->hd", slices, rows)
        norm: Any = handle.model.get_submodule(handle.layout.final_norm)
        head: Any = handle.model.get_submodule(handle.layout.head)
        scale = norm.weight.float() * torch.rsqrt(final.float().square().mean() + norm.variance_epsilon)
        logits = (values * scale) @ head.weight.float().T
        return values.cpu(), (logits - logits.mean(dim=-1, keepdim=True)).cpu()


def _training_counts(handle: Handle, config: RowsConfig) -> RowCounts | None:
    """The counts that ship for the model, or those of the file named."""
    if config.counts is None:
        return row_counts.shipped(handle.fingerprint)
    counts = row_counts.load(Path(config.counts))
    if counts.fingerprint != handle.fingerprint:
        raise DataError(
            f"{config.counts} holds the counts of the model {counts.fingerprint}, and {handle.name} is "
            f"{handle.fingerprint}: count again with engram-lab rows count."
        )
    return counts


def _count_text(handle: Handle, text: Sequence[str], progress: Progress | None) -> tuple[list[Ngrams], int] | None:
    """(n-grams of each order, tokens) of the brought text; None if there is none."""
    whole, taken = sum(map(len, text)), 0

    def telling() -> Iterator[str]:
        nonlocal taken
        for document in text:
            taken += len(document)
            yield document

    def told(tokens: int) -> None:
        if progress is not None:
            progress(0.9 * taken / max(whole, 1), f"n-grams of the text: {tokens} tokens")

    grams, tokens = ngrams.count_ngrams(handle, ngrams.packed(handle, telling()), told)
    return (grams, tokens) if tokens else None


def _grams(handle: Handle, ids: Sequence[int], lookback: list[int], text: list[Ngrams] | None) -> tuple[Gram, ...]:
    """The n-grams that end with `ids` [pos], whose lookback [back] is given."""
    names = ngrams.canonical_texts(handle, lookback)
    found = []
    for order in range(2, len(lookback) + 1):
        raw, canonical = tuple(ids[-order:]), tuple(lookback[:order][::-1])
        raw_text = text_of(b"".join(handle.pieces(ids)[-order:]))
        count = None
        if text is not None:
            own = text[order - 2]
            count = int(own.counts[(own.ids == lookback[:order]).all(axis=1)].sum())
        found.append(Gram(order, raw, raw_text, canonical, tuple(names[i] for i in canonical), count))
    return tuple(found)


def _rows(
    handle: Handle,
    memory: EngramMemory,
    lookback: Tensor,
    read: Tensor,
    counted: Sequence[tuple[np.ndarray, np.ndarray] | None],
    text: tuple[list[Ngrams], int] | None,
    said: Sequence[Said],
    config: RowsConfig,
) -> Iterator[Row]:
    """Every row of lookback [back], read [order, head, head_dim]; counted are (hits, n-grams) [row of the table]."""
    steps = ngrams.hash_steps(memory.hash, lookback[None])
    primes = ngrams.head_sizes(memory.hash)
    for k, order_primes in enumerate(primes):
        mixes = None if text is None else ngrams.mixes_of(memory.hash, text[0][k])
        for head, prime in enumerate(order_primes.tolist()):
            row, row_id = int(steps.places[0, k, head]), int(steps.rows[0, k, head])
            counts = [(None, None) if c is None else (int(c[0][row_id]), int(c[1][row_id])) for c in counted]
            total: int | None = None
            shared: tuple[Shared, ...] = ()
            if text is not None and mixes is not None:
                total, shared = _sharing(
                    handle, text[0][k], mixes % prime == row, lookback[: k + 2].numpy(), config.top_shared
                )
            yield Row(
                order=k + 2,
                head=head,
                prime=prime,
                row=row,
                row_id=row_id,
                norm=float(read[k, head].float().norm()),
                training_hits=counts[0][0],
                training_ngrams=counts[0][1],
                text_hits=counts[1][0],
                text_ngrams=counts[1][1],
                shared_total=total,
                shared=shared,
                says=said[k * primes.shape[1] + head],
            )


def _sharing(
    handle: Handle, grams: Ngrams, here: np.ndarray, own: np.ndarray, limit: int
) -> tuple[int, tuple[Shared, ...]]:
    """(how many n-grams but `own` [back] are `here` [gram], the most frequent of them)."""
    at = np.flatnonzero(here)
    at = at[(grams.ids[at] != own).any(axis=1)]
    most = at[np.argsort(-grams.counts[at], kind="stable")[:limit]]
    names = ngrams.canonical_texts(handle, grams.ids[most].flatten().tolist())
    shared = (
        Shared(tuple(names[i] for i in ids[::-1].tolist()), int(count))
        for ids, count in zip(grams.ids[most], grams.counts[most], strict=True)
    )
    return len(at), tuple(shared)


def _said(handle: Handle, logits: Tensor, top_k: int) -> list[Said]:
    """What each row of logits [row, vocab] promotes and suppresses most, equals by rising id."""
    k = min(top_k, logits.shape[-1])
    fields = []
    for name, descending in (("promoted", True), ("suppressed", False)):
        values, ids = (part[:, :k] for part in logits.sort(dim=-1, descending=descending, stable=True))
        used = ids.unique().tolist()
        names = dict(zip(used, map(text_of, handle.pieces(used, whole=False)), strict=True))
        fields.append(
            [
                {f"{name}_ids": tuple(i), f"{name}_texts": tuple(names[n] for n in i), name: v.float().numpy()}
                for i, v in zip(ids.tolist(), values, strict=True)
            ]
        )
    return [Said(**up, **down) for up, down in zip(*fields, strict=True)]
