"""Rows, LoRA, prompt and retrieval on the same facts: each against a forward or a formula of its own."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engram_lab.models.errors import Cancelled, DataError, LabError
from engram_lab.models.grafting import graft
from engram_lab.models.handle import Handle
from engram_lab.models.weightfiles import module_fingerprint
from engram_lab.probes.base import Report
from engram_lab.probes.facts import alternatives
from engram_lab.probes.facts.alternatives import AlternativesConfig, StatedFact, Writing, prompts_of
from engram_lab.probes.facts.alternatives_result import (
    AS_FAR,
    CLOSED,
    NOTHING,
    OPTIMISED,
    PROMPT,
    RETRIEVAL,
    AlternativesResult,
    Drift,
    summarise,
)
from engram_lab.probes.facts.lora import train_adapters
from engram_lab.probes.facts.sets import encoded, recall_items, write
from tests.models import tiny

FACTS = (
    StatedFact("The river runs past", " the sea", ("Past the mill runs",)),
    StatedFact("Paris is the capital of", " France", ("The capital is", "Of Japan")),
    StatedFact("A tab and the old", " mill"),
)
TEXTS = ("The mill runs past the river", "Tokyo and Paris", "of the old sea, and into the mill")
RETRIEVED = ((0, 2), (1,), (2, 0), (0,), (), (1, 0), (), (2, 1), ())
LORA = {"ranks": (4, 2), "lora_steps": 6, "lora_rate": 0.02, "lora_stop": 0.01}
CONFIG = AlternativesConfig(("m",), FACTS, TEXTS, RETRIEVED, bootstrap=50, **LORA)  # type: ignore[arg-type]


def make(family: str = "llama", context: int = 128) -> Handle:
    model = tiny.make(family, max_position_embeddings=context, n_positions=context)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8.0)  # so that predictions are not all alike
    return graft(Handle(model, tiny.byte_level(), family), [1], rows_per_head=50, heads=2)


@pytest.fixture(scope="module")
def handle() -> Handle:
    return make()


@pytest.fixture(scope="module")
def report(handle: Handle) -> Report:
    return alternatives.run([handle], CONFIG)


def state(handle: Handle) -> Any:
    """All that an adapter could leave behind: weights, modules and their attributes, what is trained."""
    modules = [
        (name, type(own), sorted(vars(own)), len(own._forward_hooks)) for name, own in handle.model.named_modules()
    ]
    parameters = [(name, id(own), own.requires_grad, own.grad is None) for name, own in handle.model.named_parameters()]
    return module_fingerprint(handle.model), modules, parameters, handle.model.training, torch.get_rng_state().tolist()


def plainly(handle: Handle, ids: tuple[int, ...] | list[int]) -> Tensor:
    """Logits [pos, vocab] of one text by itself."""
    with handle.running():
        return handle.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()


def scored(logits: Tensor, answer: tuple[int, ...]) -> tuple[float, int]:
    """(probability, rank of the worst token) of an answer behind the last len(answer) positions."""
    own = logits[-len(answer) :].softmax(-1)
    places = [own[n].argsort(descending=True, stable=True).tolist().index(token) for n, token in enumerate(answer)]
    return float(np.prod([float(own[n, token]) for n, token in enumerate(answer)])), max(places)


def test_what_is_compared(report: Report) -> None:
    result = report.result
    assert result.methods == (
        NOTHING, CLOSED, OPTIMISED, "LoRA, rank 4", f"LoRA, rank 4{AS_FAR}", "LoRA, rank 2", f"LoRA, rank 2{AS_FAR}",
        PROMPT, RETRIEVAL,
    )  # fmt: skip
    assert result.prompts == (
        *(own.trigger for own in FACTS), "Past the mill runs", "The capital is", "Of Japan",
    )  # fmt: skip
    assert result.fact_of.tolist() == [0, 1, 2, 0, 1, 1] and result.n_prompts.tolist() == [3, 3]
    assert result.retrieved_own.tolist() == [True, True, True, True, False, True]
    assert result.seconds is None and result.facts_in_prompt == 3


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_recall_is_that_of_plain_forwards(family: str) -> None:
    """Of the model as it is, and behind the facts that are put before a prompt, without a cache."""
    handle = make(family)
    result = alternatives.run([handle], dataclasses.replace(CONFIG, ranks=(2,), lora_steps=1, bootstrap=5)).result
    lines = [handle.tokenizer(f"{own.trigger}{own.answer}.\n", add_special_tokens=False)["input_ids"] for own in FACTS]
    for p, (trigger, answer) in enumerate(encoded(handle, prompts_of(FACTS))):
        orders: dict[str, list[int]] = {NOTHING: [], PROMPT: [0, 1, 2], RETRIEVAL: list(RETRIEVED[p][::-1])}
        for name, order in orders.items():
            m = result.methods.index(name)
            before = [token for number in order for token in lines[number]]
            ids = [trigger[0], *before, *trigger[1:], *answer[:-1]]  # behind the start token
            chance, rank = scored(plainly(handle, ids), answer)
            assert result.probability[m, p] == pytest.approx(chance, rel=1e-4)
            assert result.rank[m, p] == rank
    assert result.extra_tokens[result.methods.index(PROMPT)] == sum(map(len, lines))


def test_rows_and_lora_are_read_like_everything_else(handle: Handle, report: Report) -> None:
    """Both against what trained them: a whole answer's probability from the mean loss of its tokens."""
    result = report.result
    for name, method in ((CLOSED, "closed_form"), (OPTIMISED, "optimised")):
        _, wrote = write(handle, FACTS, Writing(method=method))
        np.testing.assert_allclose(
            result.probability[result.methods.index(name), :3], wrote.probability_after, rtol=1e-3
        )
    names = [name for name in result.methods if name.startswith("LoRA")]
    tokens = result.answer_tokens[:3].sum()
    for name, losses in zip(names, result.lora_loss, strict=True):
        m = result.methods.index(name)
        assert -np.log(result.probability[m, :3]).sum() / tokens == pytest.approx(losses[-1], rel=1e-4)
        assert losses[-1] < losses[0]
    nothing = -np.log(result.probability[0, :3]).sum() / tokens
    assert all(losses[0] == pytest.approx(nothing, rel=1e-4) for losses in result.lora_loss)  # it starts as nothing


