"""Files of texts with entities, and the positions that stand for them, each against what a person would mark."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import numpy as np
import pytest
from tokenizers import normalizers

from engram_lab.models.errors import AlignmentError, DataError, LabError
from engram_lab.models.handle import Handle, open_model
from engram_lab.probes import points
from engram_lab.probes.points import Sentence, choose, joined, read_sentences, to_json_lines
from tests.models import tiny

BIO = """-DOCSTART- -X- O

The DT O
River NN B-place
Thames NN I-place
's POS O
source NN O
( ( O
near IN O
Kemble NN B-place
) ) O
. . O

Ada\tB-person
Lovelace\tI-person
met\tO
Babbage\tB-person
,\tO
"\tO
yes\tO
"\tO
.\tO
"""


def marked(sentence: Sentence) -> list[str]:
    return [sentence.text[start:end] for start, end in sentence.entities]


def test_a_bio_file_by_hand() -> None:
    first, second = read_sentences(BIO.encode(), "mine.bio")
    assert first.text == "The River Thames's source (near Kemble)."
    assert marked(first) == ["River Thames", "Kemble"]
    assert second.text == 'Ada Lovelace met Babbage, "yes".'
    assert marked(second) == ["Ada Lovelace", "Babbage"]


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, lambda raw: b"\xef\xbb\xbf" + raw])
def test_packed_files_and_windows_lines(pack) -> None:  # type: ignore[no-untyped-def]
    plain = read_sentences(BIO.encode(), "mine.bio")
    assert read_sentences(pack(BIO.replace("\n", "\r\n").encode()), "mine") == plain


@pytest.mark.parametrize(
    ("tags", "spans"),
    [
        ("O B-x I-x O", ["b c"]),
        ("B-x B-x I-x B-y", ["a", "b c", "d"]),
        ("I-x I-x I-y O", ["a b", "c"]),  # IOB1: I- begins one
        ("I-x B-x I-x I-x", ["a", "b c d"]),  # IOB1: B- only to part neighbours
        ("S-x B-x I-x E-x", ["a", "b c d"]),  # BIOES
        ("U-x B-x L-x L-x", ["a", "b c", "d"]),  # BILOU, with an L- that ends nothing
        ("B-x I-y I-x O", ["a b c"]),  # IOB2 with a slip in a type
        ("B I O I", ["a b", "d"]),  # no types
        ("E-x S-x S-x O", ["a", "b", "c"]),
        ("O O O O", []),
    ],
)
def test_tag_schemes(tags: str, spans: list[str]) -> None:
    assert marked(joined(["a", "b", "c", "d"], tags.split())) == spans


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ("Do n't stop ! it 's we 'll", "Don't stop! it's we'll"),
        ("`` Yes '' , she said : 10 % of $ 5", '"Yes", she said: 10% of $5'),
        ("a -LRB- b -RRB- c [ d ]", "a (b) c [d]"),
        ('" a " and " b "', '"a" and "b"'),
        ("“ a ” — b … c", "“a” — b… c"),
        ("1725-80 , A. B. / C", "1725-80, A. B. / C"),
    ],
)
def test_how_tokens_are_joined(tokens: str, text: str) -> None:
    parts = tokens.split()
    sentence = joined(parts, ["B-x"] * len(parts))
    assert sentence.text == text
    assert "".join(marked(sentence)) == text.replace(" ", ""), "the spans hold each token and nothing else"


def test_plain_and_json_files() -> None:
    plain = read_sentences(b"One line.\n\n  Another, with O at the end O\nThird\n", "x.txt")
    assert [s.text for s in plain] == ["One line.", "Another, with O at the end O", "Third"]
    assert not any(s.entities for s in plain)
    texts, spans = ["Zoë met Ada.", " two  spaces "], [[(0, 3), (8, 11)], []]
    again = read_sentences(to_json_lines(texts, spans).encode(), "x.jsonl")
    assert [s.text for s in again] == texts and [list(s.entities) for s in again] == spans
    assert marked(again[0]) == ["Zoë", "Ada"]
    assert to_json_lines(["a"], None) == '{"text": "a", "entities": []}\n'


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"\n \n", "holds no text"),
        (b"caf\xe9 O\n", "not UTF-8"),
        (lzma.compress(BIO.encode())[:-20], "damaged or cut short"),
        (gzip.compress(BIO.encode())[:-4], "damaged or cut short"),
        (b"\x1f\x8bnothing of the kind", "damaged"),
        ((BIO + "\nbroken\n").encode(), "Line 24 of f is no token with a tag"),
        (b'{"text": "a"}\n{"text": 5}\n', "Line 2 of f is no"),
        (b'{"text": "a", "entities": [[1]]}\n', "Line 1 of f is no"),
    ],
)
def test_bad_files_are_one_sentence(raw: bytes, says: str) -> None:
    with pytest.raises(DataError, match=says) as caught:
        read_sentences(raw, "f")
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_a_file_that_unpacks_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points, "MAX_BYTES", 2**20)
    for pack in (gzip.compress, lzma.compress):
        with pytest.raises(DataError, match="larger than 1 MB"):
            read_sentences(pack(b"a O\n" * 2**20), "f")


def chosen(a: Handle, b: Handle, texts: list[str], kind: str, entities: list | None = None) -> points.Chosen:
    ids = [[h.encode(text) for text in texts] for h in (a, b)]
    return choose([a, b], [texts, texts], ids, kind, entities)


def text_up_to(handle: Handle, text: str, pos: int) -> str:
    """What the tokens up to a position spell, by the tokenizer's own decoder."""
    return str(handle.tokenizer.decode(handle.encode(text)[: pos + 1], skip_special_tokens=True))


