"""The CKA probe on tiny models: each number from hidden states that transformers itself gives."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch

from engram_lab.lab.fronts import cka_figures, front
from engram_lab.models.errors import Cancelled, LabError, PromptError
from engram_lab.models.handle import Handle
from engram_lab.probes import cka, cka_math
from engram_lab.probes.base import Report
from engram_lab.probes.cka import CKAConfig, CKAResult, looks_like, run
from tests.models import tiny
from tests.probes.test_cka_math import brute, brute_biased

TEXTS = (
    "The river runs past the old mill.",
    "Paris is the capital of France.",
    "and Tokyo (東京) that of Japan",
    "A naïve café, and the sea.",
    "Japan runs into the sea",
    "The old river is past Paris, France.",
)
NAMES = (("river", "mill"), ("Paris", "France"), ("Tokyo", "Japan"), ("café", "sea"), ("Japan", "sea"), ("Paris",))
ENTITIES = tuple(
    tuple((text.index(name), text.index(name) + len(name)) for name in names)
    for text, names in zip(TEXTS, NAMES, strict=True)
)


@pytest.fixture(scope="module")
def pair() -> list[Handle]:
    """Two models with one tokenizer, of different depths."""
    tokenizer = tiny.byte_level()
    deep = tiny.make("llama", seed=1, num_hidden_layers=4)
    return [Handle(tiny.make("llama"), tokenizer, "three"), Handle(deep, tokenizer, "four")]


def config_of(handles: list[Handle], **options: Any) -> CKAConfig:
    fields: dict[str, Any] = {"prompts": TEXTS, "entities": ENTITIES, "bootstrap": 60} | options
    return CKAConfig(tuple(h.name for h in handles), **fields)


@pytest.fixture(scope="module")
def report(pair: list[Handle]) -> Report:
    return run(pair, config_of(pair))


def states(handle: Handle, text: str) -> torch.Tensor:
    """[layer, pos, d_model] by transformers; its last hidden state has been through the norm, so it is left out."""
    with torch.inference_mode():
        out = handle.model(torch.tensor([handle.encode(text)]), output_hidden_states=True, use_cache=False)
    return torch.cat(out.hidden_states[:-1])


# Of each entity its sentence, and the text up to its last character.
AT = [
    (n, text[: text.index(name) + len(name)])
    for n, (text, names) in enumerate(zip(TEXTS, NAMES, strict=True))
    for name in names
]


def points_of(handle: Handle) -> torch.Tensor:
    """[point, layer, d_model] of the last token of each entity, in float64."""
    rows = []
    for n, head in AT:
        ids, held = handle.encode(TEXTS[n]), states(handle, TEXTS[n])
        decoded = [handle.tokenizer.decode(ids[: k + 1], skip_special_tokens=True) for k in range(len(ids))]
        rows.append(held[:, decoded.index(head)])
    return torch.stack(rows).double()


def test_every_pair_against_transformers(pair: list[Handle], report: Report) -> None:
    result: CKAResult = report.result
    points = [points_of(handle) for handle in pair]
    assert result.n_points == len(AT) == 11 and result.n_sentences == 6 and result.n_dropped == 0
    assert result.sentence.tolist() == [n for n, _ in AT]
    assert (result.layers_a, result.layers_b) == (pair[0].layer_names, pair[1].layer_names)
    for i in range(points[0].shape[1]):
        for j in range(points[1].shape[1]):
            x, y = points[0][:, i], points[1][:, j]
            assert result.cka[i, j] == pytest.approx(brute(x, y), abs=1e-5)
            assert result.biased[i, j] == pytest.approx(brute_biased(x, y), abs=1e-5)


def test_the_last_layer_is_the_last_residual(pair: list[Handle], report: Report) -> None:
    """Not the normed one, which transformers calls its last hidden state."""
    handle = pair[0]
    with handle.running():
        held = handle.residuals([handle.encode(TEXTS[0])])
        assert torch.equal(handle.unembed(held.states[-1]), held.logits)
    assert report.result.cka.shape == (4, 5)


def test_alignment_and_reading(report: Report) -> None:
    result = report.result
    by_hand = []
    for row in result.cka:
        best = sorted(range(5), key=lambda j: -row[j])[:5]
        weights = [max(row[j], 0) for j in best]
        by_hand.append(sum(w * (j - 1) for w, j in zip(weights, best, strict=True)) / sum(weights))
    np.testing.assert_allclose(result.alignment_a, by_hand, rtol=1e-12)
    assert result.lead is None and result.mean_lead is None, "the depths differ"
    said = looks_like(report, "1")
    low, high = result.alignment_a_low[2], result.alignment_a_high[2]
    assert said == (
        f"Layer 1 of three looks like layer {by_hand[2]:.1f} of four (95 % interval {low:.1f} to {high:.1f})."
    )
    assert looks_like(report, "embed", of=1).startswith("Layer embed of four looks like layer ")


def test_intervals(pair: list[Handle], report: Report) -> None:
    result = report.result
    for field in ("cka", "alignment_a", "alignment_b"):
        low, value, high = (getattr(result, field + end) for end in ("_low", "", "_high"))
        assert (low <= high).all() and (low < high).any()
        assert ((low <= value) & (value <= high)).mean() > 0.8
    other = run(pair, config_of(pair, seed=1)).result
    assert np.array_equal(other.cka, result.cka) and not np.array_equal(other.cka_low, result.cka_low)
    one = run(pair, CKAConfig(("three", "four"), TEXTS[:1], points="all")).result
    assert one.cka_low is None and one.alignment_a_low is None


def test_a_model_with_itself_and_its_twin(pair: list[Handle]) -> None:
    a = pair[0]
    twin = Handle(tiny.make("llama"), tiny.byte_level(), "twin")
    itself = run([a, a], config_of([a, a], points="all", entities=None))
    other = run([a, twin], config_of([a, twin], points="all", entities=None))
    result = itself.result
    np.testing.assert_allclose(np.diag(result.cka), 1, atol=1e-6)
    np.testing.assert_allclose(result.cka, result.cka.T, atol=1e-6)
    np.testing.assert_allclose(result.lead, 0, atol=1e-5)
    assert abs(result.mean_lead) < 1e-5 and abs(result.mean_lead_high) < 1e-5
    np.testing.assert_allclose(other.result.cka, result.cka, atol=1e-6)
    assert cka.names_of(itself.config) == ("three (A)", "three (B)")
    assert "of three (A) looks like" in looks_like(itself, "0")


def test_the_lead_is_that_of_a_shifted_copy(pair: list[Handle]) -> None:
    """A whose layer k is B's layer k + 1 leads by one block: by hand from the definition."""
    a, b = pair[0], Handle(tiny.make("llama", seed=5), tiny.byte_level(), "three b")
    result = run([a, b], config_of([a, b], points="all", entities=None)).result
    np.testing.assert_allclose(result.lead, (result.alignment_a - result.alignment_b) / 2, rtol=1e-12)
    assert result.mean_lead == pytest.approx(result.lead[1:].mean())
    back = run([b, a], config_of([b, a], points="all", entities=None)).result
    np.testing.assert_allclose(back.cka, result.cka.T, atol=1e-6)
    np.testing.assert_allclose(back.lead, -result.lead, atol=1e-5)
    assert back.mean_lead_low == pytest.approx(-result.mean_lead_high, abs=1e-4)


