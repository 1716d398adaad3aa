"""Texts put together for one forward: of the same length, or padded at the end.

A model that has learnt no padding can still take what is behind a text: attention, hash and convolution look back only,
so it changes nothing before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def alike(lengths: Sequence[int | tuple[int, int]], most: int) -> list[list[int]]:
    """Numbers of texts in batches of one length (or pair of lengths), at most `most` tokens in each, but one text.

    Lengths come in the order in which they first stand, and texts of one length in theirs.
    """
    members: dict[int | tuple[int, int], list[int]] = {}
    for n, length in enumerate(lengths):
        members.setdefault(length, []).append(n)
    batches = []
    for length, texts in members.items():
        size = max(1, most // (max(length) if isinstance(length, tuple) else length))
        batches += [texts[n : n + size] for n in range(0, len(texts), size)]
    return batches


def by_length(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Numbers of texts in batches of like length, at most `most` tokens with the padding, but one text; short first."""
    batch: list[int] = []
    for n in sorted(range(len(lengths)), key=lambda n: (lengths[n], n)):
        if batch and lengths[n] * (len(batch) + 1) > most:
            yield batch
            batch = []
        batch.append(n)
    if batch:
        yield batch


def padded(texts: Sequence[Sequence[int]]) -> Tensor:
    """Token ids [text, pos] int64, with zeros behind the shorter ones."""
    longest = max(map(len, texts))
    return torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in texts])
