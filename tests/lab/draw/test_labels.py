"""Token labels: visible, literal, and exactly reversible."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from engram_lab.lab.draw import labels
from engram_lab.models.handle import Handle
from tests.full import examples
from tests.models import tiny

NASTY = [
    "naïve 東京 👍🏽",
    "the the the",
    "a<b<c <script>alert(1)</script>",
    "$5 and $6 _x_ **y** `z` :red[w] [u](v)",
    "tabs\tand\nnew\r\nlines, and   spaces",
    "· ⏎ ⇥ ␍ ⟨F0 9F⟩ ⟨U+200D⟩ ◌",
    "e\u0301 \u200d \u202e \u00a0 \ufffd \x00",
    "&amp; &lt; &#36;",
]


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece"])
def handle(request: pytest.FixtureRequest) -> Handle:
    tokenizer: PreTrainedTokenizerFast = (
        tiny.byte_level() if request.param == "byte_level" else tiny.sentencepiece(prefix=True)
    )
    return Handle(tiny.make("llama"), tokenizer, request.param)


def tokens(handle: Handle, text: str) -> list[labels.Token]:
    ids = handle.encode(text)
    pieces = handle.pieces(ids)
    return [labels.Token(i, p, handle.is_special(i)) for i, p in zip(ids, pieces, strict=True)]


@pytest.mark.parametrize("text", NASTY)
def test_labels_of_a_prompt_join_to_the_prompt(handle: Handle, text: str) -> None:
    if len(handle.encode(text)) <= handle.context:
        assert labels.gives_back(tokens(handle, text), text)
        assert not labels.gives_back(tokens(handle, text), text + "x")


@examples()
@given(st.binary(max_size=40))
def test_any_bytes_come_back(piece: bytes) -> None:
    shown = labels.label(piece)
    assert labels.spell(shown) == piece
    assert "\ufffd" not in shown and not re.search(r"\s", shown.replace(" ", "", shown.count("⟨") * 40))


@examples()
@given(st.lists(st.binary(min_size=1, max_size=6), max_size=8))
def test_joined_labels_spell_the_joined_pieces(pieces: list[bytes]) -> None:
    assert labels.spell("".join(map(labels.label, pieces))) == b"".join(pieces)


def test_labels_by_hand() -> None:
    assert labels.label(b" the") == "·the"
    assert labels.label(b"\n\t \r") == "⏎⇥·␍"
    assert labels.label("東".encode()[:2]) == "⟨E6 9D⟩"
    assert labels.label(b" \xf0\x9f") == "·⟨F0 9F⟩"
    assert labels.label("·".encode()) == "⟨U+00B7⟩", "a middle dot that is not a space"
    assert labels.label("\u200d".encode()) == "⟨U+200D⟩"
    assert labels.label("\u0301".encode()) == "◌\u0301"


def test_no_label_holds_a_replacement_character(handle: Handle) -> None:
    for text in NASTY:
        if len(handle.encode(text)) <= handle.context:
            assert not any("\ufffd" in token.label for token in tokens(handle, text))


def test_equal_tokens_stay_apart(handle: Handle) -> None:
    found = tokens(handle, "the the the")
    chips = labels.chips(found)
    assert chips.count('role="listitem"') == len(found) == len(handle.encode("the the the"))
    assert len(re.findall(r"position \d+ ", chips)) == len(found)


def test_chips_are_literal_and_say_their_id() -> None:
    chips = labels.chips([labels.Token(7, b"<script>"), labels.Token(1, b"<|bos|>", special=True)])
    assert "<script>" not in chips and "&lt;script&gt;" in chips
    assert "id 7" in chips and "special" in chips


def test_plotly_text_is_literal() -> None:
    """Plotly reads tags and entities, and hands what stands between dollars to MathJax."""
    text = "a<b<c <script> $5 and $6 &amp;"
    safe = labels.plotly(text)
    assert not re.search(r"[<>$]", safe)
    assert html.unescape(safe) == text


def test_markdown_text_is_literal() -> None:
    safe = labels.markdown("$5 and $6 _x_ **y** `z` :red[w] <b>")
    for sign in "$_*`:[]<>":
        assert re.search(rf"(?<!\\)\{sign}", safe) is None


def test_tokens_from_offsets() -> None:
    prompt = "a東"
    found = labels.tokens_of(prompt, [0, 5, 6, 7], [0, 0, 1, 3], [0, 1, 3, 4], ["<|bos|>", "a", "?", "?"])
    assert [token.special for token in found] == [True, False, False, False]
    assert [token.label for token in found] == ["<|bos|>", "a", "⟨E6 9D⟩", "⟨B1⟩"]
    assert labels.gives_back(found, prompt)


def test_short() -> None:
    assert labels.short("abcdef", 6) == "abcdef"
    assert labels.short("abcdefg", 6) == "abcde…"


def test_example_prompts_are_texts_of_our_own() -> None:
    """They are what the lens page opens with: each is more than one word and says why it is worth a look."""
    from engram_lab.lab.ask import texts

    assert all(len(e["prompt"].split()) > 1 and e["title"] and e["why"] for e in texts.examples())
    assert len(texts.held_out()) > 100
    assert Path(texts.TEXTS / texts.HELD_OUT).is_file()