def test_two_tokenizers(pair: list[Handle]) -> None:
    other = Handle(tiny.make("gemma2", num_hidden_layers=2, layer_types=["full_attention"] * 2),
                   tiny.sentencepiece(False), "pieces")  # fmt: skip
    texts = ("the river Paris", "Paris is the rest", "the rest is the river")
    result = run([pair[0], other], CKAConfig(("three", "pieces"), texts, points="all")).result
    for n, text in enumerate(texts):
        at = result.sentence == n
        for a, b in zip(result.pos_a[at], result.pos_b[at], strict=True):
            ends = [
                len(h.tokenizer.decode(h.encode(text)[: p + 1], skip_special_tokens=True))
                for h, p in ((pair[0], a), (other, b))
            ]
            assert ends[0] == ends[1]
    x = torch.stack([states(pair[0], texts[n])[1, p] for n, p in zip(result.sentence, result.pos_a, strict=True)])
    y = torch.stack([states(other, texts[n])[0, p] for n, p in zip(result.sentence, result.pos_b, strict=True)])
    assert result.cka[1, 0] == pytest.approx(brute(x, y), abs=1e-5)


def test_two_sets_of_texts(pair: list[Handle]) -> None:
    a = pair[0]
    other = tuple(text.replace("the", "a") for text in TEXTS)
    result = run([a, a], CKAConfig(("three", "three"), TEXTS, None, "last", other)).result
    x = torch.stack([states(a, text)[2, -1] for text in TEXTS])
    y = torch.stack([states(a, text)[3 - 1, -1] for text in other])
    assert result.cka[2, 2] == pytest.approx(brute(x, y), abs=1e-5)
    assert result.n_points == 6 and result.pos_a.tolist() == [len(a.encode(t)) - 1 for t in TEXTS]
    assert result.pos_b.tolist() == [len(a.encode(t)) - 1 for t in other]


