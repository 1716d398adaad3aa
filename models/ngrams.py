"""Which n-grams a text holds, which rows they address, and what hashing them evenly would give.

Axes: batch, pos, back (0 is the token itself), order (n = 2..N), head, gram (the distinct n-grams of one order),
row (of a layer's whole table, in its order). Ids are canonical. What a token looks back to, and its rows, come from
the model's own functions, so packed documents and the start of a text are treated as in a forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engram_lab.models.canonical import canonical_key
from engram_lab.models.engram import MemoryStack
from engram_lab.models.handle import Handle
from engram_lab.models.hashing import INT64_MAX, NgramHash, ngram_mixes
from engram_lab.models.tables import memories

Batch = tuple[Tensor, Tensor]  # ids and positions within the document, each [batch, pos]
CHUNK = 1 << 18  # tokens hashed at a time: bounds the memory beside the counts
TEXTS_AT_ONCE = 512
# Counts wait unmerged until there are so many, or as many as there are merged ones: linear time overall.
PENDING = 1 << 20


@dataclass(frozen=True)
class Ngrams:
    """The distinct n-grams of one order: ids [gram, back] int64 and how often each occurs, counts [gram] int64."""

    ids: np.ndarray
    counts: np.ndarray

    @property
    def order(self) -> int:
        return self.ids.shape[1]

    def __len__(self) -> int:
        return len(self.counts)


class NgramCounter:
    """Counts distinct n-grams of orders 2..N while the text goes by; memory grows with them, not with the text."""

    def __init__(self, max_ngram: int, compressed_vocab_size: int) -> None:
        self.tokens = 0
        self._base, self._n = compressed_vocab_size, max_ngram
        self._per_word = 1  # how many ids one int64 holds
        while self._per_word < max_ngram and self._base ** (self._per_word + 1) <= INT64_MAX:
            self._per_word += 1
        # [order]: (packed ids [word, gram], counts [gram]) of all that is merged, and of what waits
        words = [-(-n // self._per_word) for n in range(2, max_ngram + 1)]
        self._merged = [(np.empty((w, 0), np.int64), np.empty(0, np.int64)) for w in words]
        self._waiting: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in words]

    def add(self, lookback: Tensor) -> None:
        """Take in the lookback [..., back] of some positions."""
        ids = lookback.reshape(-1, self._n).cpu().numpy()
        self.tokens += len(ids)
        for k in range(self._n - 1):
            self._waiting[k].append(_distinct(self._pack(ids[:, : k + 2]), np.ones(len(ids), np.int64)))
            if sum(len(counts) for _, counts in self._waiting[k]) > max(PENDING, len(self._merged[k][1])):
                self._merge(k)

    def ngrams(self) -> list[Ngrams]:
        """What was counted, one entry an order."""
        for k in range(self._n - 1):
            self._merge(k)
        return [Ngrams(self._unpack(words, k + 2), counts) for k, (words, counts) in enumerate(self._merged)]

    def _merge(self, k: int) -> None:
        parts = [self._merged[k], *self._waiting[k]]
        self._waiting[k] = []
        words, counts = (np.concatenate(part, axis=-1) for part in zip(*parts, strict=True))
        self._merged[k] = _distinct(words, counts)

    def _pack(self, ids: np.ndarray) -> np.ndarray:
        """[word, gram] of ids [gram, back]: `_per_word` ids as the digits of one int64."""
        powers = self._base ** np.arange(self._per_word, dtype=np.int64)
        parts = (ids[:, start : start + self._per_word] for start in range(0, ids.shape[1], self._per_word))
        return np.stack([part @ powers[: part.shape[1]] for part in parts])

    def _unpack(self, words: np.ndarray, order: int) -> np.ndarray:
        ids = np.empty((words.shape[1], order), np.int64)
        for back in range(order):
            word, digit = divmod(back, self._per_word)
            ids[:, back] = words[word] // self._base**digit % self._base
        return ids


def _distinct(words: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct columns of words [word, gram], sorted, with the counts of equals added."""
    if not len(counts):
        return words, counts
    order = np.argsort(words[0]) if len(words) == 1 else np.lexsort(words)
    words = words[:, order]
    first = np.concatenate([[True], (words[:, 1:] != words[:, :-1]).any(axis=0)])
    return words[:, first], np.add.reduceat(counts[order], np.flatnonzero(first))


