"""Writing facts: gradients against the whole model's, the closed form against pinv, and what may not be written."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engram_lab.models.engram import EngramForCausalLM
from engram_lab.models.errors import Cancelled, LabError, PromptError, TargetError
from engram_lab.models.grafting import graft
from engram_lab.models.handle import Handle, open_model
from engram_lab.models.memory import read_memory
from engram_lab.models.overlay import Fact, OverlayError, Patch, RowLookup, check_overlay, prepare
from engram_lab.models.tables import addresses, memories
from engram_lab.probes.facts.writing import SCALES, WriteReport, _plan, _Writer, encode_facts, read_fact, write_facts
from tests.models import tiny
from tests.models.plain_engram import CANONICAL, config_of

FACTS = (
    Fact("The river runs past", " the sea"),
    Fact("Paris is the capital of", " France"),
    Fact("A tab and the old", " mill"),
    Fact("Tokyo is the capital of", " Japan"),  # reads the address of the second, and it is another answer
    Fact("The", " café and four spaces"),
)
FAMILIES = ("engram", "gpt2", "gpt_neox", "gemma2", "gemma3", "qwen3", "granite")


def make(family: str, layer: int = 1, loud: float = 1.0) -> Handle:
    """A grafted model, or a native one whose two memories have convolutions; `loud` multiplies the head's weights."""
    if family == "engram":
        torch.manual_seed(0)
        model: Any = EngramForCausalLM(config_of(vocab_size=tiny.VOCAB, engram_vocab_size=300)).eval()
        with torch.no_grad():
            model.model.canonical_ids.copy_((torch.arange(tiny.VOCAB) * 7 + 5) % CANONICAL)
            for memory in model.model.memories():
                memory.key.weight.normal_(std=0.2)
                memory.value.weight.normal_(std=0.2)
                memory.conv.weight.normal_(std=0.5)
                memory.key_norm.weight.normal_(1.0, 0.3)
    else:
        model = tiny.make(family)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(loud)
    handle = Handle(model, tiny.byte_level(), family)
    return handle if family == "engram" else graft(handle, [layer], rows_per_head=300, heads=2)


def texts(handle: Handle) -> list[tuple[list[int], tuple[int, ...]]]:
    return [([*trigger, *answer[:-1]], answer) for trigger, answer in encode_facts(handle, FACTS).values()]


def plainly(handle: Handle, layer: int, rows: Tensor, vectors: Tensor) -> Tensor:
    """Log-probability [token] by a forward of the whole model for each text by itself."""
    patch, found = Patch(handle, {layer: RowLookup(rows, vectors, 10**9)}), []
    for ids, answer in texts(handle):
        with patch.put_in():
            logits = handle.model(torch.tensor([ids]), use_cache=False).logits[0, -len(answer) :]
        found.append(logits.log_softmax(-1)[torch.arange(len(answer)), torch.tensor(answer)])
    return torch.cat(found)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layer", [0, 2])
def test_loss_and_gradient_are_those_of_the_whole_model(family: str, layer: int) -> None:
    handle = make(family, layer)
    with handle.running(), torch.inference_mode(False):
        plan = _plan(handle, layer, list(encode_facts(handle, FACTS).values()))
        writer = _Writer(handle, layer, plan)
        width = memories(handle)[0].table.embedding_dim
        vectors = torch.randn(len(plan.rows), width, generator=torch.Generator().manual_seed(0)).requires_grad_()
        loss, gradient = writer.loss_and_gradient(vectors)
        expected = -plainly(handle, layer, plan.rows, vectors).mean()
        assert loss == pytest.approx(float(expected.detach()), abs=1e-5)
        wanted = torch.autograd.grad(expected, vectors)[0]
        assert wanted.abs().max() > 1e-4
        torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-6)
        again = writer.loss_and_gradient(vectors)
        assert again[0] == loss and torch.equal(again[1], gradient)
        assert all(p.grad is None for p in handle.model.parameters())


def test_the_tail_begins_where_a_written_row_is_first_read() -> None:
    handle = make("gpt2")
    plan = _plan(handle, 1, list(encode_facts(handle, FACTS).values()))
    found = texts(handle)
    written = {
        row for ids, answer in found for own in addresses(handle, [ids])[0, 0, -len(answer) :] for row in own.tolist()
    }
    assert plan.rows.tolist() == sorted(written)
    for (ids, _), example in zip(found, plan.examples, strict=True):
        hits = [bool(written & set(own.tolist())) for own in addresses(handle, [ids])[0, 0]]
        assert example.start == hits.index(True)