def test_lora_as_far_as_the_rows_stops_with_their_loss(handle: Handle, report: Report) -> None:
    _, wrote = write(handle, FACTS, Writing())
    for whole, early in zip(report.result.lora_loss[::2], report.result.lora_loss[1::2], strict=True):
        assert early == whole[: len(early)]
        assert all(loss > wrote.loss[-1] for loss in early[:-1])
        assert early[-1] <= wrote.loss[-1] or len(early) == 7


def test_the_gradient_of_lora_is_that_of_a_model_with_its_weights_changed(handle: Handle) -> None:
    """One step of Adam moves B by the rate against the gradient's sign; the twin is W + 2 B A, put in by hand."""
    coded = encoded(handle, recall_items(FACTS))
    (trained,) = train_adapters(handle, coded, (0.0,), rank=4, steps=2, rate=0.02)
    parts = trained.parameters()
    copy = make()
    with torch.no_grad():
        for name, weight in copy.model.named_parameters():
            path = name.removesuffix(".weight")
            if f"{path}.lora_A.default.weight" in parts:
                weight += 2 * parts[f"{path}.lora_B.default.weight"] @ parts[f"{path}.lora_A.default.weight"]
    ids = torch.tensor([coded[0][0]])
    with torch.no_grad():
        wanted = copy.model(ids).logits
        assert not torch.allclose(wanted, make().model(ids).logits, atol=1e-3)
    torch.testing.assert_close(trained.logits(ids), wanted, atol=1e-4, rtol=1e-4)
    assert len(parts) == 2 * 9 and all("_proj" in name for name in parts)  # q, k, v of three blocks


