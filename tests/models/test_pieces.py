"""Token bytes against the text they came from, for every kind of tokenizer."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engram_lab.models.errors import CheckpointError
from engram_lab.models.pieces import TokenBytes
from tests.models import tiny

TEXTS = [
    "naïve 東京 👍🏽",
    "  two spaces,\ta tab,\nnew lines\n\n and a trailing one ",
    "the the the",
    "a<b<c <script> $5 and $6 _x_",
    "\x00\x7f\xa0\xad\u200b é vs é",
]
KINDS = {
    "byte_level": tiny.byte_level(),
    "without_bos": tiny.byte_level(bos=False),
    "llama2": tiny.sentencepiece(prefix=True),
    "gemma": tiny.sentencepiece(prefix=False),
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_join_to_the_text(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]
    known = TokenBytes(tokenizer)
    ids = tokenizer(text)["input_ids"]
    pieces = known.join_ready(ids)
    assert b"".join(p for p, i in zip(pieces, ids, strict=True) if not known.is_special(i)) == text.encode()
    assert len(pieces) == len(ids)


def test_a_character_over_several_tokens_is_split_into_its_bytes() -> None:
    tokenizer = KINDS["byte_level"]
    ids = tokenizer("👍🏽", add_special_tokens=False)["input_ids"]
    pieces = TokenBytes(tokenizer).join_ready(ids)
    assert len(pieces) > 1 and any(p.decode(errors="replace") == "�" * len(p) for p in pieces)


def test_every_byte_has_its_token() -> None:
    for kind in ("byte_level", "gemma"):
        tokenizer = KINDS[kind]
        known = TokenBytes(tokenizer)
        found = {known.of(i) for i in range(len(tokenizer)) if not known.is_special(i)}
        assert {bytes([b]) for b in range(256)} <= found


def test_special_added_and_missing_tokens() -> None:
    tokenizer = tiny.byte_level()
    tokenizer.add_tokens(["    "])  # as GPT-NeoX has it: literal text, not in the byte alphabet
    known = TokenBytes(tokenizer)
    four = tokenizer.convert_tokens_to_ids("    ")
    assert known.of(four) == b"    " and not known.is_special(four)
    assert known.of(0) == b"<|bos|>" and known.is_special(0)
    beyond = len(tokenizer) + 3  # padding rows of a model
    assert known.of(beyond) == f"<no token {beyond}>".encode() and known.is_special(beyond)


def test_the_space_put_before_a_text_is_taken_off_only_there() -> None:
    known = TokenBytes(KINDS["llama2"])
    ids = KINDS["llama2"]("Paris the", add_special_tokens=False)["input_ids"]
    assert known.join_ready(ids) == [b"Paris", b" the"]
    assert [known.of(i) for i in ids] == [b" Paris", b" the"]
    assert not TokenBytes(KINDS["gemma"]).adds_space and not TokenBytes(KINDS["byte_level"]).adds_space


def test_metaspace_and_prefixed_byte_level() -> None:
    """The two other ways in which tokenizers say that they put a space first."""
    core = Tokenizer(models.BPE({"▁": 0, "a": 1, "▁a": 2}, [("▁", "a")]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    metaspace = PreTrainedTokenizerFast(tokenizer_object=core)
    ids = metaspace("a a")["input_ids"]
    assert TokenBytes(metaspace).join_ready(ids) == [b"a", b" a"]
    core = Tokenizer(models.BPE({"Ġ": 0, "a": 1, "Ġa": 2}, [("Ġ", "a")]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()
    prefixed = PreTrainedTokenizerFast(tokenizer_object=core)
    assert TokenBytes(prefixed).join_ready(prefixed("a a")["input_ids"]) == [b"a", b" a"]


def test_other_kinds_are_refused_with_the_reason() -> None:
    core = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    core.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match=r"decodes by WordPiece.*byte-level BPE"):
        TokenBytes(PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]"))
