"""Canonical ids: raw token ids whose texts normalise alike share one id (tokenizer compression, arXiv 2601.07372)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Regex, normalizers

from engram_lab.models.errors import TokenizerMismatchError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"
# Keeps a lone space alive through the strip; a private-use character that no normal form touches.
_SENTINEL = "\ue000"

_normalizer = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        normalizers.Replace(Regex(r"^ $"), _SENTINEL),
        normalizers.Strip(),
        normalizers.Replace(_SENTINEL, " "),
    ]
)


def normalise(text: str) -> str:
    """NFKC, NFD, accents off, lower case, white space runs to one space, stripped (a lone space stays)."""
    return _normalizer.normalize_str(text)


def canonical_key(text: str, piece: str) -> str:
    """The key of a token with decoded `text`; undecodable bytes are told apart by their raw `piece`."""
    if REPLACEMENT in text:
        return piece
    return normalise(text) or text


def canonical_ids(keys: Iterable[str]) -> np.ndarray:
    """Canonical id [raw id] int64, given in first-seen order of the keys."""
    seen: dict[str, int] = {}
    return np.fromiter((seen.setdefault(key, len(seen)) for key in keys), dtype=np.int64)


def canonical_map(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Canonical id [raw id] int64 for every raw id in 0..len(tokenizer)-1."""
    pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    texts = (
        str(tokenizer.decode([i], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        for i in range(len(pieces))
    )
    return canonical_ids(canonical_key(text, piece) for text, piece in zip(texts, pieces, strict=True))


def map_sha256(canonical: np.ndarray) -> str:
    """Hex digest of a map, of its little-endian int64 bytes."""
    return hashlib.sha256(np.ascontiguousarray(canonical, dtype="<i8").tobytes()).hexdigest()


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hex digest of what decides the map: every id's raw piece, and the decoder."""
    pieces = "\x00".join(map(str, tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = repr(backend.decoder) if backend is not None else type(tokenizer).__name__
    return hashlib.sha256(f"{pieces}\x01{decoder}".encode()).hexdigest()


def check_map(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Fail unless `tokenizer` yields the map that `model` was trained with.

    Building a map takes tens of seconds on a 128k vocabulary, so a tokenizer that is known by its digest is not
    mapped again. Raises TokenizerMismatchError.
    """
    config = model.config
    if tokenizer_sha256(tokenizer) == config.engram_tokenizer_sha256:
        return
    canonical = canonical_map(tokenizer)
    size, digest = int(canonical.max()) + 1, map_sha256(canonical)
    if digest != config.engram_map_sha256:
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise TokenizerMismatchError(
            f"The tokenizer {name} yields the canonical map {digest[:12]} ({size} ids), but the memory was trained "
            f"with the map {str(config.engram_map_sha256)[:12]} ({config.engram_compressed_vocab_size} ids): use the "
            "tokenizer saved with the checkpoint."
        )