def test_bytes_by_hand(handle: Handle, report: Report) -> None:
    """q: 32 to 32, k and v: 32 to 16, in three blocks, A and B of float32; a file has a header before them."""
    coded = encoded(handle, recall_items(FACTS))
    for rank in (4, 2):
        (adapter,) = train_adapters(handle, coded, (0.1,), rank=rank, steps=0, rate=0.1)
        raw = adapter.to_bytes()
        header = 8 + int.from_bytes(raw[:8], "little")
        assert len(raw) - header == 3 * rank * ((32 + 32) + (32 + 16) + (32 + 16)) * 4
        assert report.result.bytes[report.result.methods.index(f"LoRA, rank {rank}")] == len(raw)
    overlay, _ = write(handle, FACTS, Writing())
    stored = dict(zip(report.result.methods, report.result.bytes.tolist(), strict=True))
    assert stored[OPTIMISED] == len(overlay.to_bytes()) and stored[NOTHING] == 0
    lines = "The river runs past the sea.\nParis is the capital of France.\nA tab and the old mill.\n"
    assert stored[PROMPT] == stored[RETRIEVAL] == len(lines)


def test_an_adapter_that_was_not_trained_changes_no_bit(handle: Handle) -> None:
    result = alternatives.run([handle], dataclasses.replace(CONFIG, lora_steps=0, bootstrap=5)).result
    for m, name in enumerate(result.methods):
        if name.startswith("LoRA"):
            assert result.changed[m] == result.size[m] == result.kl[m] == 0
            np.testing.assert_allclose(result.probability[m], result.probability[0], rtol=1e-6)


def test_unrelated_text_by_hand(handle: Handle, report: Report) -> None:
    """Losses, KL and bits of each text against a forward by itself; the padding of a batch may cost the last digits."""
    result = report.result
    coded = encoded(handle, recall_items(FACTS))
    (lora, _) = train_adapters(handle, coded, (0.01, 0.02), rank=4, steps=6, rate=0.02)
    m, rows = result.methods.index("LoRA, rank 4"), result.methods.index(OPTIMISED)
    losses = []
    for t, text in enumerate(TEXTS):
        ids = handle.encode(text)
        was, now = (own.log_softmax(-1) for own in (plainly(handle, ids), lora.logits(torch.tensor([ids]))[0].double()))
        places = range(1, len(ids) - 1)  # what the start token predicts is not scored
        nats = np.array([float(was[p, ids[p + 1]] - now[p, ids[p + 1]]) for p in places])
        losses += [-float(was[p, ids[p + 1]]) for p in places]
        assert result.tokens[t] == len(places) and result.positions[t] == len(places) + 1
        assert result.text_change[m, t] == pytest.approx(nats.sum(), abs=1e-4)
        assert result.text_size[m, t] == pytest.approx(np.abs(nats).sum(), abs=1e-4)
        kl = torch.nn.functional.kl_div(now[1:], was[1:], log_target=True, reduction="sum")
        assert result.text_kl[m, t] == pytest.approx(float(kl), abs=1e-4)
        assert result.text_changed[m, t] == len(ids) - 1
    assert result.loss == pytest.approx(np.mean(losses), rel=1e-5)
    size = result.text_size.sum(1) / result.tokens.sum()
    np.testing.assert_allclose(result.size, size)
    np.testing.assert_allclose(result.more[m], size[m] / size[rows])
    assert result.n_positions == sum(len(handle.encode(text)) - 1 for text in TEXTS)


def test_a_text_before_which_nothing_is_put_is_as_it_is(report: Report) -> None:
    m = report.result.methods.index(RETRIEVAL)
    assert report.result.text_changed[m].tolist() == [0, report.result.positions[1], 0]
    assert report.result.text_size[m, 0] == 0 < report.result.text_size[m, 1]


