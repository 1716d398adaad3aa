"""Loss with the memory changed, against transformers' own logits on weights that are changed by hand."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch

from engram_lab.models.errors import Cancelled, DataError, LabError
from engram_lab.models.handle import Handle, open_model
from engram_lab.probes.base import Report
from engram_lab.probes.sensitivity import INTACT, Item, SensitivityConfig, SensitivityResult, TextSet, run
from tests.models import tiny

FACTS = TextSet("facts", (Item("Paris is the capital of", " France"), Item("The river runs past the old", " mill")))
WHOLE = TextSet("whole", (Item("naïve 東京 the the"), Item("A tab\tand\n two spaces"), Item("the sea")))


@pytest.fixture(scope="module")
def pair() -> list[Handle]:
    tokenizer = tiny.byte_level()
    memory = tiny.engram(tokenizer)
    with torch.no_grad():  # an untrained memory hardly matters
        memory.model.layers[1].memory.table.weight.mul_(40)
    return [Handle(memory, tokenizer, "memory"), Handle(tiny.make("llama"), tokenizer, "dense")]


@pytest.fixture(scope="module")
def report(pair: list[Handle]) -> Report:
    config = SensitivityConfig(("memory", "dense"), (FACTS, WHOLE), ("off", "zeroed@1", "one_row"), bootstrap=200)
    return run(pair, config)


def by_hand(model: torch.nn.Module, handle: Handle, item: Item) -> tuple[float, int, bool]:
    """Summed loss of the answer's tokens, one text at a time."""
    ids = handle.tokenizer(item.text + item.answer)["input_ids"]
    first = len(handle.tokenizer(item.text)["input_ids"]) if item.answer else 2  # behind <s> and the first token
    with torch.inference_mode():
        log_p = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    loss = -sum(log_p[t - 1, ids[t]].item() for t in range(first, len(ids)))
    return loss, len(ids) - first, int(log_p[first - 1].argmax()) == ids[first]


@pytest.mark.parametrize("condition", range(5))
def test_every_loss_against_changed_weights(pair: list[Handle], report: Report, condition: int) -> None:
    result: SensitivityResult = report.result
    assert result.conditions == (INTACT, "off", "zeroed@1", "one_row", "dense")
    handle = pair[condition == 4]
    model = copy.deepcopy(handle.model)
    if condition in (1, 2):
        model.model.layers[1].memory.table.weight.data.zero_()
    if condition == 3:
        memory = model.model.layers[1].memory
        for start, size in zip(memory.hash.offsets.tolist(), memory.hash.primes.tolist(), strict=True):
            memory.table.weight.data[start : start + size] = memory.table.weight.data[start].clone()
    for n, item in enumerate([*FACTS.items, *WHOLE.items]):
        loss, tokens, top = by_hand(model, handle, item)
        assert result.item_loss[condition, n] == pytest.approx(loss, abs=1e-4)
        assert (result.item_tokens[condition, n], result.item_top[condition, n]) == (tokens, top)


def test_means_changes_and_contrasts(report: Report) -> None:
    r: SensitivityResult = report.result
    facts, whole = slice(0, 2), slice(2, 5)
    mean = [r.item_loss[:, part].sum(1) / r.item_tokens[:, part].sum(1) for part in (facts, whole)]
    np.testing.assert_allclose(r.loss, mean)
    np.testing.assert_allclose(r.change, r.loss - r.loss[:, :1])
    np.testing.assert_allclose(r.contrast[1], r.change[0] - r.change[1])
    assert not r.change[:, 0].any() and (r.change_low <= r.change).all() and (r.change <= r.change_high).all()
    assert abs(r.change[0, 1]) > 1e-3, "the memory must matter for this to test anything"
    np.testing.assert_array_equal(r.loss[:, 1], r.loss[:, 2])  # zeroed rows are a memory that is off
    assert np.isnan(r.top[1]).all() and (r.top[0] == r.item_top[:, facts].mean(1)).all()
    assert r.n_items.tolist() == [2, 3] and r.n_tokens[0] == r.item_tokens[0, facts].sum()


