"""N-gram hashing into prime-sized tables (arXiv 2601.07372, section on sparse retrieval).

Axes: batch, pos, order (n = 2..N), head. A layer reads (N-1)*K rows per position; its columns run order first,
then head. All arithmetic is int64; valid canonical ids never overflow it (`layer_multipliers`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

LAYER_SEED_STRIDE = 10007
INT64_MAX = 2**63 - 1

# Witnesses that make Miller-Rabin exact below 3.3e24 (Sorenson and Webster, 2015).
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def is_prime(n: int) -> bool:
    """Deterministic Miller-Rabin, exact for every n below 3.3e24."""
    if n < 2:
        return False
    for p in _WITNESSES:
        if n % p == 0:
            return n == p
    d, s = n - 1, 0
    while d % 2 == 0:
        d, s = d // 2, s + 1
    for a in _WITNESSES:
        x = pow(a, d, n)
        if x in (1, n - 1):
            continue
        for _ in range(s - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True


def rows_per_order(engram_vocab_size: int | Sequence[int], max_ngram: int) -> list[int]:
    """The wished number of rows a head for n = 2..max_ngram; one int stands for all orders."""
    if isinstance(engram_vocab_size, int):
        return [engram_vocab_size] * (max_ngram - 1)
    if len(engram_vocab_size) != max_ngram - 1:
        raise ValueError(
            f"engram_vocab_size has {len(engram_vocab_size)} entries, but orders 2..{max_ngram} need {max_ngram - 1}."
        )
    return list(engram_vocab_size)


def table_primes(layer_ids: Sequence[int], max_ngram: int, heads: int, sizes: Sequence[int]) -> list[list[list[int]]]:
    """Head sizes [layer][order][head]: ever the next prime that no head of any layer has yet."""
    seen: set[int] = set()
    primes = []
    for _ in layer_ids:
        layer = []
        for size in sizes[: max_ngram - 1]:
            row, start = [], size - 1
            for _ in range(heads):
                start += 1
                while start in seen or not is_prime(start):
                    start += 1
                seen.add(start)
                row.append(start)
            layer.append(row)
        primes.append(layer)
    return primes


def layer_multipliers(layer_id: int, max_ngram: int, compressed_vocab_size: int, seed: int) -> np.ndarray:
    """Odd int64 multipliers [max_ngram], so small that id * multiplier stays below 2**63 for every canonical id."""
    half = max(1, INT64_MAX // compressed_vocab_size // 2)
    rng = np.random.default_rng(seed + LAYER_SEED_STRIDE * layer_id)
    return rng.integers(0, half, size=(max_ngram,), dtype=np.int64) * 2 + 1


def ngram_mixes(lookback: Tensor, multipliers: Tensor) -> Tensor:
    """Mixes [batch, pos, order] of the ids `lookback` [batch, pos, back] (back = 0 is the position itself)."""
    terms = lookback * multipliers
    mix = terms[..., 0]
    mixes = []
    for n in range(1, terms.shape[-1]):
        mix = mix ^ terms[..., n]
        mixes.append(mix)
    return torch.stack(mixes, dim=-1)


def shift_right(ids: Tensor, pad: int, max_ngram: int) -> Tensor:
    """Lookback [batch, pos, back] of one unbroken document `ids` [batch, pos]; missing history is `pad`."""
    padded = nn.functional.pad(ids, (max_ngram - 1, 0), value=pad)
    length = ids.shape[1]
    return torch.stack([padded[:, max_ngram - 1 - back :][:, :length] for back in range(max_ngram)], dim=-1)


class NgramHash(nn.Module):
    """The hash of one memory layer: lookback of canonical ids to row ids of the layer's table."""

    multipliers: Tensor
    primes: Tensor
    offsets: Tensor

    def __init__(self, multipliers: np.ndarray, primes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.n_heads = len(primes[0])
        self._constants = (
            np.asarray(multipliers, dtype=np.int64),
            np.asarray(primes, dtype=np.int64).reshape(-1),
        )
        self.num_rows = int(self._constants[1].sum())
        for name, value in self.constants().items():
            self.register_buffer(name, torch.from_numpy(value), persistent=False)

    def constants(self) -> dict[str, np.ndarray]:
        """multipliers [back], primes and offsets [order*head]: derived from the configuration, never stored."""
        multipliers, primes = self._constants
        return {"multipliers": multipliers, "primes": primes, "offsets": np.cumsum(primes) - primes}

    def forward(self, lookback: Tensor) -> Tensor:
        """Row ids [batch, pos, order*head] from canonical ids [batch, pos, back]; int64, floor modulo."""
        mixes = ngram_mixes(lookback, self.multipliers)
        hashes = torch.remainder(mixes.repeat_interleave(self.n_heads, dim=-1), self.primes)
        return hashes + self.offsets
