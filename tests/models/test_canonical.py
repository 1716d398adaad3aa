"""Canonical ids: the golden vocabulary, a trained byte-level BPE, and the check at load."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engram_lab.models.canonical import canonical_ids, canonical_key, canonical_map, check_map, map_sha256, normalise
from engram_lab.models.data import train_tokenizer
from engram_lab.models.engram import EngramConfig, EngramForCausalLM
from engram_lab.models.errors import TokenizerMismatchError

ROWS = json.loads((Path(__file__).parent / "golden_engram.json").read_text())["D_canonical_ids"]["rows"]
SIZE = 285
ENGLISH = ["The cat saw the CAT and The Cat sat, cat and cat.", "A café, THE CAFE and Café at the cafe."] * 9
OTHER = ["Der Hund und der Mond, DER HUND und Mond.", "Schöne Schuhe und schöne Hüte, rund und bunt."] * 9


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(ENGLISH, SIZE)


def model_of(tokenizer: PreTrainedTokenizerFast) -> EngramForCausalLM:
    config = EngramConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, engram_layer_ids=[0], engram_vocab_size=20,
        engram_n_heads=1, engram_head_dim=4,
    )  # fmt: skip
    config.set_tokenizer(tokenizer)
    return EngramForCausalLM(config)


def plain_key(text: str, piece: str) -> str:
    """The key from the specification, by the standard library alone."""
    if "\ufffd" in text:
        return piece
    decomposed = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    bare = "".join(c for c in decomposed if unicodedata.category(c) != "Mn").lower()
    spaced = re.sub(r"[ \t\r\n]+", " ", bare)
    return (" " if spaced == " " else spaced.strip()) or text


def test_golden_keys() -> None:
    for row in ROWS:
        assert normalise(row["text"]) == row["norm"], row
        assert canonical_key(row["text"], "piece") == row["key"], row
    found = canonical_ids(row["key"] for row in ROWS)
    assert found.dtype == np.int64
    assert found.tolist() == [row["canon"] for row in ROWS]


def test_an_undecodable_text_keeps_its_raw_piece() -> None:
    assert canonical_key("\ufffd", "Ã") == "Ã"
    assert canonical_key(" A\ufffd", "ĠAÃ") == "ĠAÃ"


def test_map_of_a_byte_level_bpe(tokenizer: PreTrainedTokenizerFast) -> None:
    canonical = canonical_map(tokenizer)
    assert canonical.dtype == np.int64
    assert canonical.shape == (len(tokenizer),)
    pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    keys = [plain_key(tokenizer.decode([i]), piece) for i, piece in enumerate(pieces)]
    first_seen = list(dict.fromkeys(keys))
    assert canonical.tolist() == [first_seen.index(key) for key in keys]
    assert canonical.max() + 1 == len(first_seen) < len(tokenizer)
    # First-seen order: a new id is always the next one.
    assert (canonical <= np.maximum.accumulate(np.r_[-1, canonical[:-1]]) + 1).all()


def test_cases_and_leading_spaces_share_an_id(tokenizer: PreTrainedTokenizerFast) -> None:
    canonical = canonical_map(tokenizer)
    vocabulary = tokenizer.get_vocab()
    forms = [vocabulary[piece] for piece in ("Ġcat", "ĠCat", "cat") if piece in vocabulary]
    assert len(forms) > 1
    assert len({int(canonical[i]) for i in forms}) == 1
    assert canonical[vocabulary["a"]] == canonical[vocabulary["A"]] != canonical[vocabulary["b"]]


def test_partial_bytes_keep_apart(tokenizer: PreTrainedTokenizerFast) -> None:
    partial = [i for i in range(len(tokenizer)) if tokenizer.decode([i]) == "\ufffd"]
    assert len(partial) >= 128  # every byte from 0x80 on is undecodable alone
    assert len(set(canonical_map(tokenizer)[partial])) == len(partial)


def test_the_own_tokenizer_passes(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = model_of(tokenizer)
    check_map(model, tokenizer)
    tokenizer.save_pretrained(tmp_path)
    check_map(model, AutoTokenizer.from_pretrained(tmp_path))
    model.config.engram_tokenizer_sha256 = ""  # an unknown digest: the map itself decides
    check_map(model, tokenizer)


def test_another_tokenizer_of_the_same_size_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    other = train_tokenizer(OTHER, SIZE)
    assert len(other) == len(tokenizer)
    digests = [map_sha256(canonical_map(t))[:12] for t in (other, tokenizer)]
    assert digests[0] != digests[1]
    with pytest.raises(TokenizerMismatchError, match=f"{digests[0]}.*{digests[1]}"):
        check_map(model_of(tokenizer), other)


def test_the_digest_of_a_map_is_that_of_its_order_and_width() -> None:
    expected = hashlib.sha256(b"".join(i.to_bytes(8, "little") for i in (0, 1, 0))).hexdigest()
    assert map_sha256(np.array([0, 1, 0])) == map_sha256(np.array([0, 1, 0], dtype=np.int32)) == expected
    assert map_sha256(np.array([0, 0, 1])) != expected