@pytest.fixture(scope="module")
def two() -> tuple[Handle, Handle]:
    """Tokenizers that share little: byte-level BPE with BOS, and SentencePiece's with <s>."""
    a = Handle(tiny.make("llama"), tiny.byte_level(), "bytes")
    b = Handle(tiny.make("llama", seed=1), tiny.sentencepiece(False), "pieces")
    return a, b


def test_entity_points_end_with_the_entity(two: tuple[Handle, Handle]) -> None:
    texts = ["the river Paris é is the rest", "Paris is the river Paris"]
    entities = [[(10, 15), (4, 17), (16, 17)], [(0, 5), (19, 24)]]  # of the first, two end together
    found = chosen(*two, texts, "entity", entities)
    assert found.sentence.tolist() == [0, 0, 1, 1] and found.dropped == 0
    ends = [texts[0][:15], texts[0][:17], texts[1][:5], texts[1]]
    for n, end in enumerate(ends):
        text = texts[found.sentence[n]]
        assert text_up_to(two[0], text, found.pos_a[n]) == end
        assert text_up_to(two[1], text, found.pos_b[n]) == end


def test_an_entity_inside_a_token_is_dropped_and_counted(two: tuple[Handle, Handle]) -> None:
    texts = ["the river Paris is"]
    inside = [(a, b) for a, b in [(0, 2), (10, 13)]]
    assert len(two[1].encode("the river Paris is")) < 12, "the and Paris are tokens of pieces"
    found = chosen(*two, texts, "entity", [[*inside, (10, 15)]])
    assert found.dropped == 2 and len(found.sentence) == 1
    with pytest.raises(LabError, match="No entity ends where a token of bytes and of pieces does"):
        chosen(*two, texts, "entity", [inside])


def test_all_points_are_those_that_match_and_no_start_token(two: tuple[Handle, Handle]) -> None:
    texts = ["the river Paris", "Paris is the rest"]
    found = chosen(*two, texts, "all")
    for n, text in enumerate(texts):
        at = found.sentence == n
        assert found.pos_a[at].min() > 0 and found.pos_b[at].min() > 0
        spelled = [{text_up_to(h, text, p) for p in range(1, len(h.encode(text)))} for h in two]
        assert {text_up_to(two[0], text, p) for p in found.pos_a[at]} == spelled[0] & spelled[1]
    same = chosen(two[0], two[0], texts, "all")
    assert len(same.sentence) == sum(len(two[0].encode(text)) - 1 for text in texts)
    assert np.array_equal(same.pos_a, same.pos_b)


def test_last_points_of_different_texts(two: tuple[Handle, Handle]) -> None:
    ending = tiny.byte_level()
    from tokenizers import processors

    ending.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A <|eos|>", special_tokens=[("<|bos|>", 0), ("<|eos|>", 1)]
    )
    b = Handle(tiny.make("llama"), ending, "ending")
    texts = [["the river", "Paris is"], ["é", "the sea the"]]
    ids = [[h.encode(t) for t in own] for h, own in zip((two[0], b), texts, strict=True)]
    found = choose([two[0], b], texts, ids, "last")
    assert found.sentence.tolist() == [0, 1]
    assert found.pos_a.tolist() == [len(own) - 1 for own in ids[0]]
    assert found.pos_b.tolist() == [len(own) - 1 for own in ids[1]], "the end that the tokenizer adds is left off"


def test_a_tokenizer_that_changes_the_text_has_no_entity_ends() -> None:
    changing = tiny.byte_level()
    changing.backend_tokenizer.normalizer = normalizers.Lowercase()
    lower = Handle(tiny.make("llama"), changing, "lower")
    with pytest.raises(AlignmentError, match="tokenizer of lower changes the text of sentence 1"):
        chosen(lower, lower, ["The river"], "entity", [[(4, 9)]])


def test_the_sentences_that_ship() -> None:
    """At least 300, of names of several tokens, whose ends are ends of tokens of the shipped models."""
    path = Path(points.__file__).parents[1] / "assets" / "texts" / "entities.bio"
    sentences = [s for s in read_sentences(path.read_bytes(), path.name) if s.entities]
    assert len(sentences) >= 300
    names = [name for s in sentences for name in marked(s)]
    assert sum(" " in name for name in names) > 100
    assert not any(name != name.strip() or "  " in s.text for s in sentences for name in marked(s))
    assert json.loads(to_json_lines([sentences[0].text], [sentences[0].entities]))["text"] == sentences[0].text
    handle = open_model("engram-mini")
    texts = [s.text for s in sentences]
    found = chosen(handle, handle, texts, "entity", [s.entities for s in sentences])
    ends = sum(len({end for _, end in s.entities}) for s in sentences)
    assert len(found.sentence) == ends - found.dropped and found.dropped < ends / 50
    handle.close()
