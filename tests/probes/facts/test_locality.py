"""What else facts change: reads counted by hand, every check seen to hold, and seen to fail where a model leaks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engram_lab.models.handle import Handle, open_model
from engram_lab.models.memory import read_memory
from engram_lab.models.ngrams import lookbacks
from engram_lab.models.overlay import Overlay, prepare
from engram_lab.models.tables import addresses, memories
from engram_lab.probes.facts.addresses import EditedReads, address_groups, alias_items, reach
from engram_lab.probes.facts.locality import DISTANCES, BitCheck, Locality, difference, locality
from engram_lab.probes.facts.sets import StatedFact, Writing, paraphrase_items, write
from tests.probes.facts.test_sets import FACTS
from tests.probes.facts.test_sets import handle as handle  # the fixture
from tests.probes.facts.test_sets import overlay as overlay

TEXTS = (
    "The river runs past the old mill and into the sea.",
    "A naïve café, and four spaces",
    "Paris, and Tokyo (東京) that of Japan.",
    "Rome is the capital of Italy",  # reads all the rows of the second fact and the fourth
    "xyz 123",
)
OTHERS = tuple(own.prompt for _, own in paraphrase_items(FACTS))


@pytest.fixture(scope="module")
def found(handle: Handle, overlay: Overlay) -> Locality:
    told: list[float] = []
    made = locality(handle, overlay, FACTS, TEXTS, OTHERS, told.append)
    assert told == sorted(told) and told[-1] == 1 and Locality.from_dict(made.to_dict()) == made
    return made


def checks(own: Locality) -> dict[str, BitCheck]:
    return {check.name: check for check in own.checks}


def test_edited_reads_are_those_of_the_forward(handle: Handle, overlay: Overlay) -> None:
    reads = EditedReads(handle, overlay, FACTS)
    grams = set()
    for own in FACTS:
        ids = handle.encode(own.trigger + own.answer)
        n = len(ids) - len(handle.encode(own.trigger))
        back = lookbacks(handle, torch.tensor([ids[:-1]]))[0, -n:].tolist()
        grams |= {tuple(row[: order + 2]) for row in back for order in range(2)}
    rows = set(overlay.layers[1].rows.tolist())
    for text in TEXTS:
        ids = handle.encode(text)
        read = read_memory(handle, [ids]).rows[1, 0].flatten(1)
        expected = [[row in rows for row in position] for position in read.tolist()]
        assert reads(ids)[0].tolist() == expected
        back = lookbacks(handle, torch.tensor([ids]))[0].tolist()
        known = [[tuple(row[: order + 2]) in grams for order in range(2) for _ in range(2)] for row in back]
        assert reads.by_ngram(ids).tolist() == known


def test_every_check_holds_and_counts(handle: Handle, overlay: Overlay, found: Locality) -> None:
    by_name = checks(found)
    assert list(by_name) == [
        "unaddressed", "before", "undo table", "undo logits", "undo one fact", "others stay", "other users",
    ]  # fmt: skip
    assert all(check.equal == check.compared and not check.exceptions for check in found.checks)
    rows = overlay.layers[1].rows
    free = [t for t in (*TEXTS, *OTHERS) if not torch.isin(addresses(handle, [handle.encode(t)])[1], rows).any()]
    own = by_name["unaddressed"]
    assert (own.compared, own.left_out) == (len(free), len(TEXTS) + len(OTHERS) - len(free)) and "xyz 123" in free
    first = total = 0
    for fact in FACTS:
        ids = handle.encode(fact.trigger)
        touched = torch.isin(addresses(handle, [ids])[1, 0], rows).any(-1).tolist()
        first, total = first + touched.index(True), total + len(ids) - 1
    own = by_name["before"]
    assert own.compared == first and own.compared + own.left_out == total
    assert by_name["undo table"].compared == 3 and by_name["undo logits"].compared == len(FACTS)
    assert by_name["other users"].compared == 3 * len(FACTS)
    # The second and the fourth fact have one address, so neither is undone by itself.
    own = by_name["undo one fact"]
    assert own.compared + own.left_out == len(FACTS) and own.left_out >= 2 and own.left_out_equal == 0
    assert own.why_left_out == "their triggers read rows that other facts still have"
    assert by_name["others stay"].compared > 0


def test_partial_collisions_by_hand(handle: Handle, overlay: Overlay, found: Locality) -> None:
    rows, given = overlay.layers[1].rows, (*TEXTS, *OTHERS)
    hits = {text: torch.isin(addresses(handle, [handle.encode(text)])[1, 0], rows) for text in given}
    assert [own.text for own in found.partial] == [text for text in given if hits[text].any()]
    for own in found.partial:
        hit, ids = hits[own.text], [handle.encode(own.text)]
        assert own.reads == hit.sum() == own.by_ngram + own.by_collision and own.positions == hit.any(-1).sum()
        assert own.most == hit.sum(-1).max() and own.unrelated == (own.text in TEXTS)
        before = handle.residuals(ids).logits[0]
        with prepare(handle, overlay).applied():
            after = handle.residuals(ids).logits[0]
        assert own.differs == (before != after).any(-1).sum() > 0
    assert next(own for own in found.partial if own.text.startswith("Rome")).most == hits[TEXTS[0]].shape[1]
    counts = np.bincount(np.concatenate([hits[text].sum(-1).numpy() for text in TEXTS]), minlength=5)
    assert found.reads_histogram.tolist() == counts.tolist() and found.n_unrelated == len(TEXTS)


def test_behind_the_trigger_it_changes(handle: Handle, overlay: Overlay, found: Locality) -> None:
    total, differs, n = np.zeros(DISTANCES), np.zeros(DISTANCES), np.zeros(DISTANCES, dtype=int)
    for k, fact in enumerate(FACTS):
        start = len(handle.encode(fact.trigger)) - 1
        ids = [handle.encode(f"{fact.trigger}{fact.answer}. {TEXTS[k]}")[: start + DISTANCES]]
        before = handle.residuals(ids).logits[0, start:].double().log_softmax(-1)
        with prepare(handle, overlay).applied():
            after = handle.residuals(ids).logits[0, start:].double().log_softmax(-1)
        total[: len(before)] += (before.exp() * (before - after)).sum(-1).numpy()
        differs[: len(before)] += (before != after).any(-1).numpy()
        n[: len(before)] += 1
    assert found.after_n.tolist() == n.tolist()
    np.testing.assert_allclose(found.after_kl, total / n, rtol=1e-3, atol=1e-6)
    np.testing.assert_array_equal(found.after_differs, differs / n)
    assert found.after_differs[0] == 1


def test_a_model_that_leaks_is_found(handle: Handle, overlay: Overlay) -> None:
    """A forward that depends on how often it ran: nothing holds but the tables, and every text is listed."""
    calls = 0

    def drift(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return output + 1e-3 * calls

    hook = memories(handle)[0].value.register_forward_hook(drift)
    try:
        own = locality(handle, overlay, FACTS, TEXTS, OTHERS)
    finally:
        hook.remove()
    for check in own.checks:
        if check.name != "undo table" and check.compared:
            assert not check.holds and check.equal == 0, check.name
            assert check.exceptions and all(found.why.endswith("not explained") for found in check.exceptions)
    assert "xyz 123" in {found.text for found in checks(own)["unaddressed"].exceptions}
    assert checks(own)["undo table"].holds


def test_a_table_that_was_changed_is_found(handle: Handle, overlay: Overlay) -> None:
    weight = memories(handle)[2].table.weight
    kept = weight[0, 0].item()

    def change(done: float) -> None:
        with torch.inference_mode(False), torch.no_grad():
            weight[0, 0] = 7.0

    try:
        own = checks(locality(handle, overlay, FACTS, TEXTS, (), change))["undo table"]
    finally:
        with torch.no_grad():
            weight[0, 0] = kept
    assert (own.compared, own.equal) == (3, 2) and own.exceptions[0].text == "table of layer 2" and not own.holds


def test_a_difference_by_hand() -> None:
    before = torch.zeros(3, 2)
    after = before.clone()
    assert difference("t", before, after, "why") is None
    after[1, 0], after[2, 1] = 0.5, -2.0
    own = difference("t", before, after, "why")
    assert own is not None and (own.positions, own.first, own.largest) == (2, 1, 2.0)
    chances = np.exp([0.0, -2.0]) / np.exp([0.0, -2.0]).sum()
    assert own.kl == pytest.approx(float((0.5 * np.log(0.5 / chances)).sum()), rel=1e-5)
    assert not BitCheck("n", "texts", 0, 0).holds and BitCheck("n", "texts", 2, 2).holds


def test_facts_with_one_address(handle: Handle, found: Locality) -> None:
    assert sorted(map(sorted, address_groups(handle, 1, FACTS))) == [[0], [1, 3], [2]]
    assert (found.n_facts, found.n_addresses, found.address_groups) == (4, 3, ((1, 3),))


def test_aliases_are_other_words_before_the_same_tokens() -> None:
    mini = open_model("engram-mini")
    facts = [
        StatedFact(*own)
        for own in (
            ("Maya's favorite city is", " Lisbon"),
            ("In the evening, Maya loves to play the", " piano"),
            ("Maya was born in", " Chicago"),
            ("Maya", " Lee"),  # nothing before it to change
        )
    ]
    items = alias_items(mini, 6, facts)
    assert reach(mini) == 3
    assert {own.prompt for _, own in items} >= {
        "Quinn's favorite city is", "Omar's favorite city is", "Quinn loves to play the", "Quinn was born in",
    }  # fmt: skip
    for n, own in items:
        ends = [lookbacks(mini, torch.tensor([mini.encode(text)]))[0, -1] for text in (own.prompt, facts[n].trigger)]
        assert torch.equal(*ends) and own.prompt != facts[n].trigger and own.answer == facts[n].answer
    assert {n for n, _ in items} == {0, 1, 2}
    overlay, _ = write(mini, facts[:1], Writing(steps=2))
    assert EditedReads(mini, overlay, facts[:1])(mini.encode("Quinn's favorite city is"))[0, -1].all()