def test_a_constant_layer_is_named_and_left_out(pair: list[Handle]) -> None:
    """Where all texts end in the same token, the embeddings there are equal."""
    texts = tuple(text.rstrip(".") + "." for text in TEXTS)
    result = run(pair, CKAConfig(("three", "four"), texts, None, "last")).result
    assert result.constant_a == ("embed",) and result.constant_b == ("embed",)
    assert result.layers_a == ("0", "1", "2") and result.layers_b == ("0", "1", "2", "3")
    assert np.isfinite(result.cka).all() and np.isfinite(result.biased).all()
    assert (result.alignment_a >= 0).all(), "embed takes no part in the alignment"
    with pytest.raises(LabError, match=r"Every layer of three is the same at all 6 points"):
        run(pair, CKAConfig(("three", "four"), ("the river",) * 6, None, "last"))


def test_large_sets_go_to_disk_in_pieces(pair: list[Handle], report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cka, "SPOOL_BYTES", 100)
    monkeypatch.setattr(cka, "CHUNK", 3)
    monkeypatch.setattr(cka_math, "CROSS_BYTES", 1)
    again = run(pair, config_of(pair)).result
    np.testing.assert_allclose(again.cka, report.result.cka, atol=1e-5)
    # Where a draw of a few points has nearly no variance, a bound is a quotient of small numbers, here -6.4: as much
    # of the value itself then, as another order of sums (other pieces, another ATEN_CPU_CAPABILITY) gives 5e-5 of it.
    np.testing.assert_allclose(again.cka_low, report.result.cka_low, atol=1e-4, rtol=2e-4)
    np.testing.assert_allclose(again.biased, report.result.biased, atol=1e-5)


def test_json_and_back(report: Report, pair: list[Handle]) -> None:
    stored = json.loads(report.to_json())
    assert Report.from_dict(stored) == report
    assert len(stored["result"]["cka"]) == 4 and len(stored["result"]["cka"][0]) == 5
    assert run(pair, config_of(pair)).to_json() == report.to_json()
    assert stored["protocol"]["prompt_ids"][1][0] == list(pair[1].encode(TEXTS[0]))