def test_rows_change_only_texts_that_read_them(handle: Handle, report: Report) -> None:
    from engram_lab.models.tables import addresses

    overlay, _ = write(handle, FACTS, Writing())
    m = report.result.methods.index(OPTIMISED)
    for t, text in enumerate(TEXTS):
        read = torch.isin(addresses(handle, [handle.encode(text)])[0, 0, 1:], overlay.layers[1].rows)
        first = int(read.any(-1).nonzero()[0]) if read.any() else len(read)
        assert report.result.text_changed[m, t] == len(read) - first  # from there on: attention carries it along


def test_means_and_intervals_by_hand() -> None:
    """Two facts, one of them with two paraphrases, and two texts; constant values have no width."""
    facts = (StatedFact("a", " b"), StatedFact("c", " d", ("e", "f")))
    config = AlternativesConfig(("m",), facts, ("x", "y"), ranks=(), bootstrap=400)
    methods = (NOTHING, CLOSED, OPTIMISED, "LoRA, rank 8")
    rank = np.array([[9, 9, 9, 9], [0, 4, 5, 0], [0, 3, 0, 1], [0, 0, 0, 0]])
    chance = np.log(np.array([[0.1] * 4, [0.2] * 4, [0.5, 0.25, 0.5, 0.1], [1.0] * 4]))
    tokens = np.array([3, 1])
    size = np.array([[0.0, 0.0], [0.3, 0.1], [0.6, 0.2], [6.0, 2.0]])
    drift = Drift(tokens, np.ones(2), -size, size, size * 10, (size > 0).astype(np.int64))
    found = summarise(config, chance, rank, drift, methods)
    np.testing.assert_allclose(found["top1"], [[0, 0.5, 0.5, 1], [0, 0.5, 0.5, 1]])
    np.testing.assert_allclose(found["top5"], [[0, 1, 1, 1], [0, 0.5, 1, 1]])
    np.testing.assert_allclose(found["mean"][:, 2], [0.375, 0.3])
    np.testing.assert_allclose(found["gap"][0], [-0.5, 0, 0, 0.5])
    assert (found["top1_low"][0, 2], found["top1_high"][0, 2]) == (0, 1)  # both draws of one fact are likely enough
    np.testing.assert_allclose(found["mean_low"][0, 3], 1)
    assert np.isnan(found["mean_low"][1]).all()  # only one fact has paraphrases
    np.testing.assert_allclose(found["size"], [0, 0.1, 0.2, 2.0])
    np.testing.assert_allclose(found["change"], [0, -0.1, -0.2, -2.0])
    np.testing.assert_allclose(found["kl"], size.sum(1) * 10 / 6)
    for end in ("", "_low", "_high"):  # each text has ten times what the rows have
        np.testing.assert_allclose(found[f"more{end}"], [0, 0.5, 1, 10])
    silent = dataclasses.replace(drift, size=size * np.array([[1], [1], [0], [1]]))
    assert np.isnan(summarise(config, chance, rank, silent, methods)["more"]).all()
    other = dataclasses.replace(config, writing=Writing(method="closed_form"))
    np.testing.assert_allclose(summarise(other, chance, rank, drift, methods)["more"], [0, 1, 2, 20])


STAGES = ("writing", "training LoRA of rank 4", "recall, LoRA", "recall, facts in", "unrelated text, facts retr")


@pytest.mark.parametrize(("family", "stages"), [("llama", STAGES), ("gpt2", STAGES[1:3])])
def test_the_model_is_as_before(family: str, stages: tuple[str, ...]) -> None:
    """With an adapter trained and read, and after a run that was cancelled in the middle of each stage."""
    handle = make(family)
    config = dataclasses.replace(CONFIG, ranks=(4,), lora_steps=2, bootstrap=5)
    handle.residuals([[1, 2, 3]])  # nnsight puts its own things around modules at the first trace
    write(handle, FACTS, Writing(steps=0))  # and the first overlay leaves an empty place for others
    before = state(handle)
    assert any(trained for _, _, trained, _ in before[2])
    told: list[tuple[float, str]] = []
    first = alternatives.run([handle], config, lambda done, what: told.append((done, what)))
    assert state(handle) == before
    assert [done for done, _ in told] == sorted(done for done, _ in told) and told[-1][0] == pytest.approx(1.0)
    for stage in stages:
        assert any(stage in what for _, what in told)

        def stop(done: float, what: str, stage: str = stage) -> None:
            if stage in what:
                raise Cancelled("enough")

        with pytest.raises(Cancelled):
            alternatives.run([handle], config, stop)
        assert state(handle) == before
    assert alternatives.run([handle], config).to_json() == first.to_json()


