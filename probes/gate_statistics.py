"""What the gates probe says over positions: bounds of a gate, rank correlation, n-grams ranked by their gates.

Axes: layer (memory layers, by block), branch, pos (prompts one after another).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engram_lab.models.canonical import normalise
from engram_lab.models.engram import gate_value
from engram_lab.models.handle import Handle
from engram_lab.models.ngrams import engram_model
from engram_lab.models.tables import memories
from engram_lab.probes.base import Record, role
from engram_lab.probes.spans import text_of, token_text


@dataclass(frozen=True, eq=False)
class Ngram(Record):
    """An n-gram of canonical ids and the gates of a layer where it ends."""

    layer: int = field(metadata=role("name"))
    order: int = field(metadata=role("name"))  # 2 for bigrams
    canonical_ids: tuple[int, ...] = field(metadata=role("name"))
    texts: tuple[str, ...]  # of each canonical id
    example: str  # as it stands where it was found first
    count: int
    mean_gate: float
    mean_written_norm: float


def canonical_map(handle: Handle) -> np.ndarray:
    """The canonical id [raw id] of every token, as the model's own memory has it."""
    found: np.ndarray = engram_model(handle).canonical_ids.cpu().numpy()
    return found


def learned_ceilings(handle: Handle) -> np.ndarray:
    """[layer]: the largest gate that the norms' own weights allow, |s| <= sqrt(d) max|w_K w_Q|."""
    modules = memories(handle)
    largest = [(m.key_norm.weight * m.query_norm.weight).abs().max().item() for m in modules]
    scores = math.sqrt(handle.d_model) * torch.tensor(largest, dtype=torch.float64)
    return gate_value(scores, modules[0].gate_variant).numpy()


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's rank correlation of two arrays [pos], ties by their mean rank; NaN if one of them is constant."""
    rank_a, rank_b = _ranks(a), _ranks(b)
    if not rank_a.any() or not rank_b.any():
        return math.nan
    return float(rank_a @ rank_b / math.sqrt((rank_a @ rank_a) * (rank_b @ rank_b)))


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks minus their mean, ties by their mean rank."""
    _, member, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[member] - (len(values) + 1) / 2


def ranking(
    handle: Handle,
    prompts: Sequence[str],
    fields: Mapping[str, np.ndarray],
    min_count: int,
    ranked: int,
) -> tuple[tuple[Ngram, ...], tuple[Ngram, ...]]:
    """The `ranked` n-grams with the highest and with the lowest mean gate, for each layer and order.

    `fields` are arrays of a GatesResult. An n-gram counts where it lies in its prompt as a whole, without a special
    token that leads it; those found fewer than `min_count` times are left out.
    """
    canonical, index, counted = (fields[name] for name in ("canonical_ids", "prompt_index", "counted"))
    within = np.arange(len(index)) - np.searchsorted(index, index)
    gates, norms = (fields[name].mean(1, dtype=np.float64) for name in ("gate", "written_norm"))
    raw_ids = dict(zip(*np.unique(canonical_map(handle), return_index=True), strict=True))  # the first of each

    def made(layer: int, gram: np.ndarray, first: int, count: int, means: tuple[float, float]) -> Ngram:
        start = first - len(gram) + 1
        raw = prompts[index[first]].encode()[fields["char_start"][start] : fields["char_end"][first]]
        texts = [token_text(handle, int(raw_ids[c])) for c in gram]
        return Ngram(
            layer=layer,
            order=len(gram),
            canonical_ids=tuple(map(int, gram)),
            texts=tuple(normalise(text) or text for text in texts),
            example=text_of(raw),
            count=count,
            mean_gate=means[0],
            mean_written_norm=means[1],
        )

    highest: list[Ngram] = []
    lowest: list[Ngram] = []
    for n, layer in enumerate(handle.engram_layers):
        for order in range(2, handle.model.config.engram_max_ngram_size + 1):
            at = np.flatnonzero(within >= order - 1)
            at = at[np.all([counted[at - back] for back in range(order)], axis=0)]
            grams = np.stack([canonical[at - back] for back in reversed(range(order))], axis=1)
            unique, first, member, counts = np.unique(
                grams, axis=0, return_index=True, return_inverse=True, return_counts=True
            )
            gate, norm = (np.bincount(member.ravel(), values[n, at], len(counts)) / counts for values in (gates, norms))
            enough = np.flatnonzero(counts >= min_count)
            rising = enough[np.argsort(gate[enough], kind="stable")]
            for chosen, into in ((rising[::-1], highest), (rising, lowest)):
                into += [
                    made(layer, unique[g], int(at[first[g]]), int(counts[g]), (float(gate[g]), float(norm[g])))
                    for g in chosen[:ranked]
                ]
    return tuple(highest), tuple(lowest)