def test_each_model_sees_each_sentence_once(pair: list[Handle], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    whole = Handle.residuals

    def counted(self: Handle, ids: Any, mask: Any = None) -> Any:
        seen.append(len(ids))
        return whole(self, ids, mask)

    monkeypatch.setattr(Handle, "residuals", counted)
    run(pair, config_of(pair))
    assert sum(seen) == 2 * len(TEXTS)
    seen.clear()
    run([pair[0]] * 2, config_of([pair[0]] * 2))
    assert sum(seen) == len(TEXTS)
    seen.clear()
    run(pair, config_of(pair, entities=(*ENTITIES[:3], (), (), ())))
    assert sum(seen) == 6, "a sentence without a point is not run"


def test_cancelling_and_progress(pair: list[Handle], report: Report) -> None:
    told: list[float] = []
    run(pair, config_of(pair), lambda fraction, _: told.append(fraction))
    assert told == sorted(told) and told[-1] == pytest.approx(1) and told[0] > 0
    for stop_at in (0.0, 0.7):

        def stop(fraction: float, doing: str, stop_at: float = stop_at) -> None:
            if fraction > stop_at:
                raise Cancelled

        with pytest.raises(Cancelled):
            run(pair, config_of(pair), stop)
    assert run(pair, config_of(pair)).to_json() == report.to_json()


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"prompts": ()}, PromptError, "No prompt"),
        ({"points": "first"}, LabError, '"first"; they must be entity, all or last'),
        ({"seed": -1}, LabError, "seed"),
        ({"bootstrap": 0}, LabError, "resamples"),
        ({"entities": None}, PromptError, "No entity is marked"),
        ({"entities": ((),) * 6}, PromptError, "No entity is marked"),
        ({"entities": ENTITIES[:2]}, PromptError, "6 prompts and entities of 2"),
        ({"entities": (((0, 99),), *ENTITIES[1:])}, PromptError, r"\[0, 99\) is not within the 33 characters"),
        ({"entities": (((3, 3),), *ENTITIES[1:])}, PromptError, "sentence 1"),
        ({"prompts_b": TEXTS}, LabError, 'choose the points "last"'),
        ({"prompts_b": TEXTS[:2], "points": "last"}, PromptError, "6 and 2 texts"),
        ({"prompts": ("x y " * 80,), "points": "all", "entities": None}, PromptError, "64"),
        ({"prompts": TEXTS[:3], "points": "last", "entities": None}, LabError, "at least 4 points, and these texts"),
    ],
)
def test_bad_requests_are_one_sentence(
    pair: list[Handle], options: dict[str, Any], error: type[LabError], says: str
) -> None:
    with pytest.raises(error, match=says) as caught:
        run(pair, config_of(pair, **options), lambda *_: pytest.fail("work was done"))
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_two_models_are_needed(pair: list[Handle]) -> None:
    with pytest.raises(LabError, match="two models, and 1 are named"):
        CKAConfig(("three",), TEXTS)
    with pytest.raises(LabError, match="names 2 models, and 1 were given"):
        run(pair[:1], config_of(pair))


def test_bfloat16(pair: list[Handle], report: Report) -> None:
    half = Handle(tiny.make("llama").bfloat16(), tiny.byte_level(), "half")
    result = run([half, pair[1]], config_of([half, pair[1]])).result
    points = [points_of(handle) for handle in (half, pair[1])]
    by_hand = [[brute(x, y) for y in points[1].unbind(1)] for x in points[0].unbind(1)]
    # The rounding of the states is in both; what the probe then computes is not rounded. transformers does not give
    # the last residual, so its row and column are held against those of the float32 model.
    np.testing.assert_allclose(result.cka[:-1, :-1], by_hand, atol=1e-5)
    np.testing.assert_allclose(result.cka, report.result.cka, atol=0.02)
    assert np.abs(result.cka - report.result.cka).max() > 1e-3, "and it is not the float32 model"


def test_definitions_name_figures_that_exist() -> None:
    named = {name.removesuffix("_a") for name in CKAResult.__dataclass_fields__}
    assert set(front("cka").DEFINITIONS) - {"interval"} <= named


