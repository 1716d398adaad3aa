"""Errata on tiny models, every run against one full forward over the whole text, costs counted by hand."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

import numpy as np
import pytest
import torch

from engram_lab.models.errors import Cancelled, LabError, PromptError, TargetError
from engram_lab.models.handle import Handle
from engram_lab.probes.kv.append import added, closing, seconds, tail
from engram_lab.probes.kv.erratum import ErratumConfig, ErratumResult, derived, filled, run, wording_of
from engram_lab.probes.kv.scenario import Scenario, prepare
from tests.models import tiny
from tests.probes.kv.tiny import FAMILIES, RIVER, opened

TAIL = "Tokyo is the old"
# The answers are the values, so that the third value is an answer too.
OLD_MILL = dataclasses.replace(
    RIVER, answer_old="capital", answer_new="river", third="sea", erratum="the {new}", irrelevant="the end",
    wrong="the {third}",
)  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def config_of(handle: Handle, scenario: Scenario = OLD_MILL, **options: Any) -> ErratumConfig:
    return ErratumConfig((handle.name,), scenario, **{"corrections": 3} | options)


@pytest.fixture(params=FAMILIES)
def handle(request: pytest.FixtureRequest) -> Handle:
    return opened(request.param)


def ids_of(handle: Handle, text: str) -> list[int]:
    return list(handle.tokenizer(text)["input_ids"])


def forward(handle: Handle, ids: Any) -> np.ndarray:
    """Logits [vocab] of the last token of one forward over everything, without a cache."""
    with handle.running():
        return handle.model(torch.tensor([list(ids)]), use_cache=False).logits[0, -1].double().numpy()


def softmax(logits: np.ndarray) -> np.ndarray:
    return np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()


def prompt(value: str) -> str:
    return OLD_MILL.template.replace("{field}", value)


def test_each_correction_against_one_full_forward(handle: Handle) -> None:
    result = run([handle], config_of(handle)).result
    assert result.variants == ("nothing", "erratum", "irrelevant", "wrong", "new prompt")
    assert result.texts == ("", "the river", "the end", "the sea", "")
    old, new = result.pair.answer_ids
    third = ids_of(handle, prompt("capital") + " sea")[len(ids_of(handle, prompt("capital")))]
    assert result.third_id == third and handle.pieces([third], whole=False)[0].startswith(b" s")
    before, after = (forward(handle, ids_of(handle, prompt(value))) for value in ("capital", "river"))
    scores = [logits[new] - logits[old] for logits in (before, after)]
    assert result.oracle.score == pytest.approx(scores, abs=1e-4)
    n = len(ids_of(handle, prompt("capital")))
    assert result.full == n
    for v, text in enumerate(("", "\nthe river", "\nthe end", "\nthe sea", "")):
        value = "river" if v == 4 else "capital"
        whole = ids_of(handle, f"{prompt(value)}{text}\n{TAIL}")
        logits = forward(handle, whole)
        score = logits[new] - logits[old]
        assert result.effects.score[v] == pytest.approx(score, abs=1e-4)
        assert result.effects.recovery[v] == pytest.approx((score - scores[0]) / (scores[1] - scores[0]), 2e-3, 2e-3)
        probs = softmax(logits)[[old, new, third]]
        got = [result.effects.prob_old[v], result.effects.prob_new[v], result.prob_third[v]]
        np.testing.assert_allclose(got, probs, rtol=1e-3)
        assert result.leader[v] == probs.argmax()
        assert (result.computed[v], result.served[v]) == ((len(whole), 0) if v == 4 else (len(whole) - n, n))
    assert result.due.tolist() == [0, 1, 0, 2, 1]


def test_the_chain_and_its_costs_by_hand(handle: Handle) -> None:
    chain = run([handle], config_of(handle)).result.chain
    assert chain.values == ("river", "capital", "sea") and chain.answers == ("river", "capital", "sea")
    assert chain.corrections == ("the river", "the capital", "the sea") and chain.thresholds == (0, 2, 1)
    texts = {  # policy -> the whole text at each step
        0: [prompt("capital") + "".join(f"\nthe {v}\n{TAIL}" for v in chain.values[: n + 1]) for n in range(3)],
        2: [f"{prompt('capital')}\nthe river\n{TAIL}", prompt("capital"), f"{prompt('capital')}\nthe sea\n{TAIL}"],
        1: [prompt(value) for value in chain.values],
    }
    firsts = [ids_of(handle, f"{prompt('capital')} {a}")[len(ids_of(handle, prompt("capital")))] for a in chain.values]
    n = len(ids_of(handle, prompt("capital")))
    for p, threshold in enumerate(chain.thresholds):
        lengths = [len(ids_of(handle, text)) for text in texts[threshold]]
        served = {0: [n, *lengths[:2]], 2: [n, 0, n], 1: [0, 0, 0]}[threshold]
        assert chain.served[p].tolist() == served
        assert chain.computed[p].tolist() == [a - b for a, b in zip(lengths, served, strict=True)]
        assert chain.anew[p].tolist() == [b == 0 for b in served]
        np.testing.assert_allclose(chain.share[p], np.cumsum(served) / np.cumsum(lengths))
        for step, text in enumerate(texts[threshold]):
            logits = forward(handle, ids_of(handle, text))
            margin = logits[firsts[step]] - max(logits[own] for own in firsts if own != firsts[step])
            assert chain.margin[p, step] == pytest.approx(margin, abs=1e-4)
            assert chain.right[p, step] == (margin > 0) or abs(margin) < 1e-3
            assert chain.prob[p, step] == pytest.approx(softmax(logits)[firsts[step]], rel=1e-3)
    assert chain.full.tolist() == [len(ids_of(handle, prompt(value))) for value in chain.values]


def test_the_same_request_gives_the_same_bytes_and_times_are_no_part_of_it(handle: Handle) -> None:
    config = config_of(handle, corrections=1, thresholds=(0,))
    first, second = run([handle], config), run([handle], config)
    assert first == second and first.to_json() == second.to_json() and first.result.timing is None
    stored = json.loads(first.to_json())
    assert ErratumResult.from_dict(stored["result"]) == first.result
    assert ErratumConfig.from_dict(stored["config"]) == config
    timed = dataclasses.replace(config, time=True)
    one, two = run([handle], timed), run([handle], timed)
    assert one == two and one.result.timing.append > 0 and one.result.timing.full > 0
    assert ErratumResult.from_dict(json.loads(one.to_json())["result"]).timing.full == one.result.timing.full


def test_a_chain_of_ones_own(handle: Handle) -> None:
    own = (("mill", "old"), ("river", "river"))
    chain = run([handle], config_of(handle, chain=own, wording="{value}, no {before}")).result.chain
    assert chain.corrections == ("mill, no capital", "river, no mill") and chain.answers == ("old", "river")


def test_split_values_and_scenarios_without_controls() -> None:
    handle = opened("llama")
    short = dataclasses.replace(OLD_MILL, new="xenon", answer_new="end", irrelevant="", wrong="")
    result = run([handle], config_of(handle, short, align="split", corrections=1)).result
    assert result.pair.split and result.variants == ("nothing", "erratum", "new prompt") and result.third_id == -1
    for v, (ids, text) in enumerate(
        [(result.pair.ids_old, ""), (result.pair.ids_old, "\nthe xenon"), (result.pair.ids_new, "")]
    ):
        base = ids_of(handle, prompt("capital"))
        more = ids_of(handle, f"{prompt('capital')}{text}\n{TAIL}")[len(base) :]
        logits = forward(handle, [*ids, *more])
        old, new = result.pair.answer_ids
        assert result.effects.score[v] == pytest.approx(logits[new] - logits[old], abs=1e-4)


def test_in_a_chat_template_the_correction_is_a_new_turn() -> None:
    tokenizer = tiny.byte_level(bos=False)
    tokenizer.chat_template = TEMPLATE
    handle = Handle(tiny.make("llama", max_position_embeddings=256), tokenizer, "chatty")
    chat = dataclasses.replace(OLD_MILL, chat=True)
    result = run([handle], config_of(handle, chat)).result
    turn = f"<user>{prompt('capital')}\n"
    whole = ids_of(handle, f"{turn}<user>the river\n{TAIL}\n<a>")
    before = ids_of(handle, f"{turn}<a>")
    common = next(n for n, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b)
    assert common < len(before)
    assert (result.served[1], result.computed[1]) == (common, len(whole) - common)
    logits, (old, new) = forward(handle, whole), result.pair.answer_ids
    assert result.effects.score[1] == pytest.approx(logits[new] - logits[old], abs=1e-4)
    assert result.chain.computed.shape == (3, 3)
    assert closing(handle, chat) == tuple(ids_of(handle, f"\n<user>{TAIL}\n<a>"))
    tokenizer.chat_template = (
        "{{ messages[0].content }}{% if messages|length > 1 %}{{ raise_exception('two') }}{% endif %}"
    )
    with pytest.raises(PromptError, match="takes no further turn"):
        run([handle], config_of(handle, chat))


@pytest.mark.parametrize(
    ("template", "asked"),
    [
        ("A {field}.\nIt is", "It is"),
        ("One.\nA {field} b\n\nWho? It is ", "Who? It is "),
        ("A {field}. He likes tea. She is", "She is"),
        ("A {field} is the old", "is the old"),
        ("A {field}.\nAnswer:\n", "Answer:\n"),
    ],
)
def test_the_end_of_the_question(template: str, asked: str) -> None:
    assert tail(dataclasses.replace(RIVER, template=template)) == asked


def test_the_wording_of_corrections() -> None:
    said = dataclasses.replace(OLD_MILL, erratum="It is {new}, not {old}.", wrong="No {third}")
    assert filled(said, "erratum") == "It is river, not capital." and filled(said, "wrong") == "No sea"
    assert wording_of(said) == "It is {value}, not {before}."
    assert wording_of(dataclasses.replace(said, erratum="The river, riverside.")) == "The {value}, riverside."
    assert wording_of(dataclasses.replace(said, erratum="It changed.")) == ""
    assert [value for value, _ in derived(OLD_MILL, 5)] == ["river", "capital", "sea", "river", "capital"]
    far = dataclasses.replace(OLD_MILL, answer_old="look")
    assert derived(far, 3) == (("river", "river"), ("capital", "look"), ("river", "river"))
    handle = opened("llama")
    unknown = run([handle], config_of(handle, far)).result
    assert unknown.third_id == -1 and unknown.due.tolist() == [0, 1, 0, -1, 1] and np.isnan(unknown.prob_third).all()
    none = run([handle], config_of(handle, dataclasses.replace(said, erratum="It changed."))).result
    assert none.chain is None and "{value}" in none.no_chain
    assert "No corrections" in run([handle], config_of(handle, corrections=0)).result.no_chain


def test_bad_requests_and_cancelling() -> None:
    handle = opened("llama")
    for options, match in [
        ({"scenario": RIVER}, "no correction"),
        ({"wording": "it changed"}, "{value}"),
        ({"chain": (("a", " "),)}, "not empty"),
        ({"corrections": -1}, "0 or more"),
        ({"thresholds": (2, 2)}, "each once"),
        ({"thresholds": ()}, "at least one"),
    ]:
        with pytest.raises(LabError, match=match):
            config_of(handle, **options)
    with pytest.raises(TargetError, match="same token"):
        run([handle], config_of(handle, chain=(("a", "sea"), ("b", "sea,"))))
    with pytest.raises(PromptError, match="takes at most 64"):
        run([handle], config_of(handle, dataclasses.replace(OLD_MILL, erratum="the river " * 20)))
    with pytest.raises(PromptError, match="in other tokens"):
        added(handle, OLD_MILL, "capital", [None], prepare(handle, OLD_MILL).ids_old, 99)
    with pytest.raises(PromptError, match="could be repeated"):
        tail(dataclasses.replace(RIVER, template="A {field}\n"))

    def stop(fraction: float, doing: str) -> None:
        if doing.startswith("chain"):
            raise Cancelled

    with pytest.raises(Cancelled):
        run([handle], config_of(handle), stop)


def test_the_shortest_time_counts() -> None:
    calls, now = list[int](), [0.0]
    takes = {1: iter([3.0, 1.5, 2.0]), 2: iter([0.25, 4.0, 0.5])}

    def work(which: int) -> None:
        calls.append(which)
        now[0] += next(takes[which])

    assert seconds(lambda: work(1), lambda: work(2), clock=lambda: now[0]) == [1.5, 0.25] and calls == [1, 2] * 3
    (real,) = seconds(lambda: time.sleep(0.001))
    assert real >= 0.001, "seconds of a clock unless one is handed in"
