"""The texts that ship: their form, their counts, and what the experiments rely on."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

ASSETS = Path(__file__).resolve().parent.parent / "assets"
SCENARIO_KEYS = {
    *("id", "kind", "template", "old", "new", "answer_old", "answer_new", "question", "distractors"),
    *("erratum", "irrelevant", "wrong", "third"),
}
KINDS = {"lookup": 8, "derived": 8, "rule": 6, "comparison": 4, "sentiment": 2}  # at least so many

Sentence = list[tuple[str, str]]


def read_bio(text: str) -> list[Sentence]:
    blocks = [block for block in text.split("\n\n") if block.strip()]
    return [[(line.split("\t")[0], line.split("\t")[1]) for line in block.strip("\n").split("\n")] for block in blocks]


def entities(sentence: Sentence) -> list[tuple[str, int, int]]:
    """(type, start, stop) of each entity."""
    starts = [i for i, (_, tag) in enumerate(sentence) if tag.startswith("B-")]
    found = []
    for start in starts:
        stop = start + 1
        while stop < len(sentence) and sentence[stop][1].startswith("I-"):
            stop += 1
        found.append((sentence[start][1][2:], start, stop))
    return found


def joined(sentence: Sentence) -> str:
    return re.sub(r" (?=[.,;:]|'s\b)", "", " ".join(token for token, _ in sentence))


def objects(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def last_words(prompt: str) -> tuple[str, ...]:
    return tuple(prompt.lower().split()[-3:])


@pytest.fixture(scope="module")
def sentences() -> list[Sentence]:
    return read_bio((ASSETS / "texts" / "entities.bio").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def scenarios() -> list[dict[str, Any]]:
    return objects(ASSETS / "kv" / "scenarios.jsonl")


@pytest.fixture(scope="module")
def facts() -> list[dict[str, Any]]:
    return objects(ASSETS / "facts" / "persona.jsonl")


@pytest.fixture(scope="module")
def mini() -> Tokenizer:
    return Tokenizer.from_file(str(ASSETS / "models" / "engram-mini" / "tokenizer.json"))


def test_every_line_of_the_entities_is_a_token_and_its_tag(sentences: list[Sentence]) -> None:
    lines = (ASSETS / "texts" / "entities.bio").read_text(encoding="utf-8").splitlines()
    assert all(re.fullmatch(r"\S+\t(O|[BI]-[A-Z]+)", line) for line in lines if line)
    for sentence in sentences:
        before = "O"
        for _, tag in sentence:
            if tag.startswith("I-"):
                assert before[1:] == tag[1:], sentence  # an inside follows a begin or an inside of its type
            before = tag
        assert all(re.fullmatch(r"[.,;:]|'s|[^\s\"();]*[^\s\".,;:()]", token) for token, _ in sentence), sentence
        assert sentence[-1] == (".", "O")


def test_joined_tokens_are_sentences_of_eight_to_thirty_words(sentences: list[Sentence]) -> None:
    texts = [joined(sentence) for sentence in sentences]
    assert len(set(texts)) == len(texts)
    for text in texts:
        assert 8 <= len(text.split()) <= 30, text
        assert text[0].isupper() or text[0].isdigit()
        assert "  " not in text and " ." not in text and " ," not in text


def test_the_entities_are_many_mostly_of_several_tokens_and_all_over_the_sentence(sentences: list[Sentence]) -> None:
    assert len(sentences) >= 320
    found = [(s, *entity) for s in sentences for entity in entities(s)]
    assert len(found) >= 500
    types = Counter(kind for _, kind, _, _ in found)
    assert len(types) >= 12 and min(types.values()) >= 10
    assert sum(stop - start > 1 for _, _, start, stop in found) >= 0.6 * len(found)
    at_start = sum(start == 0 for _, _, start, _ in found)
    at_end = sum(stop == len(s) - 1 for s, _, _, stop in found)
    assert at_start >= 100 and at_end >= 100 and len(found) - at_start - at_end >= 300
    a_few = sum(1 <= len(entities(s)) <= 3 for s in sentences)
    assert a_few >= 0.9 * len(sentences)
    patterns = {" ".join("X" if t[0] == "B" else w for w, t in s if t[0] != "I") for s in sentences}
    assert len(patterns) >= 0.98 * len(sentences)  # not one sentence with other names put in


def test_the_readme_counts_the_entities_right(sentences: list[Sentence]) -> None:
    found = [entity for sentence in sentences for entity in entities(sentence)]
    counted = f"{len(sentences)} sentences with {len(found)} named entities of {len({e[0] for e in found})} types"
    assert counted in (ASSETS / "texts" / "README.md").read_text(encoding="utf-8")


def test_the_scenarios_are_enough_of_each_kind(scenarios: list[dict[str, Any]]) -> None:
    assert len(scenarios) >= 28
    assert len({s["id"] for s in scenarios}) == len(scenarios)
    kinds = Counter(s["kind"] for s in scenarios)
    assert set(kinds) == set(KINDS) and all(kinds[kind] >= least for kind, least in KINDS.items())
    assert {s["distractors"] for s in scenarios} == {"none", "before", "after", "both"}
    assert sum(s["id"].endswith("-uneven") for s in scenarios) >= 3
    assert f"holds {len(scenarios)} short scenarios" in (ASSETS / "kv" / "README.md").read_text(encoding="utf-8")


def test_each_scenario_has_one_field_and_asks_in_its_last_line(scenarios: list[dict[str, Any]]) -> None:
    for s in scenarios:
        assert set(s) == SCENARIO_KEYS and all(isinstance(v, str) and v.strip() for v in s.values()), s["id"]
        assert re.findall(r"\{\w*\}", s["template"]) == ["{field}"], s["id"]
        lead = s["template"].splitlines()[-1]
        assert lead.startswith("Answer:") and "{" not in lead and s["template"] == s["template"].strip(), s["id"]
        for key in ("answer_old", "answer_new"):
            assert re.fullmatch(r" \w+", s[key]), s["id"]
        assert len({s["old"], s["new"], s["third"]}) == 3 and s["answer_old"] != s["answer_new"], s["id"]
        assert re.findall(r"\{\w*\}", s["erratum"]) == ["{new}"], s["id"]
        assert re.findall(r"\{\w*\}", s["wrong"]) == ["{third}"], s["id"]
        assert s["erratum"].format(new="x") == s["wrong"].format(third="x"), s["id"]  # alike but for the value
        assert "{" not in s["irrelevant"], s["id"]
        assert not {s["old"], s["new"], s["third"]} & set(re.findall(r"\w+", s["irrelevant"])), s["id"]
        if s["kind"] == "lookup":
            assert s["answer_old"].strip() == s["old"].split()[0], s["id"]
            assert s["answer_new"].strip() == s["new"].split()[0], s["id"]


def test_the_distractors_stand_where_a_scenario_says(scenarios: list[dict[str, Any]]) -> None:
    for s in scenarios:
        before, after = s["template"].split("{field}")
        words_before = len(before.split())
        words_after = len(re.split(r"\n(?:Question|Answer):", after)[0].split())
        if s["distractors"] in ("before", "both"):
            assert 20 <= words_before <= 120, s["id"]
        if s["distractors"] in ("after", "both"):
            assert 20 <= words_after <= 120, s["id"]
        if s["distractors"] in ("none", "before"):
            assert words_after < 20, s["id"]


def test_fifty_facts_each_with_paraphrases_and_neighbours(facts: list[dict[str, Any]]) -> None:
    assert len(facts) == 50 and len({f["id"] for f in facts}) == 50 and len({f["trigger"] for f in facts}) == 50
    for f in facts:
        assert set(f) - {"composition"} == {"id", "trigger", "answer", "paraphrases", "neighbours"}, f["id"]
        asked = [f, *f["neighbours"], *([f["composition"]] if "composition" in f else [])]
        assert all(re.fullmatch(r" \w+( \w+)*", item["answer"]) for item in asked), f["id"]
        assert len(set(f["paraphrases"])) == 2 and len({n["prompt"] for n in f["neighbours"]}) == 2, f["id"]
        for prompt in [f["trigger"], *f["paraphrases"], *(item["prompt"] for item in asked[1:])]:
            assert prompt == prompt.strip() and not prompt.endswith("."), prompt
    assert sum("composition" in f for f in facts) >= 10


def test_addresses_are_shared_only_where_meant(facts: list[dict[str, Any]], mini: Tokenizer) -> None:
    for key in (last_words, lambda text: tuple(mini.encode(text.lower(), add_special_tokens=False).ids[-3:])):
        addresses = Counter(key(f["trigger"]) for f in facts)
        assert sum(n == 1 for n in addresses.values()) >= 35
        shared = {address for address, n in addresses.items() if n > 1}
        assert len(shared) >= 3
        for address in shared:  # two facts at one address say two things
            assert len({f["answer"] for f in facts if key(f["trigger"]) == address}) == addresses[address]
        for f in facts:
            assert all(key(n["prompt"]) not in addresses for n in f["neighbours"]), f["id"]
            assert all(key(p) not in addresses for p in f["paraphrases"]), f["id"]


def test_answers_are_mostly_one_token(facts: list[dict[str, Any]], mini: Tokenizer) -> None:
    lengths = [len(mini.encode(f["answer"], add_special_tokens=False).ids) for f in facts]
    assert lengths.count(1) == 44 and max(lengths) <= 3


def test_the_mark_that_windows_puts_first_is_no_text() -> None:
    from engram_lab.lab.ask.texts import lines_of, texts_of

    for read in (lines_of, texts_of):
        assert read("\ufeffThe river\nParis\n".encode(), "a.txt") == ("The river", "Paris")