@pytest.fixture(scope="module")
def bare() -> Handle:
    """A model whose tokenizer puts nothing first."""
    return Handle(tiny.make("gpt2"), tiny.byte_level(bos=False), "bare")


def massive_first(handle: Handle, factor: float) -> None:
    """Make the state of position 0 that much longer at every layer, as attention sinks are."""
    with torch.no_grad():
        handle.model.transformer.wpe.weight[0] *= factor


FIRST = tuple(f"{name} {text[0].lower()}{text[1:]}" for name, text in zip(("Paris", "Tokyo") * 3, TEXTS, strict=True))


@pytest.mark.parametrize("points", ["entity", "all", "last"])
def test_no_models_first_position_is_a_point(points: str) -> None:
    """Nothing of it is in the figures: not where an entity is the first token, nor where it is the whole text."""
    alone = "s" if points == "last" else "Paris"
    texts = (*FIRST, alone, *TEXTS)
    spans = tuple(((0, 1), (len(text) - 2, len(text) - 1)) if len(text) > 2 else ((0, 1),) for text in texts)
    found = []
    for factor in (1.0, 300.0):
        handle = Handle(tiny.make("gpt2"), tiny.byte_level(bos=False), "bare")
        massive_first(handle, factor)
        options: dict[str, Any] = {"prompts": texts, "entities": spans if points == "entity" else None}
        report = run([handle, handle], config_of([handle, handle], points=points, bootstrap=9, **options))
        assert (report.result.pos_a > 0).all() and (report.result.pos_b > 0).all() and report.result.n_first > 0
        found.append(report.result)
    assert np.array_equal(found[0].pos_a, found[1].pos_a)
    np.testing.assert_allclose(found[0].massive_a[0], found[1].massive_a[0], rtol=1e-5)  # embed: no attention yet


def test_texts_of_first_positions_alone_have_no_points(bare: Handle) -> None:
    texts = tuple("abcdefgh")
    with pytest.raises(LabError, match=r"have 0 of the kind .last. behind their first token"):
        run([bare, bare], config_of([bare, bare], prompts=texts, entities=None, points="last"))


def test_a_massive_point_is_named(pair: list[Handle]) -> None:
    """The longest state over the median one, by numpy on transformers' own states."""
    handle = pair[0]
    report = run([handle, handle], config_of([handle, handle], bootstrap=9))
    lengths = points_of(handle).norm(dim=-1).numpy()
    assert cka_figures.massive(report) == []
    np.testing.assert_allclose(report.result.massive_a[:3], lengths.max(0) / np.median(lengths, axis=0), rtol=1e-5)


def test_the_page_says_which_layers_one_point_decides(pair: list[Handle], report: Report) -> None:
    long = dataclasses.replace(report.result, massive_a=np.array([1.0, 12.4, 90.0, 3.0]))
    (told,) = cka_figures.massive(dataclasses.replace(report, result=long))
    assert told.startswith("In 2 of the 4 layers of three one point is far longer than the others (in layer 1 90 times")


def test_few_or_repeated_sentences_have_no_interval(pair: list[Handle]) -> None:
    few = run(pair, config_of(pair, prompts=TEXTS[:5], entities=ENTITIES[:5]))
    again = run(pair, config_of(pair, prompts=TEXTS[:5] * 4, entities=ENTITIES[:5] * 4))
    assert few.result.cka_low is None and again.result.cka_low is None and again.result.n_sentences == 20
    enough = run(pair, config_of(pair, prompts=TEXTS * 2, entities=ENTITIES * 2)).result
    for name in ("cka", "alignment_a", "alignment_b"):
        low, value, high = (getattr(enough, name + end) for end in ("_low", "", "_high"))
        assert (low <= value).all() and (value <= high).all()
    assert np.abs(np.stack([enough.cka_low, enough.cka_high])).max() <= 1