def test_the_same_request_gives_the_same_bits_whatever_was_drawn_before(handle: Handle, report: Report) -> None:
    torch.rand(3)
    again = alternatives.run([handle], CONFIG)
    assert again.to_json() == report.to_json()
    stored = json.loads(report.to_json())
    assert AlternativesConfig.from_dict(stored["config"]) == CONFIG
    assert AlternativesResult.from_dict(stored["result"]) == report.result
    other = alternatives.run([handle], dataclasses.replace(CONFIG, seed=1))
    assert other.result.lora_loss[0][-1] != report.result.lora_loss[0][-1]


def test_time_is_told_only_if_asked_for(handle: Handle) -> None:
    config = dataclasses.replace(CONFIG, time=True, lora_steps=1, bootstrap=5, retrieved=())
    result = alternatives.run([handle], config).result
    assert result.seconds is not None and (result.seconds[1:7] > 0).all() and np.isnan(result.seconds[[0, 7]]).all()
    assert RETRIEVAL not in result.methods


def test_a_prompt_too_long_for_the_context_holds_the_first_facts() -> None:
    handle = make(context=64)
    words = ("Paris and Tokyo", "A naïve river", "The old mill", "An old sea", "The capital")
    facts = tuple(StatedFact(f"{word} is the capital of the sea and of", " France") for word in words)
    config = dataclasses.replace(CONFIG, facts=facts, retrieved=(tuple(range(5)),) * 8, ranks=(), bootstrap=5)
    result = alternatives.run([handle], config).result
    coded = encoded(handle, recall_items(facts))
    lines = [handle.tokenizer(f"{own.trigger}{own.answer}.\n", add_special_tokens=False)["input_ids"] for own in facts]
    longest = max(*(len(a) + len(b) - 1 for a, b in coded), *(len(handle.encode(text)) for text in TEXTS))
    fitting = max(n for n in range(6) if sum(map(len, lines[:n])) + longest <= 64)
    assert result.facts_in_prompt == fitting < 5
    extra = dict(zip(result.methods, result.extra_tokens.tolist(), strict=True))
    assert extra[PROMPT] == extra[RETRIEVAL] == sum(map(len, lines[:fitting]))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"models": ("a", "b")}, "into one model, not 2"),
        ({"facts": ()}, "No fact was given"),
        ({"unrelated": ()}, "There is no unrelated text"),
        ({"ranks": (8, 8)}, "each named once"),
        ({"ranks": (0,)}, "1 or more"),
        ({"lora_rate": 0.0}, "rate of LoRA must be above 0"),
        ({"lora_steps": -1}, "from 0 to"),
        ({"retrieved": ((0,),)}, "are for 1 texts, but there are 9"),
        ({"retrieved": ((7,),) * 9}, "not one of the facts 0 to 2"),
    ],
)
def test_wrong_requests(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LabError, match=sentence):
        dataclasses.replace(CONFIG, **change)


def test_wrong_models_and_texts(handle: Handle) -> None:
    dense = Handle(tiny.make("llama"), tiny.byte_level(), "dense")
    with pytest.raises(LabError, match="dense has no Engram memory"):
        alternatives.run([dense], CONFIG)
    with pytest.raises(DataError, match="one token"):
        alternatives.run([handle], dataclasses.replace(CONFIG, unrelated=("a",), retrieved=()))
    coded = encoded(handle, recall_items(FACTS))
    with pytest.raises(LabError, match="lower the rate"):
        train_adapters(handle, coded, (0.0,), rank=2, steps=20, rate=1e30)