def engram_model(handle: Handle) -> MemoryStack:
    """The model below the head; LabError if it has no memory."""
    memories(handle)
    model = handle.model.base_model
    assert isinstance(model, MemoryStack)
    return model


def lookbacks(handle: Handle, ids: Tensor, positions: Tensor | None = None) -> Tensor:
    """Canonical ids [batch, pos, back] that ids [batch, pos] are hashed with, on the CPU.

    `positions` count within each document, as in a packed forward; without them a row is one document.
    """
    with handle.running():
        places = None if positions is None else positions.to(handle.device)
        lookback, _ = engram_model(handle).history(ids.to(handle.device), None, places, None)
        return lookback.cpu()


def packed(handle: Handle, texts: Iterable[str], tokens: int | None = None) -> Iterator[Batch]:
    """The texts as one-row batches of about CHUNK tokens, each text a document led by the start token.

    Stops after `tokens` tokens, in the middle of a document if need be.
    """
    left = math.inf if tokens is None else tokens
    documents: list[list[int]] = []

    def batch() -> Batch:
        ids = torch.tensor([i for document in documents for i in document])
        return ids[None], torch.cat([torch.arange(len(document)) for document in documents])[None]

    held = 0
    for some in _groups(texts, TEXTS_AT_ONCE):
        for document in handle.tokenizer(some, truncation=False, verbose=False)["input_ids"]:
            document = document[: int(min(left, len(document)))]
            if document:
                documents.append(document)
                held, left = held + len(document), left - len(document)
            if held >= CHUNK or (documents and not left):
                yield batch()
                documents, held = [], 0
            if not left:
                return
    if documents:
        yield batch()


