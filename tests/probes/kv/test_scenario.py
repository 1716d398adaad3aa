"""Scenarios as tokens: positions of the field, merges over its edge, lengths, answers, chat templates."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engram_lab.models.errors import AlignmentError, DataError, PromptError, TargetError
from engram_lab.models.handle import Handle
from engram_lab.probes.kv.scenario import Pair, Scenario, answer_ids, prepare, prompt_ids
from tests.models import tiny

RIVER = Scenario("The {field} runs past, and Tokyo is the old", "river", "mill", "sea", " France", id="river")
CHAT = "{% for m in messages %}<|eos|>{{ m.role }}\n{{ m.content | trim }}\n{% endfor %}<|eos|>bot{{ '\\n' }}"


@pytest.fixture(scope="module")
def handle() -> Handle:
    return Handle(tiny.make("llama"), tiny.byte_level(), "tiny")


def changed(**fields: Any) -> Scenario:
    return dataclasses.replace(RIVER, **fields)


def test_positions_of_the_field_and_what_is_behind_it(handle: Handle) -> None:
    pair = prepare(handle, RIVER)
    assert pair.text_old == "The river runs past, and Tokyo is the old"
    assert list(pair.ids_old) == handle.tokenizer(pair.text_old)["input_ids"]
    assert list(pair.ids_new) == handle.tokenizer(pair.text_new)["input_ids"]
    assert pair.token_texts_old[:4] == ("<|bos|>", "The", " river", " runs")
    assert pair.field == (2,) and pair.token_texts_new[2] == " mill"
    assert pair.downstream == tuple(range(3, pair.n_tokens - 1)) and pair.n_editable == pair.n_tokens - 1
    assert [n for n, (a, b) in enumerate(zip(pair.ids_old, pair.ids_new, strict=True)) if a != b] == [2]
    assert not pair.extended and not pair.split
    assert pair.text_new.encode()[pair.char_start_new[2] : pair.char_end_new[2]] == b" mill"
    # A space is put before the first answer, the second has its own.
    ids = [handle.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (" sea", " France")]
    assert pair.answer_ids == (ids[0][0], ids[1][0]) and pair.answer_texts == (" sea", " France")
    assert Pair.from_dict(pair.to_dict()) == pair and Scenario.from_dict(RIVER.to_dict()) == RIVER


def test_a_value_that_both_begin_alike_is_all_in_the_field(handle: Handle) -> None:
    pair = prepare(handle, changed(old="old river", new="old mill"))
    assert [pair.token_texts_old[p] for p in pair.field] == [" old", " river"]


def test_a_merge_over_the_edge_extends_the_field() -> None:
    vocab = {char: n for n, char in enumerate("abnxyzĠ.")} | {"ny": 8, "yz": 9, "Ġx": 10}
    core = Tokenizer(models.BPE(vocab, [("n", "y"), ("y", "z"), ("Ġ", "x")]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    handle = Handle(tiny.make("llama"), PreTrainedTokenizerFast(tokenizer_object=core), "merges")
    pair = prepare(handle, Scenario("b{field}yz xx.", "a", "n", " x", " b"))
    assert pair.token_texts_old[:4] == ("b", "a", "yz", " x") and pair.token_texts_new[:4] == ("b", "ny", "z", " x")
    assert pair.field == (1, 2) and pair.extended and not pair.split


def test_values_of_different_length_are_refused_or_split(handle: Handle) -> None:
    longer = changed(old="river", new="xenon")
    with pytest.raises(AlignmentError, match=r"1 \( river\) and \d \( .*\|.*\): choose values of equal length"):
        prepare(handle, longer)
    pair = prepare(handle, longer, "split")
    assert pair.split and len(pair.ids_old) == len(pair.ids_new)
    assert list(pair.ids_new) == handle.tokenizer(pair.text_new)["input_ids"], "the longer one stays as it was"
    assert len(pair.field) == len(pair.ids_new) - len(handle.tokenizer(pair.text_old)["input_ids"]) + 1
    assert "".join(pair.token_texts_old[1:]) == pair.text_old and "".join(pair.token_texts_new[1:]) == pair.text_new
    assert "".join(pair.token_texts_old[p] for p in pair.field) == " river"
    with pytest.raises(AlignmentError, match="no way"):
        prepare(handle, longer, "pad")


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"template": "The old"}, DataError, "0 times"),
        ({"template": "{field} and {field} old"}, DataError, "2 times"),
        ({"new": "river"}, DataError, "two different values"),
        ({"old": ""}, DataError, "two different values"),
        ({"answer_old": " "}, DataError, "two different answers"),
    ],
)
def test_what_is_no_scenario(fields: dict[str, Any], error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        changed(**fields)


def test_what_cannot_be_asked_of_a_model(handle: Handle) -> None:
    with pytest.raises(AlignmentError, match="at the end of the prompt"):
        prepare(handle, changed(template="Tokyo is the {field}"))
    with pytest.raises(TargetError, match="begin with the same token"):
        prepare(handle, changed(answer_old="the river", answer_new="the mill"))
    with pytest.raises(TargetError, match="merges the answer"):
        answer_ids(handle, changed(chat=True), "into th", handle.encode("into th"), "e")
    with pytest.raises(PromptError, match="no chat template"):
        prepare(handle, changed(chat=True))
    with pytest.raises(PromptError, match="tokens long"):
        prepare(handle, changed(template="The {field} " + "the " * 99))


def test_an_answer_gets_its_space_only_behind_a_word(handle: Handle) -> None:
    def texts(prompt: str, answer: str) -> str:
        ids = answer_ids(handle, RIVER, prompt, handle.encode(prompt), answer)
        return b"".join(handle.pieces(ids, whole=False)).decode()

    assert texts("The river:", "sea") == texts("The old", " sea") == " sea"
    assert texts("The river\n", "sea") == texts("The river\n", " sea") == texts("The (", "sea") == "sea"


def test_a_chat_template_brings_its_own_tokens() -> None:
    tokenizer = tiny.byte_level()
    tokenizer.chat_template = CHAT
    handle = Handle(tiny.make("llama"), tokenizer, "chat")
    pair = prepare(handle, changed(chat=True))
    wanted = tokenizer.apply_chat_template(
        [{"role": "user", "content": "The river runs past, and Tokyo is the old"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert list(pair.ids_old) == wanted and pair.ids_old[0] == tokenizer.eos_token_id
    assert pair.text_old == "<|eos|>user\nThe river runs past, and Tokyo is the old\n<|eos|>bot\n"
    assert [pair.token_texts_old[p] for p in pair.field] == [" river"] and pair.answer_texts[0] == "s"
    text, ids = prompt_ids(handle, changed(chat=True), "sea")
    assert text.count("The sea runs") == 1 and list(ids) == tokenizer(text, add_special_tokens=False)["input_ids"]
    tokenizer.chat_template = "{{ messages[0].content }}{{ messages[0].content }}"
    with pytest.raises(PromptError, match="does not hold the message once"):
        prepare(handle, changed(chat=True))
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(PromptError, match="cannot be filled in"):
        prepare(handle, changed(chat=True))


def test_a_tokenizer_that_puts_a_space_before_the_text() -> None:
    handle = Handle(tiny.make("llama"), tiny.sentencepiece(prefix=True), "spaced")
    pair = prepare(handle, changed(old="a", new="b", template="{field} the er is (", answer_old="P"))
    assert pair.field == (2,) and pair.token_texts_old[:3] == ("<s>", "", "a") and pair.char_start_old[2] == 0
