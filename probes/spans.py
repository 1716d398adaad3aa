"""Where tokens lie in a prompt's text, which positions of two models stand at the same text, and tokens as text.

Axes: pos (the tokens that the model got). A place in a text is a number of bytes of its UTF-8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engram_lab.models.errors import AlignmentError
from engram_lab.models.handle import Handle
from engram_lab.probes.lens_result import Alignment


def text_of(piece: bytes) -> str:
    """The text of a token's bytes; a byte that is no whole character as \\xNN."""
    return piece.decode(errors="backslashreplace")


def texts_of(pieces: Sequence[bytes]) -> tuple[str, ...]:
    """`text_of` each piece."""
    return tuple(map(text_of, pieces))


def token_text(handle: Handle, token_id: int) -> str:
    """The text of a token by its id, as it stands in a text: a leading space stays."""
    return text_of(handle.pieces([token_id], whole=False)[0])


@dataclass(frozen=True)
class Spans:
    """Where the tokens of one prompt lie in it."""

    pieces: list[bytes]  # [pos] what each token spells
    start: np.ndarray  # [pos] int64, bytes
    end: np.ndarray  # [pos] int64, bytes, behind the token's last
    counted: np.ndarray  # [pos] bool: all but a special token that leads the prompt
    lossless: bool  # whether the tokens spell the prompt


def spans_of(handle: Handle, prompt: str, ids: Sequence[int]) -> Spans:
    """The places of the token ids [pos] that the handle made of a prompt.

    Where the tokenizer changes the text, and the spans are not lossless, ends go no further than the text.
    """
    pieces, text = handle.pieces(ids), prompt.encode()
    special = [handle.is_special(i) for i in ids]
    counted = np.ones(len(ids), dtype=bool)
    counted[0] = len(ids) == 1 or not special[0]
    # A special token is no part of the text, unless its name was typed: behind the leading one, or at once.
    for typed_from in (len(ids), 1, 0):
        spelled = [b"" if special[n] and n < typed_from else piece for n, piece in enumerate(pieces)]
        if lossless := b"".join(spelled) == text:
            break
    else:
        spelled = [b"" if special[n] else piece for n, piece in enumerate(pieces)]
    end = np.minimum(np.cumsum([len(piece) for piece in spelled]), len(text)).astype(np.int64)
    return Spans(pieces, np.concatenate([[0], end[:-1]]).astype(np.int64), end, counted, lossless)


def align(
    handles: Sequence[Handle], ids: Sequence[Sequence[Sequence[int]]], spans: Sequence[Sequence[Spans]]
) -> Alignment:
    """The positions of two models behind which the same text lies, counted through all prompts, as pairs.

    ids [model][prompt][pos] and spans [model][prompt]. Prompts with the same ids are matched position by position,
    others by where their tokens end. AlignmentError if only the prompts' ends match, or a tokenizer changes the text.
    """
    pairs: list[tuple[int, int]] = []
    offset_a = offset_b = inner = 0
    for n, (ids_a, ids_b, a, b) in enumerate(zip(*ids, *spans, strict=True)):
        if ids_a == ids_b and a.pieces == b.pieces:
            matched = [(i, i) for i in range(len(ids_a))]
        else:
            for handle, where in zip(handles, (a, b), strict=True):
                if not where.lossless:
                    raise AlignmentError(
                        f"{handles[0].name} and {handles[1].name} have different tokenizers, and that of "
                        f"{handle.name} changes the text of prompt {n + 1}, so their positions cannot be "
                        "matched by text: compare models whose tokenizers keep it."
                    )
            behind = {int(end): i for i, end in enumerate(b.end)}  # the last token that ends there
            ends = {int(end): i for i, end in enumerate(a.end)}
            matched = [(i, behind[end]) for end, i in ends.items() if end in behind]
        last = (len(ids_a) - 1, len(ids_b) - 1)
        inner += sum(a.counted[i] and b.counted[j] and (i, j) != last for i, j in matched)
        inner += a.counted.sum() == 1 or b.counted.sum() == 1  # there is no more to match
        pairs += [(offset_a + i, offset_b + j) for i, j in matched]
        offset_a, offset_b = offset_a + len(ids_a), offset_b + len(ids_b)
    if not inner:
        raise AlignmentError(
            f"The tokens of {handles[0].name} and {handles[1].name} meet only at the end of the text, "
            "so no positions can be compared: use models whose tokenizers are more alike."
        )
    pos_a, pos_b = np.array(pairs, dtype=np.int64).T
    return Alignment(pos_a.copy(), pos_b.copy())
