"""The text of a tuned-lens fit: documents drawn from files, the held-out ones kept apart, and their tokens."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engram_lab.models.data import documents, is_held_out
from engram_lab.models.errors import DataError
from engram_lab.models.handle import Handle

CHARACTERS = 8  # of a token, more than any tokenizer has on average: bounds what is kept of a long text


@dataclass(frozen=True)
class FitText:
    """Documents to fit on and held-out ones, by the same split as in training (models.data.is_held_out)."""

    names: tuple[str, ...]
    fit: tuple[str, ...]
    held_out: tuple[str, ...]


class _Draw:
    """Of a stream of documents those with the smallest digests, up to a number of characters."""

    def __init__(self, characters: int, seed: int) -> None:
        self.characters, self.seed, self.total = characters, seed, 0
        self.heap: list[tuple[int, str]] = []

    def add(self, text: str) -> None:
        digest = hashlib.sha256(f"{self.seed} {text}".encode(errors="surrogatepass")).digest()
        heapq.heappush(self.heap, (-int.from_bytes(digest[:8], "big"), text))
        self.total += len(text)
        while len(self.heap) > 1 and self.total - len(self.heap[0][1]) >= self.characters:
            self.total -= len(heapq.heappop(self.heap)[1])

    def drawn(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(text for _, text in sorted(self.heap, reverse=True)))


def read_text(
    paths: Sequence[Path], tokens: int, seed: int = 0, max_characters: int = 4000, held_out_tokens: int = 4096
) -> FitText:
    """Documents for so many tokens, drawn over all of the files, each cut to `max_characters`; DataError."""
    if not paths:
        raise DataError("No text to fit on: name files with --text.")
    fit, held_out = _Draw(CHARACTERS * tokens, seed), _Draw(CHARACTERS * held_out_tokens, seed)
    for text in documents(paths, None, max_characters):
        (held_out if is_held_out(text) else fit).add(text)
    return FitText(tuple(path.name for path in paths), fit.drawn(), held_out.drawn())


def windows_of(handle: Handle, texts: Iterable[str], length: int, tokens: int) -> list[list[int]]:
    """Sequences of at most `length` ids, up to `tokens` of them in all; DataError for ids that the model lacks."""
    found: list[list[int]] = []
    left = tokens
    for text in texts:
        ids = handle.tokenizer(text, truncation=False, verbose=False)["input_ids"]
        if ids and max(ids) >= handle.vocab_size:
            raise DataError(
                f"The tokenizer gives the id {max(ids)}, but {handle.name} has only {handle.vocab_size} rows: "
                "it is the tokenizer of another model."
            )
        for start in range(0, len(ids), length):
            window = ids[start : start + min(length, left)]
            if window:
                found.append(window)
            left -= len(window)
        if left <= 0:
            break
    return found


def line_digests(texts: Iterable[str]) -> np.ndarray:
    """int64 [line]: 8 bytes of the sha256 of each line that is not blank, stripped, sorted, each once."""
    lines = {line.strip() for text in texts for line in text.splitlines() if line.strip()}
    digests = [hashlib.sha256(line.encode(errors="surrogatepass")).digest()[:8] for line in lines]
    return np.unique(np.frombuffer(b"".join(digests), dtype="<i8").astype(np.int64))