def _groups(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    group: list[str] = []
    for text in texts:
        group.append(text)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def count_ngrams(
    handle: Handle, batches: Iterable[Batch], progress: Callable[[int], None] | None = None
) -> tuple[list[Ngrams], int]:
    """(distinct n-grams of each order, tokens) of the batches; `progress` is told the tokens after each of them."""
    config = engram_model(handle).config
    counter = NgramCounter(config.engram_max_ngram_size, config.engram_compressed_vocab_size)
    for ids, positions in batches:
        counter.add(lookbacks(handle, ids, positions))
        if progress is not None:
            progress(counter.tokens)
    return counter.ngrams(), counter.tokens


def mixes_of(hash_: NgramHash, grams: Ngrams) -> np.ndarray:
    """The mix [gram] int64 of each n-gram in one layer; its row in a head of `prime` rows is mix % prime."""
    multipliers = torch.from_numpy(hash_.constants()["multipliers"][: grams.order])
    parts = torch.from_numpy(grams.ids).split(CHUNK)
    return torch.cat([ngram_mixes(part, multipliers)[:, -1] for part in parts]).numpy()


def head_sizes(hash_: NgramHash) -> np.ndarray:
    """Rows of each head [order, head]."""
    return hash_.constants()["primes"].reshape(-1, hash_.n_heads)


def row_counts(hash_: NgramHash, grams: Sequence[Ngrams]) -> tuple[np.ndarray, np.ndarray]:
    """(how often each row is read, how many distinct n-grams read it), each [row] int64, for n-grams [order]."""
    hits, distinct = [], []
    for primes, own in zip(head_sizes(hash_), grams, strict=True):
        mixes = mixes_of(hash_, own)
        for prime in primes.tolist():
            rows = mixes % prime
            # Sums of integers in float64, exact below 2**53 tokens.
            hits.append(np.bincount(rows, weights=own.counts, minlength=prime).astype(np.int64))
            distinct.append(np.bincount(rows, minlength=prime))
    return np.concatenate(hits), np.concatenate(distinct)


def expected_coverage(grams: int, rows: int) -> tuple[float, float]:
    """(mean, standard deviation) of the share of rows that are hit when each n-gram draws one of `rows` evenly.

    With a = (1 - 1/m)^n the mean is 1 - a, and the number of empty rows has the variance
    m a (1 - m a) + m (m - 1) (1 - 2/m)^n.
    """
    alone = _power(rows, grams)
    # (1 - 2/m) / (1 - 1/m)^2 = 1 - 1/(m - 1)^2, which keeps the difference of two large numbers out of it.
    both = alone * alone * math.exp(_pair_log(rows, grams))
    spread = rows * alone - rows * both + rows**2 * alone**2 * math.expm1(_pair_log(rows, grams))
    return 1 - alone, math.sqrt(max(spread, 0)) / rows


def expected_collisions(grams: int, rows: int) -> tuple[float, float]:
    """(mean, standard deviation) of the share of n-grams that share their row, if each draws one of `rows` evenly.

    The mean is 1 - (1 - 1/m)^(n-1); with S n-grams alone in their row, E S(S-1) = n (n-1) (1 - 1/m) (1 - 2/m)^(n-2).
    """
    if grams < 2:
        return 0.0, 0.0
    alone = grams * _power(rows, grams - 1)
    ratio = math.log1p(-1 / grams) + _pair_log(rows, grams - 2) - math.log1p(-1 / rows)
    spread = alone + alone**2 * math.expm1(ratio)
    return 1 - alone / grams, math.sqrt(max(spread, 0)) / grams


def expected_spread(grams: int, rows: int) -> tuple[float, float]:
    """(mean, standard deviation) of `load_spread` under even hashing: Pearson's statistic over its degrees."""
    if grams < 1:
        return 1.0, 0.0
    return 1.0, math.sqrt(2 * (1 - 1 / grams) / (rows - 1))


def load_spread(loads: np.ndarray) -> float:
    """Variance of the loads [row] of one head over their mean: 1 where n-grams fall evenly, more where they crowd."""
    mean = loads.mean()
    return float(((loads - mean) ** 2).sum() / mean / (len(loads) - 1)) if mean else 1.0


def _power(rows: int, grams: int) -> float:
    """(1 - 1/rows)^grams."""
    return math.exp(grams * math.log1p(-1 / rows))


def _pair_log(rows: int, grams: int) -> float:
    """grams * log((1 - 2/rows) / (1 - 1/rows)^2)."""
    if not grams:
        return 0.0
    return grams * math.log1p(-1 / (rows - 1) ** 2) if rows > 2 else -math.inf


def canonical_texts(handle: Handle, ids: Iterable[int]) -> dict[int, str]:
    """The text that stands for each canonical id: what its tokens have in common after normalising."""
    firsts = dict(zip(*(part.tolist() for part in first_raw_ids(handle)), strict=True))
    known = len(handle.tokenizer)
    found = {}
    for canonical in set(ids):
        raw = firsts[canonical]
        if raw >= known:  # a row of the model without a token
            found[canonical] = handle.pieces([raw], whole=False)[0].decode()
            continue
        text = handle.tokenizer.decode([raw], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        found[canonical] = canonical_key(str(text), str(handle.tokenizer.convert_ids_to_tokens(raw)))
    return found


def first_raw_ids(handle: Handle) -> tuple[np.ndarray, np.ndarray]:
    """(canonical ids, the lowest raw id of each)."""
    return np.unique(engram_model(handle).canonical_ids.cpu().numpy(), return_index=True)


@dataclass(frozen=True)
class HashSteps:
    """One layer's hash, step by step: terms [pos, back] = id * multiplier, mixes [pos, order] their running XOR,
    places [pos, order, head] = mix mod rows of the head, rows [pos, order, head] = place + offset of the head."""

    terms: Tensor
    mixes: Tensor
    places: Tensor
    rows: Tensor


def hash_steps(hash_: NgramHash, lookback: Tensor) -> HashSteps:
    """The steps for a lookback [pos, back] on the CPU."""
    constants = {name: torch.from_numpy(value) for name, value in hash_.constants().items()}
    # Not called as a module: a trace of the model, in another thread, would take it for a part of its own forward.
    rows = NgramHash.forward(hash_, lookback[None].to(hash_.primes.device))[0].cpu()
    shape = (-1, hash_.n_heads)
    return HashSteps(
        terms=lookback * constants["multipliers"],
        mixes=ngram_mixes(lookback, constants["multipliers"]),
        places=(rows - constants["offsets"]).unflatten(-1, shape),
        rows=rows.unflatten(-1, shape),
    )