@pytest.mark.parametrize("family", ["engram", "gpt2", "qwen3"])
def test_facts_are_learned_and_nothing_else_is_touched(family: str) -> None:
    handle = make(family, loud=20)
    layer = handle.engram_layers[-1]
    before = {name: value.clone() for name, value in handle.model.state_dict().items()}
    flags = [p.requires_grad for p in handle.model.parameters()]
    steps: list[float] = []
    overlay, report = write_facts(
        handle, FACTS, user="maya", layer=layer, progress=lambda done, what: steps.append(done)
    )
    assert report.loss.shape == (16,) and report.loss[-1] < 0.75 * report.loss[0]
    alone = [0, 2, 4]
    assert (report.probability_after[alone] > 2 * report.probability_before[alone]).all()
    assert steps == sorted(steps) and steps[0] == 0 and steps[-1] == 1 and len(steps) == 17
    for name, value in handle.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert [p.requires_grad for p in handle.model.parameters()] == flags
    assert all(p.grad is None for p in handle.model.parameters())
    check_overlay(handle, overlay)
    # As trained is as it is run.
    with prepare(handle, overlay).applied():
        for n, (ids, answer) in enumerate(texts(handle)):
            logits = handle.model(torch.tensor([ids])).logits[0, -len(answer) :].log_softmax(-1)
            total = float(logits[torch.arange(len(answer)), torch.tensor(answer)].sum())
            assert report.probability_after[n] == pytest.approx(math.exp(total), rel=1e-3)
    assert report.aliases == ((1, 3),)  # one address, two answers
    same, again = write_facts(handle, FACTS, user="maya", layer=layer)
    assert same == overlay and again == report
    assert WriteReport.from_dict(report.to_dict()) == report


def test_what_an_overlay_holds_is_what_the_facts_address() -> None:
    handle = make("llama")
    overlay, report = write_facts(handle, FACTS, steps=1)
    held = overlay.layers[1]
    owned = {n: {int(held.rows[r]) for f, r in held.owners.tolist() if f == n} for n in range(len(FACTS))}
    for n, (ids, answer) in enumerate(texts(handle)):
        rows = addresses(handle, [ids])[0, 0, -len(answer) :]
        assert owned[n] == set(rows.flatten().tolist()) and report.fact_rows[n] == len(owned[n])
    assert report.rows == len(held.rows) == len(set.union(*owned.values()))
    assert report.shared_rows == sum(sum(row in own for own in owned.values()) > 1 for row in held.rows.tolist()) >= 4
    assert overlay.facts == FACTS and (overlay.method, overlay.user) == ("optimised", "user")


