"""The exact bytes of each token, so that the labels of a prompt join back to the prompt.

Known kinds, told apart by the tokenizer's decoder: byte-level BPE (GPT-2, Llama 3, Qwen, GPT-NeoX, ours) and
sentencepiece with byte fallback (Llama 2, Mistral, Gemma), where a space is U+2581 and a lone byte <0xNN>.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from engram_lab.models.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPACE = "\u2581"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte in GPT-2's byte-level alphabet: printable bytes are themselves, others 256 + n."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _components(part: Any) -> Iterator[dict[str, Any]]:
    """The flat list of components of a `tokenizers` decoder or pre-tokenizer (None has none)."""
    state = json.loads(part.__getstate__()) if part is not None else {}
    yield from state.get("decoders") or state.get("pretokenizers") or [state]


class TokenBytes:
    """Token id -> bytes for one tokenizer; CheckpointError if the tokenizer is of a kind it cannot do."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise CheckpointError(
                f"The tokenizer {type(tokenizer).__name__} has no tokenizer.json form, so the bytes of its "
                "tokens cannot be told; use a checkpoint that has tokenizer.json."
            )
        decoders = list(_components(backend.decoder))
        kinds = {item.get("type") for item in decoders}
        self._byte_level = "ByteLevel" in kinds
        spaced = "Metaspace" in kinds or any(
            item.get("type") == "Replace" and item.get("pattern") == {"String": SPACE} for item in decoders
        )
        if not self._byte_level and not spaced:
            raise CheckpointError(
                f"The tokenizer {type(tokenizer).__name__} decodes by {', '.join(sorted(map(str, kinds)))}, "
                "and the exact bytes of a token are known only for byte-level BPE and for sentencepiece."
            )
        self._tokenizer = tokenizer
        self._added = tokenizer.added_tokens_decoder
        self._size = len(tokenizer)
        self._special = set(tokenizer.all_special_ids) | {i for i, token in self._added.items() if token.special}
        self._known: dict[int, bytes] = {}
        # Whether a space is put before the text that the text does not have.
        self.adds_space = (
            any(item.get("type") == "Strip" and item.get("start") for item in decoders)
            or any(item.get("type") == "Metaspace" and item.get("prepend_scheme") != "never" for item in decoders)
            or any(item.get("add_prefix_space") for item in _components(backend.pre_tokenizer))
        )

    def is_special(self, token_id: int) -> bool:
        """True for tokens that stand for no text: BOS and the like, and rows of the model without a token."""
        return token_id in self._special or not 0 <= token_id < self._size

    def of(self, token_id: int) -> bytes:
        """The bytes of one token by itself; a special token gives its name."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._read(token_id)
        return known

    def _read(self, token_id: int) -> bytes:
        if not 0 <= token_id < self._size:
            return f"<no token {token_id}>".encode()
        if token_id in self._added:
            return self._added[token_id].content.encode()
        piece: Any = self._tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:  # a gap in the vocabulary
            return f"<no token {token_id}>".encode()
        if self._byte_level:
            # As the decoder does: a piece with a character outside the alphabet is literal text.
            return bytes(_BYTE_OF[c] for c in piece) if all(c in _BYTE_OF for c in piece) else piece.encode()
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace(SPACE, " ").encode()

    def join_ready(self, token_ids: Sequence[int]) -> list[bytes]:
        """The bytes of each token of a whole text: as `of`, less a space that the tokenizer put first."""
        pieces = [self.of(i) for i in token_ids]
        if self.adds_space:
            first = next((n for n, i in enumerate(token_ids) if not self.is_special(i)), None)
            if first is not None:
                pieces[first] = pieces[first].removeprefix(b" ")
        return pieces
