"""Asking before and after, intervals, density, stacks and layers: against plain forwards and counts by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from engram_lab.models.errors import DataError, LabError
from engram_lab.models.grafting import graft
from engram_lab.models.handle import Handle
from engram_lab.models.overlay import Overlay, prepare
from engram_lab.models.tables import addresses
from engram_lab.probes.facts import density as fact_density
from engram_lab.probes.facts import layers
from engram_lab.probes.facts.density import DensityConfig, DensityResult
from engram_lab.probes.facts.layers import FIGURES, LayersConfig, LayersResult
from engram_lab.probes.facts.sets import (
    BATCH_TOKENS,
    Asked,
    Expected,
    StatedFact,
    Writing,
    ask,
    ask_neighbours,
    batches,
    interval,
    kl_of,
    neighbour_items,
    paraphrase_items,
    recall_items,
    score,
    write,
)
from engram_lab.probes.facts.writing import encode_facts
from tests.models import tiny

FACTS = (
    StatedFact(
        "The river runs past", " the sea", ("Past it runs",), (Expected("The old mill", " four"),),
        Expected("A tab and", " a new line"), "river",
    ),
    StatedFact("Paris is the capital of", " France", (), (Expected("A café, and", " France"), Expected("The", " old"))),
    StatedFact("A tab and the old", " mill", ("Into the sea, the", "And a naïve")),
    StatedFact("Tokyo is the capital of", " Japan"),  # the address of the second, and another answer
)  # fmt: skip


@pytest.fixture(scope="module")
def handle() -> Handle:
    model = tiny.make("llama")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    return graft(Handle(model, tiny.byte_level(), "llama"), [0, 1, 2], rows_per_head=300, heads=2)


@pytest.fixture(scope="module")
def overlay(handle: Handle) -> Overlay:
    return write(handle, FACTS, Writing("maya", layer=1))[0]


def plainly(handle: Handle, overlay: Overlay | None, prompt: str, answer: str) -> np.ndarray:
    """Log-probabilities [token, vocab] that predict the answer, of one text by itself, in float64."""
    from engram_lab.models.overlay import Fact

    ((ids, answered),) = encode_facts(handle, [Fact(prompt, answer)]).values()
    with prepare(handle, [overlay]).applied():
        logits = handle.model(torch.tensor([[*ids, *answered[:-1]]])).logits[0, len(ids) - 1 :].double().numpy()
    found: np.ndarray = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return found


def test_what_is_asked_is_what_each_text_gives_by_itself(handle: Handle, overlay: Overlay) -> None:
    items = recall_items(FACTS) + paraphrase_items(FACTS) + [(0, Expected("A tab and", " a new line"))]
    asked = ask(handle, prepare(handle, overlay), items)
    assert asked.fact.tolist() == [0, 1, 2, 3, 0, 2, 2, 0] and asked.answers[0] == " the sea"
    for n, (_, own) in enumerate(items):
        logs = {"before": plainly(handle, None, own.prompt, own.answer)}
        logs["after"] = plainly(handle, overlay, own.prompt, own.answer)
        ids = asked.answer_ids[n]
        order = np.argsort(-logs["before"][0])
        rival = int(next(i for i in order if i != ids[0]))
        for when, log in logs.items():
            chance = math.exp(sum(log[k, i] for k, i in enumerate(ids)))
            ranks = [int((log[k] > log[k, i]).sum()) for k, i in enumerate(ids)]
            assert getattr(asked, f"probability_{when}")[n] == pytest.approx(chance, rel=1e-4)
            assert getattr(asked, f"top1_{when}")[n] == (max(ranks) == 0)
            assert getattr(asked, f"top5_{when}")[n] == (max(ranks) < 5)
            assert getattr(asked, f"wins_{when}")[n] == (log[0, ids[0]] > log[0, rival])
            said = handle.pieces([int(log[0].argmax())], whole=False)[0].decode(errors="backslashreplace")
            assert getattr(asked, f"said_{when}")[n] == said
        divergence = float((np.exp(logs["before"][0]) * (logs["before"][0] - logs["after"][0])).sum())
        assert asked.kl[n] == pytest.approx(divergence, rel=1e-3, abs=1e-5)
        assert asked.same_top[n] == (logs["before"][0].argmax() == logs["after"][0].argmax())
        assert asked.same_bits[n] == np.array_equal(logs["before"], logs["after"])
    assert asked.top1_after[:4].sum() >= 2 and not asked.top1_before[:4].any() and not asked.same_bits[:4].any()
    assert Asked.from_dict(asked.to_dict()) == asked


def test_a_neighbour_is_measured_against_the_answer_of_its_fact(handle: Handle, overlay: Overlay) -> None:
    asked = ask_neighbours(handle, prepare(handle, overlay), FACTS)
    assert [n for n, _ in neighbour_items(FACTS)] == asked.fact.tolist() == [0, 1, 1]
    new = [ask(handle, prepare(handle, overlay), recall_items(FACTS)).answer_ids[n][0] for n in asked.fact]
    for n, (_, own) in enumerate(neighbour_items(FACTS)):
        log = plainly(handle, overlay, own.prompt, own.answer)[0]
        if asked.answer_ids[n][0] == new[n]:
            assert math.isnan(asked.wins_after[n])  # one token for both: not told
        else:
            assert asked.wins_after[n] == (log[asked.answer_ids[n][0]] > log[new[n]])
    assert math.isnan(asked.wins_after[1])
    whole = score("specificity", asked, asked.wins_before, asked.wins_after, 0, 10)
    assert whole.n == 2 and whole.after == np.nanmean(asked.wins_after)


def test_every_text_is_in_one_batch_and_padded_behind(handle: Handle) -> None:
    texts = [[n + 5] * (1 + n * 7 % 60) for n in range(150)]
    seen: list[int] = []
    for numbers, ids in batches(handle, texts):
        assert ids.numel() <= BATCH_TOKENS or len(numbers) == 1
        seen += numbers
        for row, n in zip(ids.tolist(), numbers, strict=True):
            assert row == texts[n] + [0] * (ids.shape[1] - len(texts[n]))
    assert sorted(seen) == list(range(150)) and len(list(batches(handle, texts))) > 1
    assert list(batches(handle, [])) == []


def test_kl_by_hand_and_nothing_where_bits_agree() -> None:
    before, after = torch.tensor([[0.0, math.log(3)], [1, 2]]), torch.tensor([[0.0, 0.0], [1, 2]])
    expected = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert kl_of(before, after)[0].item() == pytest.approx(expected, rel=1e-6) and kl_of(before, after)[1].item() == 0


def test_intervals_resample_facts_whole() -> None:
    groups, values = np.array([0, 0, 0, 1, 2]), np.array([1.0, 1, 1, 0, np.nan])
    mean, low, high = interval(groups, values, 0, 4000)
    # Two facts with a value: both the first in a quarter of the draws, both the second in another.
    assert (mean, low, high) == (0.75, 0.0, 1.0)
    many = np.random.default_rng(0).normal(size=400)
    mean, low, high = interval(np.arange(400), many, 0, 4000)
    assert (high - low) / 2 == pytest.approx(1.96 * many.std() / 20, rel=0.08) and low < mean < high
    assert interval(np.zeros(3), np.ones(3), 0, 10)[0] == 1 and math.isnan(interval(np.zeros(3), np.ones(3), 0, 10)[1])
    assert all(map(math.isnan, interval(np.zeros(1), np.array([np.nan]), 0, 10)))


@pytest.fixture(scope="module")
def density(handle: Handle) -> DensityResult:
    config = DensityConfig(("llama",), FACTS, Writing("maya", layer=1), (1, 2, 3, 9), bootstrap=50)
    told: list[float] = []
    report = fact_density.run([handle], config, lambda done, what: told.append(done))
    assert told == sorted(told) and DensityResult.from_dict(report.result.to_dict()) == report.result
    assert DensityConfig.from_dict(config.to_dict()) == config
    result = report.result
    assert isinstance(result, DensityResult)
    return result


def test_density_counts_what_is_lost_to_an_alias_by_itself(handle: Handle, density: DensityResult) -> None:
    assert density.sizes == (1, 2, 3) and density.groups.tolist() == [4, 2, 1] and density.n_facts.tolist() == [4, 4, 3]
    # One at a time: just as each fact written by itself.
    for n, own in enumerate(FACTS):
        alone = write(handle, [own], Writing("maya", layer=1))[0]
        asked = ask(handle, prepare(handle, alone), recall_items([own]))
        assert density.fact_probability[0, n] == asked.probability_after[0]
        assert density.fact_top1[0, n] == asked.top1_after[0] and density.fact_aliased[0, n] == 0
    order = np.random.default_rng(0).permutation(4)
    for s, size in enumerate(density.sizes):
        groups = order[: 4 // size * size].reshape(-1, size)
        both = {int(n) for group in groups for n in group if {1, 3} <= set(group.tolist()) and n in (1, 3)}
        assert {n for n in range(4) if density.fact_aliased[s, n] == 1} == both
        known = ~np.isnan(density.fact_top1[s])
        assert sorted(np.flatnonzero(known)) == sorted(groups.flatten())
        lost = int((density.fact_top1[s] == 0).sum())
        assert density.lost_alias[s] + density.lost_other[s] == lost and density.n_aliased[s] == len(both)
        assert density.top1[s] == np.nanmean(density.fact_top1[s])
        assert density.addresses[s] == sum(size - ({1, 3} <= set(group.tolist())) for group in groups)
        rest = [n for n in np.flatnonzero(known) if n not in both]
        assert np.array_equal(density.free[s], np.mean(density.fact_top1[s][rest]) if rest else np.nan, equal_nan=True)


def test_stacks_of_two_users(handle: Handle, density: DensityResult) -> None:
    disjoint, overlapping = density.stacks
    assert (disjoint.name, overlapping.name) == ("disjoint", "overlapping") and disjoint.n_facts == (2, 2)
    mine = write(handle, FACTS[:2], Writing("maya", layer=1))[0].layers[1]
    for case, facts in (
        (disjoint, FACTS[2:]),
        (overlapping, (replace(FACTS[0], answer=" France"), replace(FACTS[1], answer=" the sea"))),
    ):
        theirs = write(handle, facts, Writing("another user", layer=1))[0].layers[1]
        common = set(mine.rows.tolist()) & set(theirs.rows.tolist())
        pairs = [(mine.vectors[mine.rows == row], theirs.vectors[theirs.rows == row]) for row in common]
        assert case.conflicts == sum(not torch.equal(a, b) for a, b in pairs) > 0
        # Beside each other in one batch nobody loses anything.
        assert np.array_equal(case.own_top1, case.alone_top1)
    assert overlapping.stacked_top1[1] == overlapping.alone_top1[1] > overlapping.stacked_top1[0]
    assert overlapping.other_order_top1[0] == overlapping.alone_top1[0]
    assert overlapping.conflicting_facts == 4


def test_layers_are_each_written_by_itself(handle: Handle) -> None:
    config = LayersConfig(("llama",), FACTS, Writing("maya", steps=5), bootstrap=20)
    report = layers.run([handle], config)
    result = report.result
    assert result.layers == (0, 1, 2) and LayersResult.from_dict(result.to_dict()) == result
    for n, layer in enumerate(result.layers):
        overlay, written = write(handle, FACTS, Writing("maya", layer, steps=5))
        asked = ask(handle, prepare(handle, overlay), recall_items(FACTS))
        other = ask(handle, prepare(handle, overlay), paraphrase_items(FACTS))
        assert result.top1[n] == asked.top1_after.mean() and np.array_equal(result.loss[n], written.loss)
        assert result.probability[n] == pytest.approx(asked.probability_after.mean(), rel=1e-6)
        assert result.paraphrase_top1[n] == other.top1_after.mean()
        assert result.gate_before[n] == 0.5  # of zero rows
    assert all(len(getattr(result, name)) == 3 for name in FIGURES)
    one = layers.run([handle], replace(config, layers=(2,))).result
    assert one.top1[0] == result.top1[2] and one.layers == (2,)


def test_the_same_address_is_the_same_for_both(handle: Handle) -> None:
    """Of what the facts above rely on."""
    rows = [addresses(handle, [handle.encode(FACTS[n].trigger)])[1, 0, -1].tolist() for n in (1, 3)]
    assert rows[0] == rows[1]


def test_bad_requests_are_one_sentence(handle: Handle) -> None:
    for kind, changes, sentence in (
        (DensityConfig, {"models": ("a", "b")}, "into one model, not 2"),
        (DensityConfig, {"facts": ()}, "No fact was given"),
        (DensityConfig, {"facts": FACTS[:1] * 2}, "is given twice"),
        (DensityConfig, {"sizes": (2, 1)}, "must be ascending"),
        (DensityConfig, {"sizes": (9,)}, "fewer than the 9"),
        (DensityConfig, {"bootstrap": 0}, "1 or more"),
        (LayersConfig, {"layers": (1, 1)}, "named twice"),
        (LayersConfig, {"writing": Writing(layer=1)}, "name it among the layers"),
    ):
        with pytest.raises((LabError, DataError), match=sentence):
            kind(**({"models": ("m",), "facts": FACTS} | changes))
    for given, sentence in (
        ({"user": " "}, "no name"),
        ({"method": "magic"}, "not a method"),
        ({"steps": -1}, "from 0 to"),
        ({"rate": 0.0}, "above 0"),
        ({"pull": float("nan")}, "0 or more"),
    ):
        with pytest.raises(LabError, match=sentence):
            Writing(**given)
    with pytest.raises(LabError, match="no memory at layer 7"):
        layers.run([handle], LayersConfig(("m",), FACTS, layers=(7,)))
    with pytest.raises(LabError, match="has two answers"):
        fact_density.run([handle], DensityConfig(("m",), (FACTS[0], replace(FACTS[0], answer=" mill")), sizes=(1,)))