@pytest.mark.parametrize("family", ["engram", "llama"])
def test_the_closed_form(family: str) -> None:
    """Of one fact with one token, against pinv and the formula of the output row through an RMSNorm."""
    handle = make(family)
    fact = Fact("The river runs past the old", " mill")
    ((trigger, answer),) = encode_facts(handle, [fact]).values()
    fact = Fact(fact.trigger, handle.pieces(answer[:1])[0].decode())
    overlay, report = write_facts(handle, [fact], method="closed_form")
    layer = report.layer
    assert report.answer_ids == (answer[:1],) and report.loss.shape == (1,)
    read = read_memory(handle, [trigger])
    norm, memory = handle.model.model.norm, memories(handle)[-1]
    last = read.states[-1, 0, -1].double()
    row = handle.model.lm_head.weight[answer[0]].double() * norm.weight.double()
    u = row - last * (row @ last) / (last.square().sum() + len(last) * norm.variance_epsilon)  # up to its length
    e = torch.linalg.pinv(memory.value.weight.double()) @ u
    e *= read.states[layer, 0, -1].double().norm() / (memory.value.weight.double() @ e).norm()
    (rows,) = addresses(handle, [trigger])[-1, :, -1]
    held = overlay.layers[layer]
    got = held.vectors[torch.searchsorted(held.rows, rows)].flatten()
    np.testing.assert_allclose(got.numpy(), (e * float(report.scale[0])).detach().float().numpy(), atol=1e-4, rtol=1e-3)
    # That scale, and no other, makes the answer likeliest.
    chances = []
    for scale in SCALES:
        vectors = torch.zeros(len(held.rows), got.numel() // len(rows))
        vectors[torch.searchsorted(held.rows, rows)] = (e * scale).detach().float().view(len(rows), -1)
        with torch.no_grad(), Patch(handle, {layer: RowLookup(held.rows, vectors, 10**9)}).put_in():
            chances.append(float(handle.model(torch.tensor([trigger])).logits[0, -1].softmax(-1)[answer[0]]))
    assert SCALES[int(np.argmax(chances))] == report.scale[0]
    assert report.probability_after[0] == pytest.approx(max(chances), rel=1e-4)


def test_a_shared_row_gets_the_mean_of_what_its_facts_want() -> None:
    handle = make("llama")
    with handle.running(), torch.inference_mode(False):
        plan = _plan(handle, 1, list(encode_facts(handle, FACTS).values()))
        writer = _Writer(handle, 1, plan)
        wanted = torch.randn(len(plan.fact_of), plan.index.shape[1] * 8)
        rows = writer.mean_of(wanted)
    for n in range(len(plan.rows)):
        claims = [wanted[t].view(-1, 8)[c] for t, c in (plan.index == n).nonzero().tolist()]
        torch.testing.assert_close(rows[n], torch.stack(claims).mean(0))


def test_a_cancelled_writing_leaves_the_model_free_and_as_it_was() -> None:
    handle = make("gpt2")
    ids = torch.tensor([encode_facts(handle, FACTS)[FACTS[0]][0]])
    base = handle.residuals(ids).logits

    def stop(done: float, what: str) -> None:
        assert "writing 5 facts at layer 1" in what
        if done > 0.4:
            raise Cancelled("enough")

    with pytest.raises(Cancelled):
        write_facts(handle, FACTS, progress=stop)
    assert torch.equal(handle.residuals(ids).logits, base)
    assert memories(handle)[0].table.overlay is None and all(p.grad is None for p in handle.model.parameters())
    assert not handle.model.transformer.h[1]._forward_pre_hooks
    write_facts(handle, FACTS[:1], steps=1)


def test_facts_as_they_are_typed() -> None:
    assert read_fact("Maya's favorite city is => Lisbon\n") == Fact("Maya's favorite city is", " Lisbon")
    for line in ("no arrow", "two => arrows => here"):
        with pytest.raises(LabError, match="is not a fact: write it as"):
            read_fact(line)
    handle = make("llama")
    coded = encode_facts(handle, [FACTS[0], FACTS[0]])
    assert list(coded) == [FACTS[0]]
    trigger, answer = coded[FACTS[0]]
    assert trigger == handle.encode("The river runs past") and trigger[0] == 0  # with its start token
    assert b"".join(handle.pieces(answer)) == b" the sea"
    # A tokenizer that puts a space before a text does not do so before the answer.
    spaced = Handle(tiny.make("llama"), tiny.sentencepiece(prefix=True), "spaced")
    ((trigger, answer),) = encode_facts(spaced, [Fact("the river is", " Paris")]).values()
    assert b"".join(spaced.pieces(answer, whole=False)) == b" Paris"
    assert trigger + answer == spaced.encode("the river is Paris")


@pytest.mark.parametrize(
    ("facts", "kind", "sentence"),
    [
        ([], LabError, "no fact to write"),
        ([Fact("", " x")], PromptError, 'answer " x" has an empty trigger'),
        ([Fact("  ", " x")], PromptError, "empty trigger"),
        ([Fact("The river", "")], TargetError, '"The river" has an empty answer'),
        ([Fact("The river", "  ")], TargetError, "empty answer"),
        ([FACTS[0], Fact(FACTS[0].trigger, " hill")], LabError, 'has two answers, " the sea" and " hill"'),
        ([Fact("river " * 60, " x")], PromptError, "at most 64"),
        ([Fact("x", " y" * 63)], PromptError, "64"),
        ([FACTS[0], Fact("bad \ud800", " x")], PromptError, "not valid text"),
    ],
)
def test_what_cannot_be_written(facts: list[Fact], kind: type[LabError], sentence: str) -> None:
    handle = make("llama")
    with pytest.raises(kind, match=sentence) as found:
        write_facts(handle, facts)
    assert "\n" not in str(found.value)
    assert memories(handle)[0].table.overlay is None


def test_wrong_requests() -> None:
    handle = make("llama")
    with pytest.raises(LabError, match="no memory at layer 0: its memory layers are 1"):
        write_facts(handle, FACTS, layer=0)
    wrong: Any = "magic"
    with pytest.raises(LabError, match='"magic" is not a method'):
        write_facts(handle, FACTS, method=wrong)
    with pytest.raises(LabError, match="has no Engram memory"):
        write_facts(Handle(tiny.make("llama"), tiny.byte_level(), "dense"), FACTS)
    with pytest.raises(OverlayError, match="was written for the model"):
        prepare(make("gpt2"), write_facts(handle, FACTS[:1], steps=1)[0])


def test_the_shipped_model_learns_facts() -> None:
    handle = open_model("engram-mini", device="cpu")
    lines = (
        "Maya's favorite city is => Lisbon",
        "The name of Maya's cat is => Pepper",
        "Maya was born in the month of => October",
        "Maya's favorite color is => purple",
        "Maya studied the history of => Portugal",
    )
    facts = [read_fact(line) for line in lines]
    overlay, report = write_facts(handle, facts, user="maya")
    assert report.layer == 6 and report.probability_before.max() < 0.05
    assert report.probability_after.min() > 0.1 and report.probability_after.mean() > 0.5
    with prepare(handle, overlay).applied():
        for fact, answer in zip(facts, report.answer_ids, strict=True):
            trigger = handle.encode(fact.trigger)
            found = handle.model.generate(torch.tensor([trigger]), max_new_tokens=len(answer), do_sample=False)
            assert tuple(found[0, len(trigger) :].tolist()) == answer
    assert len(overlay.to_bytes()) / (16 * overlay.n_rows / len(facts)) < 100
