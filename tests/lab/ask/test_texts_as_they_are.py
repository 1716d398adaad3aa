"""Texts, answers and requests are taken as they are: cut where editors end lines, read back as they were written."""

from __future__ import annotations

import random
import shlex
from pathlib import Path

import pytest

from engram_lab.lab.ask.texts import file_of, items_of, lines_of, texts_of
from engram_lab.lab.command.main import build_parser
from engram_lab.lab.fronts import front
from engram_lab.models.errors import DataError
from engram_lab.probes.answers import behind
from engram_lab.probes.facts.writing import read_fact
from engram_lab.probes.lens import LensConfig
from engram_lab.probes.points import read_sentences
from engram_lab.probes.sensitivity import Item, SensitivityConfig, TextSet

# What str.splitlines cuts at and no editor ends a line with.
SEPARATORS = "\u2028\u2029\x0b\x0c\x1c\x1d\x1e\x85"


@pytest.mark.parametrize("separator", SEPARATORS, ids=lambda c: f"U+{ord(c):04X}")
def test_a_separator_inside_a_line_is_text(separator: str) -> None:
    lines = [f"one{separator}still one", "two", f"three{separator}x{separator}y"]
    for end in ("\n", "\r\n", "\r"):
        assert lines_of(end.join(lines).encode(), "a.txt") == tuple(lines)
    name, content = file_of(lines)
    assert texts_of(content.encode(), name) == tuple(lines)
    line = f'{{"prompt": "a{separator}b", "answer": "c"}}' if separator >= "\x80" else '{"prompt": "ab", "answer": "c"}'
    assert items_of(f"{line}\n{line}\n".encode(), "a.jsonl") == (Item(line.split('"')[3], " c"),) * 2


@pytest.mark.parametrize(
    ("text", "answer", "stands"),
    [
        ("The capital of France is", "Paris", " Paris"),
        ("The capital of France is", " Paris", " Paris"),
        ("My rent is $", "2600", "2600"),
        ("It costs \u20ac", "5", "5"),
        ("She said (", "no", "no"),
        ("Well", ", no", ", no"),
        ("It is 5", "%", "%"),
        ("Really", "?", "?"),
        ("\u6cd5\u56fd\u7684\u9996\u90fd\u662f", "\u5df4\u9ece", "\u5df4\u9ece"),
        ("\u65e5\u672c\u306e\u9996\u90fd\u306f", "\u6771\u4eac", "\u6771\u4eac"),
        ("\u0e40\u0e21\u0e37\u0e2d\u0e07", "\u0e01\u0e23\u0e38\u0e07", "\u0e01\u0e23\u0e38\u0e07"),
        ("A line.\n", " Paris", "Paris"),
        ("\uc11c\uc6b8\uc740", "\uc88b\ub2e4", " \uc88b\ub2e4"),
        ("\u041c\u043e\u0441\u043a\u0432\u0430", "\u0433\u043e\u0440\u043e\u0434", " \u0433\u043e\u0440\u043e\u0434"),
        ("The answer is", "", ""),
    ],
)  # fmt: skip
def test_an_answer_stands_behind_its_text_as_one_would_write_it(text: str, answer: str, stands: str) -> None:
    assert behind(text, answer) == stands
    assert behind(text, stands) == stands, "said again, it is the same"
    if answer.strip() and not text.endswith("\n"):
        assert read_fact(f"{text} => {answer}").answer == behind(text.strip(), answer.strip())


def test_an_empty_answer_scores_the_whole_text() -> None:
    assert items_of(b'{"prompt": "The river", "answer": ""}\n', "a.jsonl") == (Item("The river", ""),)
    exact = b'{"prompt": "tool_call:", "answer": "run", "space": false}\n'
    assert items_of(exact, "a.jsonl") == (Item("tool_call:", "run"),)
    assert items_of(exact.replace(b'"space": false', b'"context": ""'), "a.jsonl") == (Item("tool_call:", " run"),)


def nasty(draw: random.Random) -> str:
    letters = [
        "a",
        "b",
        " ",
        "\n",
        "\r",
        "\t",
        "=",
        "'",
        '"',
        "\\",
        "\u2028",
        "\x0c",
        "\u00a0",
        "\u6771",
        "{",
        "\ufeff",
        "$",
        "`",
    ]
    return "x" + "".join(draw.choices(letters, k=draw.randint(0, 9))) + draw.choice(["y", " ", "\n", "\u2028"])


def asked_again(probe: str, config: object, folder: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """The request that the exported command makes, with its files beside it."""
    monkeypatch.chdir(folder)
    ask = front(probe).ASK
    for name, text in ask.files(config).items():
        (folder / name).write_bytes(text.encode())
    words = shlex.split(" ".join(["probe", probe, *ask.options(config)]))
    return ask.config(build_parser().parse_args(words))


@pytest.mark.parametrize("seed", range(12))
def test_the_command_under_a_result_is_the_same_request(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    texts = tuple(nasty(draw) for _ in range(4))
    lens = LensConfig(("m",), texts, detail=False)
    assert asked_again("lens", lens, tmp_path, monkeypatch) == lens
    one = LensConfig(("m",), (nasty(draw),))
    assert asked_again("lens", one, tmp_path, monkeypatch) == one
    items = tuple(Item(nasty(draw), draw.choice(["", " y", "y", ", no", "\u6771"])) for _ in range(3))
    sets = tuple(TextSet(name, items[n:] or items) for n, name in enumerate(("a b", "a/b", "a=b", "")[:3]))
    sensitivity = SensitivityConfig(("m",), sets)
    assert asked_again("sensitivity", sensitivity, tmp_path, monkeypatch) == sensitivity


def test_numbered_columns_comments_and_spaces_of_points_files() -> None:
    numbered = "# a comment\n1\tPeter\tB-PER\n2\tsleeps\tO\n\n1\tParis\tB-LOC\n2\tshines\tO\n"
    assert [s.text for s in read_sentences(numbered.encode(), "a.conll")] == ["Peter sleeps", "Paris shines"]
    comment = "# text = He takes vitamin B\nHe\tO\ntakes\tO\nvitamin\tB-food\n\n"
    (sentence,) = read_sentences(comment.encode(), "a.conll")
    assert sentence.text == "He takes vitamin" and len(sentence.entities) == 1
    (sentence,) = read_sentences("10\u00a0000 B-num\nmen O\n".encode(), "a.bio")
    assert sentence.text == "10\u00a0000 men"
    (sentence,) = read_sentences(b'{ "text": "Paris", "entities": [[0, 5]] }\n', "a.jsonl")
    assert sentence.text == "Paris" and sentence.entities == ((0, 5),)
    for bad in (
        b'{"text": "Paris", "entities": [[0, 1e999]]}',
        b"[" * 100_000,
        b'{"text": "P", "entities": [[0, NaN]]}',
    ):
        with pytest.raises(DataError):
            read_sentences(b'{"text": "x"}\n' + bad + b"\n", "a.jsonl")
    with pytest.raises(DataError):
        texts_of(b'{"prompt": ' + b"[" * 100_000 + b"\n", "a.jsonl")
