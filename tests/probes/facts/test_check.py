"""Facts written and checked: gates and directions from the formulas, scores from what was asked."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engram_lab.models.errors import Cancelled, LabError, PromptError
from engram_lab.models.handle import Handle, open_model
from engram_lab.models.overlay import Overlay, OverlayError, prepare
from engram_lab.models.tables import memories
from engram_lab.probes.base import Report
from engram_lab.probes.facts import check as fact_check
from engram_lab.probes.facts.check import CheckConfig, CheckResult, measure, output_rows
from engram_lab.probes.facts.sets import StatedFact, Writing, write
from tests.models import tiny
from tests.probes.facts.test_locality import TEXTS
from tests.probes.facts.test_sets import FACTS
from tests.probes.facts.test_sets import handle as handle  # the fixture
from tests.probes.facts.test_sets import overlay as overlay
from tests.probes.facts.test_writing import make

CONFIG = CheckConfig(("llama",), FACTS, Writing("maya", layer=1), TEXTS, bootstrap=50)


@pytest.fixture(scope="module")
def report(handle: Handle) -> Report:
    told: list[float] = []
    made = fact_check.run([handle], CONFIG, lambda done, what: told.append(done))
    assert told == sorted(told) and told[0] == 0 and told[-1] == 1
    return made


def test_it_is_the_same_each_time_and_goes_to_json(handle: Handle, overlay: Overlay, report: Report) -> None:
    result = report.result
    assert fact_check.run([handle], CONFIG) == report
    assert CheckResult.from_dict(result.to_dict()) == result and CheckConfig.from_dict(CONFIG.to_dict()) == CONFIG
    assert report.protocol.prompt_ids == (tuple(handle.encode(own.trigger) for own in FACTS),)
    assert (result.layer, result.rows, result.overlay_bytes) == (1, overlay.n_rows, len(overlay.to_bytes()))
    # An overlay that is there already is measured alike, but for how it was written.
    assert replace(measure(handle, overlay, CONFIG), writing=result.writing) == result


def test_scores_are_means_of_what_was_asked(report: Report) -> None:
    result: CheckResult = report.result
    scores = {own.name: own for own in result.scores}
    for name, asked, field in (
        ("top-1", result.facts, "top1"),
        ("top-5", result.facts, "top5"),
        ("probability", result.facts, "probability"),
        ("efficacy", result.facts, "wins"),
        ("paraphrase", result.paraphrases, "wins"),
        ("paraphrase top-1", result.paraphrases, "top1"),
        ("composition top-1", result.compositions, "top1"),
        ("alias top-1", result.aliases, "top1"),
    ):
        for when in ("before", "after"):
            values = getattr(asked, f"{field}_{when}")
            if len(values):
                assert getattr(scores[name], when) == pytest.approx(np.nanmean(values), rel=1e-6), name
    assert scores["same answer"].before == 1 and scores["same answer"].after == result.neighbours.same_top.mean()
    assert (scores["paraphrase"].n, scores["specificity"].n, scores["same answer"].n) == (3, 2, 3)
    assert scores["top-1"].after > scores["top-1"].before == 0
    # A forward that hits none of the rows has the same bits, and a trigger reads all of its own.
    width = memories_width(report)
    assert (result.facts.edited_reads == width).all() and (result.aliases.edited_reads == width).all()
    untouched = np.flatnonzero(result.neighbours.same_bits)
    assert (result.neighbours.kl[untouched] == 0).all()


def memories_width(report: Report) -> int:
    """order*head."""
    return len(report.result.locality.reads_histogram) - 1


def kept_in(kept: dict[str, torch.Tensor], name: str, module: torch.nn.Module) -> Any:
    return module.register_forward_hook(lambda m, i, o: kept.__setitem__(name, o))


@pytest.mark.parametrize("family", ["engram", "gpt2"])
def test_gates_and_directions_from_the_formulas(family: str) -> None:
    handle = make(family, loud=20)
    facts = tuple(StatedFact(own.trigger, own.answer) for own in FACTS)
    overlay, _ = write(handle, facts, Writing(steps=3))
    config = CheckConfig((family,), facts, Writing(steps=3), bootstrap=5)
    result = measure(handle, overlay, config)
    layer = result.layer
    memory = memories(handle)[-1]
    assert layer == handle.engram_layers[-1]
    for n, own in enumerate(facts):
        ids = torch.tensor([handle.encode(own.trigger)])
        kept: dict[str, torch.Tensor] = {}
        hooks = [kept_in(kept, name, getattr(memory, name)) for name in ("gate", "written", "value")]
        with handle.running():
            handle.model(ids)
            before = float(kept["gate"][0, -1, 0])
            with prepare(handle, overlay).applied():
                handle.model(ids)
        for hook in hooks:
            hook.remove()
        assert result.gate_before[n] == pytest.approx(before, abs=1e-6)
        assert result.gate_after[n] == pytest.approx(float(kept["gate"][0, -1, 0]), abs=1e-6)
        written, value = kept["written"][0, -1].double(), kept["value"][0, -1].double()
        assert result.cos_value[n] == pytest.approx(float(written @ value / written.norm() / value.norm()), abs=1e-5)
        assert result.written_norm[n] == pytest.approx(float(written.norm()), rel=1e-5)
    root = math.sqrt(math.sqrt(handle.d_model))
    assert result.gate_ceiling == pytest.approx(1 / (1 + math.exp(-root)))
    assert result.gate_after.max() <= result.gate_ceiling_learned + 1e-6
    if family == "gpt2":  # without a convolution what is written is the gated value
        assert result.cos_value == pytest.approx(1, abs=1e-5)


def test_the_output_row_is_seen_through_the_final_norm() -> None:
    """Of an RMSNorm: d logit / d h = (w*g - h (w*g @ h) / (d mean_square)) / rms."""
    handle = Handle(tiny.make("llama"), tiny.byte_level(), "llama")
    last = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    rows = output_rows(handle, last, torch.tensor([5, 9]))
    norm, head = handle.model.model.norm, handle.model.lm_head.weight
    for h, token, got in zip(last.double(), (5, 9), rows, strict=True):
        w = head[token].double() * norm.weight.double()
        square = h.square().mean() + norm.variance_epsilon
        expected = (w - h * (w @ h) / (len(h) * square)) / square.sqrt()
        np.testing.assert_allclose(got.numpy(), expected.detach().numpy(), atol=1e-5)


def test_bad_requests_are_one_sentence(handle: Handle, overlay: Overlay) -> None:
    more = replace(CONFIG, facts=(*FACTS, StatedFact("Rome is", " old")))
    with pytest.raises(LabError, match=r'does not hold "Rome is old": write the facts again\.'):
        measure(handle, overlay, more)
    other = make("gpt2")
    with pytest.raises(OverlayError, match="was written for the model"):
        measure(other, overlay, CONFIG)
    for facts, sentence in (
        ((StatedFact(" ", " a"),), "empty trigger"),
        ((StatedFact("The", " "),), "empty answer"),
        ((StatedFact("The", " a", neighbours=(FACTS[0].neighbours[0],), paraphrases=("",)),), "empty trigger"),
    ):
        with pytest.raises(LabError, match=sentence):
            fact_check.run([handle], CheckConfig(("llama",), facts))
    with pytest.raises(PromptError, match=r"takes at most 64|longer than the 64"):
        fact_check.run([handle], replace(CONFIG, texts=("the " * 100,)))
    with pytest.raises(LabError, match="no Engram memory"):
        fact_check.run([Handle(tiny.make("llama"), tiny.byte_level(), "bare")], CONFIG)


def test_cancelling_leaves_the_model_as_it_was(handle: Handle) -> None:
    ids = torch.tensor([handle.encode(FACTS[0].trigger)])
    bare = handle.residuals(ids).logits

    def stop(done: float, what: str) -> None:
        if done > 0.7:
            raise Cancelled(what)

    with pytest.raises(Cancelled):
        fact_check.run([handle], CONFIG, stop)
    assert torch.equal(handle.residuals(ids).logits, bare)


def test_three_facts_of_the_persona_on_the_shipped_model() -> None:
    from engram_lab.lab.ask.facts import persona

    handle, facts = open_model("engram-mini"), persona()[10:13]
    result = fact_check.run([handle], CheckConfig(("engram-mini",), facts, Writing("maya"), TEXTS, bootstrap=50)).result
    scores = {own.name: own for own in result.scores}
    assert result.layer == 6 and scores["top-1"].after >= 2 / 3 and scores["top-1"].before == 0
    assert scores["alias top-1"].n and all(check.equal == check.compared for check in result.locality.checks)