def test_intervals_are_a_bootstrap_of_each_set(report: Report) -> None:
    """A set of two items: a resample is one of them twice or both, with odds 1 : 2 : 1."""
    r: SensitivityResult = report.result
    single = (r.item_loss[1, :2] - r.item_loss[0, :2]) / r.item_tokens[0, :2]
    assert r.change_low[0, 1] == pytest.approx(single.min(), rel=1e-9)
    assert r.change_high[0, 1] == pytest.approx(single.max(), rel=1e-9)


def test_json_round_trip_and_the_same_bits(pair: list[Handle], report: Report) -> None:
    assert Report.from_dict(json.loads(report.to_json())) == report
    assert run(pair, report.config).to_json() == report.to_json()


def test_bad_requests_are_one_sentence(pair: list[Handle]) -> None:
    with pytest.raises(LabError, match="dense has no Engram memory"):
        run(pair[1:], SensitivityConfig(("dense",), (FACTS,)))
    with pytest.raises(LabError, match="no memory at layer 2: its memory layers are 1"):
        run(pair[:1], SensitivityConfig(("memory",), (FACTS,), ("off@2",)))
    with pytest.raises(DataError, match='"x" is one token for memory, which leaves nothing'):
        run(pair[:1], SensitivityConfig(("memory",), (TextSet("one", (Item("x"),)),)))
    with pytest.raises(DataError, match="holds no item"):
        TextSet("empty", ())
    with pytest.raises(DataError, match="same name"):
        SensitivityConfig(("memory",), (FACTS, FACTS))


def test_it_can_be_cancelled(pair: list[Handle], report: Report) -> None:
    def stop(*_: object) -> None:
        raise Cancelled

    with pytest.raises(Cancelled):
        run(pair, report.config, stop)
    assert run(pair, report.config) == report


@pytest.mark.slow
def test_the_shipped_memory_holds_facts_and_not_what_is_read() -> None:
    """Measured: +1.6 nats on a fact's token with the memory off, 0.0 on an answer that stands in the text."""
    from engram_lab.lab.ask.texts import shipped_sets

    facts, reading, _ = shipped_sets()
    handle = open_model("engram-mini", device="cpu", dtype="float32")
    result = run([handle], SensitivityConfig(("engram-mini",), (facts, reading), ("off",))).result
    assert result.change_low[0, 1] > 0.8 and abs(result.change[1, 1]) < 0.5 and result.contrast_low[1, 1] > 0.5


def test_a_single_item_has_no_interval(pair: list[Handle]) -> None:
    sets = (TextSet("one", (Item("The river runs"),) * 2), TextSet("two", (Item("The river"), Item("Paris is old"))))
    result = run(pair[:1], SensitivityConfig((pair[0].name,), sets, bootstrap=20)).result
    for name in ("loss", "change"):
        low, high = getattr(result, f"{name}_low"), getattr(result, f"{name}_high")
        assert np.isnan(low[0]).all() and np.isnan(high[0]).all() and not np.isnan(low[1]).any()


def test_two_tokenizers_have_no_nats_in_common(pair: list[Handle]) -> None:
    other = Handle(tiny.make("llama"), tiny.byte_level(), "other")
    sets = (TextSet("a", (Item("The river"), Item("A naïve café"))),)
    bytes_ = Handle(tiny.make("gpt2"), tiny.sentencepiece(prefix=False), "pieces")
    with pytest.raises(LabError, match=r"scores .* tokens of .* and pieces .* cannot be compared"):
        run([pair[0], bytes_], SensitivityConfig((pair[0].name, "pieces"), (TextSet("a", (Item("the river runs"),)),)))
    assert run([pair[0], other], SensitivityConfig((pair[0].name, "other"), sets[:1], bootstrap=5)) is not None
