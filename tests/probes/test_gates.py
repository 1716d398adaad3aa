"""The gates probe on a tiny Engram, each figure against one computed another way."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engram_lab.models.canonical import normalise
from engram_lab.models.engram import EngramForCausalLM, gate_ceiling
from engram_lab.models.errors import Cancelled, LabError, PromptError, TargetError
from engram_lab.models.handle import Handle
from engram_lab.models.memory import CONTROLS, Edit, read_memory
from engram_lab.probes.base import Report
from engram_lab.probes.gate_statistics import spearman
from engram_lab.probes.gates import GatesConfig, GatesResult, run
from engram_lab.probes.lens import LensConfig
from engram_lab.probes.lens import run as run_lens
from tests.models import tiny
from tests.models.plain_engram import config_of

PROMPT = "The river runs past the the old mill"
SET = (PROMPT, "the the the", "past the old sea", "naïve 東京 runs past the")
TARGET = " the"
LAYERS = (0, 2)


def made(**changes: Any) -> Handle:
    """A tiny Engram of two memory layers whose norms, rows and convolutions all matter."""
    tokenizer = tiny.byte_level()
    config = config_of(vocab_size=len(tokenizer), engram_pad_token_id=1, pad_token_id=1, **changes)
    canonical = config.set_tokenizer(tokenizer)
    torch.manual_seed(0)
    model = EngramForCausalLM(config).eval()
    model.model.canonical_ids.copy_(torch.from_numpy(canonical))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.3)
            elif ".memory." in name:
                parameter.normal_(std=1.0 if "table" in name else 0.3)
    return Handle(model, tokenizer, "tiny")


@pytest.fixture(scope="module")
def handle() -> Handle:
    return made()


def asked(prompts: tuple[str, ...] = (PROMPT,), **options: Any) -> GatesConfig:
    return GatesConfig(("tiny",), prompts, **options)


@pytest.fixture(scope="module")
def report(handle: Handle) -> Report:
    """One prompt with everything."""
    return run([handle], asked(target=TARGET, controls=(*CONTROLS, "off@2"), knock_out=True))


@pytest.fixture(scope="module")
def set_report(handle: Handle) -> Report:
    return run([handle], asked(SET, controls=CONTROLS, bootstrap=60, min_count=2, ranked=3))


def logits_of(handle: Handle, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return handle.model(torch.tensor([ids]), use_cache=False).logits[0]


def test_gates_and_norms_are_those_of_the_forward(handle: Handle, report: Report) -> None:
    result: GatesResult = report.result
    ids = handle.tokenizer(PROMPT)["input_ids"]
    assert result.layers == LAYERS and result.token_ids.tolist() == ids
    assert result.gate.shape == (2, 1, len(ids))
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        return lambda module, args, output: seen.update({name: output[0].clone(), name + " in": args[0][0].clone()})

    hooks = []
    for layer in LAYERS:
        memory = handle.model.model.layers[layer].memory
        for part in ("gate", "written"):
            hooks.append(getattr(memory, part).register_forward_hook(keep(f"{part} {layer}")))
        hooks.append(memory.register_forward_hook(keep(f"memory {layer}")))
    logits = logits_of(handle, ids).double()
    for hook in hooks:
        hook.remove()
    for n, layer in enumerate(LAYERS):
        assert np.array_equal(result.gate[n, 0], seen[f"gate {layer}"][:, 0].numpy())
        written = seen[f"written {layer}"].double()
        np.testing.assert_allclose(result.written_norm[n, 0], written.square().sum(-1).sqrt(), rtol=1e-5)
        residual = seen[f"memory {layer} in"].double()
        np.testing.assert_allclose(result.residual_norm[n], residual.square().sum(-1).sqrt(), rtol=1e-5)
        assert torch.allclose(seen[f"memory {layer}"].double() - residual, written, atol=1e-5)
    log_p = logits - logits.exp().sum(-1, keepdim=True).log()
    expected = [-log_p[n, ids[n + 1]].item() for n in range(len(ids) - 1)]
    np.testing.assert_allclose(result.next_token_loss[:-1], expected, atol=1e-5)
    assert np.isnan(result.next_token_loss[-1])
    assert not result.counted[0] and result.counted[1:].all()
    assert result.mean_loss == pytest.approx(np.mean(expected[1:]), abs=1e-5)
    np.testing.assert_allclose(result.gate_mean, result.gate[..., 1:].astype(float).mean(-1), rtol=1e-12)
    np.testing.assert_allclose(result.gate_p90, np.percentile(result.gate[..., 1:], 90, axis=-1), rtol=1e-6)
    assert result.gate_mean_low is None
    counts = [np.histogram(result.gate[n, 0, 1:], 20, (0, 1))[0] for n in range(2)]
    np.testing.assert_allclose(result.histogram, np.array(counts) / (len(ids) - 1), rtol=1e-12)


def test_the_lens_curve_is_that_of_the_lens(handle: Handle, report: Report) -> None:
    lens = run_lens([handle], LensConfig(("tiny",), (PROMPT,))).result.models[0]
    np.testing.assert_allclose(report.result.mean_kl, lens.mean_kl, rtol=1e-6)
    assert report.result.layer_names == lens.layer_names


@pytest.mark.parametrize("variant", ["demo", "paper", "v41"])
def test_no_gate_is_above_its_ceiling(variant: str) -> None:
    """The learned bound holds for gates that are sought to be as large as they can be, and is reached."""
    handle = made(engram_gate=variant)
    result = run([handle], asked()).result
    assert result.ceiling == gate_ceiling(32, variant)
    for n, layer in enumerate(LAYERS):
        memory = handle.model.model.layers[layer].memory
        product = (memory.key_norm.weight * memory.query_norm.weight).detach()
        # All of the key and the query in the dimension whose weight is largest: the score the bound speaks of.
        at = int(product.abs().argmax())
        peak = torch.zeros(32)
        peak[at] = 1e3
        key = memory.key_norm(peak * product[at].sign())
        score = (key * memory.query_norm(peak)).sum().item() / math.sqrt(32)
        root = score if variant == "paper" else math.sqrt(score)
        assert result.ceiling_learned[n] == pytest.approx(1 / (1 + math.exp(-root)), abs=1e-6)
        assert result.gate[n].max() <= result.ceiling_learned[n]


def test_the_parts_of_a_logit_add_up(handle: Handle, report: Report) -> None:
    said = report.result.attribution
    ids = handle.tokenizer(PROMPT)["input_ids"]
    target = handle.tokenizer(TARGET, add_special_tokens=False)["input_ids"][0]
    assert (said.target_ids == target).all() and report.result.target_names == {target: TARGET}
    logits = logits_of(handle, ids)
    np.testing.assert_allclose(said.logit, logits[:, target], atol=2e-5)
    np.testing.assert_allclose(said.log_prob, logits.log_softmax(-1)[:, target], atol=2e-5)
    whole = said.memory.sum((0, 1, 2)) + said.conv.sum(0) + said.block.sum(0) + said.embed
    np.testing.assert_allclose(whole, said.logit, atol=1e-5)
    np.testing.assert_allclose(said.memory.sum((1, 2)) + said.conv, said.written, atol=1e-5)
    assert said.memory.shape == (2, 2, 2, len(ids)) and said.block.shape == (3, len(ids))


def test_each_part_is_the_share_of_its_vector(handle: Handle, report: Report) -> None:
    """A part taken out of the last residual, with the norm's scale as it was, takes its share off the logit."""
    said, model = report.result.attribution, handle.model
    read = read_memory(handle, [handle.encode(PROMPT)])
    pos, target = 5, int(said.target_ids[0])
    last = read.states[-1, 0, pos].double()
    scale = (last.square().mean() + model.config.rms_norm_eps).rsqrt()

    def logit(vector: Tensor) -> float:
        normed = vector * scale * model.model.norm.weight.double()
        return float(normed @ model.lm_head.weight[target].double())

    with torch.no_grad():
        for n, layer in enumerate(LAYERS):
            memory = model.model.layers[layer].memory
            total = torch.zeros(32, dtype=torch.float64)
            for order in range(2):
                for head in range(2):
                    alone = torch.zeros(2, 2, 8, dtype=torch.float64)
                    alone[order, head] = read.read[n, 0, pos, order, head].double()
                    vector = read.gate[n, 0, pos, 0].double() * (memory.value.weight.double() @ alone.flatten())
                    total += vector
                    share = logit(last) - logit(last - vector)
                    assert said.memory[n, order, head, pos] == pytest.approx(share, abs=1e-6)
            conv = read.written[n, 0, pos].double() - total
            assert said.conv[n, pos] == pytest.approx(logit(conv), abs=1e-6)
            assert abs(said.conv[n, pos]) > 1e-3, "a convolution that adds nothing would test nothing"
        for block in range(3):
            came = read.states[block, 0, pos] + (read.written[LAYERS.index(block), 0, pos] if block in LAYERS else 0.0)
            made_there = logit(read.states[block + 1, 0, pos].double() - came.double())
            assert said.block[block, pos] == pytest.approx(made_there, abs=1e-5)
        assert said.embed[pos] == pytest.approx(logit(read.states[0, 0, pos].double()), abs=1e-6)


def test_without_a_target_it_is_the_next_token(handle: Handle) -> None:
    ids = handle.tokenizer(PROMPT)["input_ids"]
    said = run([handle], asked()).result.attribution
    logits = logits_of(handle, ids)
    assert said.target_ids.tolist() == [*ids[1:], int(logits[-1].argmax())]
    np.testing.assert_allclose(said.logit, logits[range(len(ids)), said.target_ids.tolist()], atol=2e-5)
    knocked = run([handle], asked(knock_out=True, position=3)).result.knock_out
    assert (knocked.position, knocked.target_id) == (3, ids[4])


@pytest.mark.parametrize("position", [None, 4, -2])
def test_knock_outs_against_one_gate_at_a_time(
    handle: Handle, position: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each by hand: a hook that zeroes one number of one gate, in a forward of its own."""
    ids = handle.tokenizer(PROMPT)["input_ids"]
    monkeypatch.setattr("engram_lab.probes.attribution.TOKENS", 3 * len(ids))  # several chunks
    at = len(ids) - 1 if position is None else position % len(ids)
    result = run([handle], asked(target=TARGET, knock_out=True, position=position)).result
    knocked = result.knock_out
    assert knocked.position == result.position == at and knocked.target_text == TARGET
    intact = logits_of(handle, ids)[at].double()
    assert knocked.logit == pytest.approx(float(intact[knocked.target_id]), abs=1e-5)
    assert knocked.log_prob == pytest.approx(float(intact.log_softmax(-1)[knocked.target_id]), abs=1e-5)
    for n, layer in enumerate(LAYERS):
        for pos in range(len(ids)):

            def shut(module: Any, args: Any, output: Tensor, pos: int = pos) -> Tensor:
                output = output.clone()
                output[:, pos] = 0
                return output

            hook = handle.model.model.layers[layer].memory.gate.register_forward_hook(shut)
            changed = logits_of(handle, ids)[at].double()
            hook.remove()
            if pos > at:
                assert torch.equal(changed, intact), "what comes later cannot matter"
                assert np.isnan(knocked.logit_change[n, pos]) and np.isnan(knocked.log_prob_change[n, pos])
                continue
            by_hand = (changed - intact)[knocked.target_id].item()
            assert knocked.logit_change[n, pos] == pytest.approx(by_hand, abs=2e-5)
            by_hand = (changed.log_softmax(-1) - intact.log_softmax(-1))[knocked.target_id].item()
            assert knocked.log_prob_change[n, pos] == pytest.approx(by_hand, abs=2e-5)
    assert np.nanmax(np.abs(knocked.logit_change)) > 1e-2


def test_controls_are_runs_of_their_edits(handle: Handle, report: Report) -> None:
    result = report.result
    ids = list(handle.encode(PROMPT))
    intact = logits_of(handle, ids).double().log_softmax(-1)
    edits = {**{name: Edit(name) for name in CONTROLS}, "off@2": Edit("off", (2,))}
    assert [own.control for own in result.controls] == list(edits)
    for own in result.controls:
        read = read_memory(handle, [ids], edits[own.control])
        assert np.array_equal(own.gate, read.gate[:, 0].transpose(1, 2).numpy())
        np.testing.assert_allclose(own.written_norm[:, 0], read.written[:, 0].double().norm(dim=-1), rtol=1e-5)
        log_p = read.logits[0].double().log_softmax(-1)
        kl = (intact.exp() * (intact - log_p)).sum(-1)
        np.testing.assert_allclose(own.final_kl, kl, atol=2e-5)
        losses = [-log_p[n, ids[n + 1]].item() for n in range(1, len(ids) - 1)]
        assert own.mean_loss == pytest.approx(np.mean(losses), abs=1e-5)
        assert own.mean_loss_change == pytest.approx(own.mean_loss - result.mean_loss, abs=1e-9)
        assert own.mean_final_kl == pytest.approx(float(kl[1:].mean()), abs=1e-5)
        # The lens of the changed model, from its states by hand.
        with torch.inference_mode():
            layers = handle.unembed(read.states[:, 0]).double().log_softmax(-1)
        curve = (layers[-1].exp() * (layers[-1] - layers)).sum(-1)[:, 1:].mean(-1)
        np.testing.assert_allclose(own.mean_kl, curve, atol=2e-5)
    shuffled, zeroed, _, off, off_late = result.controls
    assert not np.array_equal(shuffled.gate, result.gate)
    # Zeroed rows and a memory that is off leave the same model; only the gate tells them apart.
    assert np.array_equal(zeroed.next_token_loss, off.next_token_loss, equal_nan=True)
    assert (zeroed.gate == 0.5).all() and not off.gate.any() and not zeroed.written_norm.any()
    assert np.isnan(off.rank_correlation).all() and np.isnan(zeroed.rank_correlation).all()
    assert off_late.layers == (2,) and off_late.rank_correlation[0, 0] == 1
    assert shuffled.rank_correlation[0, 0] == pytest.approx(spearman(result.gate[0, 0, 1:], shuffled.gate[0, 0, 1:]))


def test_spearman_by_hand() -> None:
    assert spearman(np.array([1, 2, 3, 4]), np.array([10, 20, 30, 40])) == pytest.approx(1)
    assert spearman(np.array([1, 2, 3, 4]), np.array([4, 3, 2, 1])) == pytest.approx(-1)
    # 1 - 6 sum d^2 / (n (n^2 - 1)) with d = 1, 1, 0, 1, 1
    assert spearman(np.array([1, 2, 3, 4, 5]), np.array([2, 1, 3, 12, 5])) == pytest.approx(0.8)
    # Ties share their mean rank: ranks 1.5, 1.5, 3, 4 against 1, 2, 3, 4.
    expected = np.corrcoef([1.5, 1.5, 3, 4], [1, 2, 3, 4])[0, 1]
    assert spearman(np.array([7, 7, 8, 9]), np.array([1, 2, 3, 4])) == pytest.approx(expected)
    assert math.isnan(spearman(np.ones(4), np.arange(4)))


def test_several_prompts_and_their_intervals(handle: Handle, set_report: Report) -> None:
    result = set_report.result
    singles = [run([handle], asked((prompt,))).result for prompt in SET]
    assert np.array_equal(result.gate, np.concatenate([own.gate for own in singles], axis=-1))
    assert np.array_equal(result.attribution.memory, np.concatenate([s.attribution.memory for s in singles], axis=-1))
    draws = np.random.default_rng(0).multinomial(4, [0.25] * 4, size=60)
    kept = [np.flatnonzero((result.prompt_index == i) & result.counted) for i in range(4)]

    def by_hand(values: np.ndarray) -> list[np.ndarray]:
        drawn = [np.concatenate([kept[i] for i in range(4) for _ in range(row[i])]) for row in draws]
        means = [np.nanmean(values[..., at].astype(np.float64), axis=-1) for at in drawn]
        return [np.percentile(means, q, axis=0) for q in (2.5, 97.5)]

    low, high = by_hand(result.gate)
    np.testing.assert_allclose(result.gate_mean_low, low, rtol=1e-9)
    np.testing.assert_allclose(result.gate_mean_high, high, rtol=1e-9)
    shuffled = result.controls[0]
    low, high = by_hand(shuffled.next_token_loss.astype(np.float64) - result.next_token_loss)
    assert (shuffled.mean_loss_change_low, shuffled.mean_loss_change_high) == pytest.approx((low, high))
    bins = np.minimum((result.gate[:, 0] * 20).astype(int), 19)
    low, high = by_hand(np.stack([bins == n for n in range(20)], axis=1).astype(float))
    np.testing.assert_allclose(result.histogram_low, low, atol=1e-12)
    np.testing.assert_allclose(result.histogram_high, high, atol=1e-12)


def test_ngrams_against_counting(handle: Handle, set_report: Report) -> None:
    result = set_report.result
    canonical = handle.model.model.canonical_ids
    found: dict[tuple[int, ...], list[tuple[float, float]]] = {}
    for i in range(len(SET)):
        at = np.flatnonzero(result.prompt_index == i)
        ids = [int(canonical[t]) for t in result.token_ids[at]]
        assert result.canonical_ids[at].tolist() == ids
        for order in (2, 3):
            for end in range(order, len(ids)):  # position 0 is the leading special token
                values = (result.gate[1, 0, at[end]], result.written_norm[1, 0, at[end]])
                found.setdefault(tuple(ids[end - order + 1 : end + 1]), []).append(values)
    for order in (2, 3):
        enough = {gram: np.mean(v, axis=0) for gram, v in found.items() if len(gram) == order and len(v) >= 2}
        ranked = sorted(enough, key=lambda gram: enough[gram][0])
        for stored, expected in ((result.lowest, ranked[:3]), (result.highest, ranked[::-1][:3])):
            own = [n for n in stored if n.layer == 2 and n.order == order]
            assert [n.canonical_ids for n in own] == expected and own
            for n in own:
                assert n.count == len(found[n.canonical_ids])
                assert (n.mean_gate, n.mean_written_norm) == pytest.approx(tuple(enough[n.canonical_ids]), rel=1e-6)
                assert "".join(n.texts).replace(" ", "") == normalise(n.example).replace(" ", "")
    assert any(n.example == " the the" and n.texts == ("the", "the") for n in result.highest + result.lowest)


def test_a_single_prompt_ranks_nothing(report: Report) -> None:
    assert report.result.highest == () and report.result.lowest == ()


def test_without_detail_the_rest_stays(handle: Handle, set_report: Report) -> None:
    got = run([handle], asked(SET, controls=CONTROLS, bootstrap=60, min_count=2, ranked=3, detail=False)).result
    assert got.attribution is None and got.mean_kl is None and got.controls[0].gate is None
    for name in ("gate", "written_norm", "mean_loss_low", "highest", "histogram"):
        assert np.array_equal(getattr(got, name), getattr(set_report.result, name)), name
    assert got.controls[0].mean_loss_change == set_report.result.controls[0].mean_loss_change


def test_json_has_the_promised_shape(report: Report, set_report: Report) -> None:
    for own in (report, set_report):
        stored = json.loads(own.to_json())
        result = stored["result"]
        gate = result["gate"]
        assert (len(gate), len(gate[0]), len(gate[0][0])) == (2, 1, len(result["token_ids"]))
        assert result["axes"]["gate"] == ["layer", "branch", "pos"]
        assert result["axes"]["memory"] == ["layer", "order", "head", "pos"]
        back = Report.from_dict(stored)
        assert back == own and back.to_json() == own.to_json()


def test_the_same_request_gives_the_same_bytes(handle: Handle, report: Report) -> None:
    config = report.config
    assert run([handle], config).to_json() == report.to_json()
    other = run([handle], asked(target=TARGET, controls=("shuffled",), seed=1)).result
    assert np.array_equal(other.gate, report.result.gate)
    assert not np.array_equal(other.controls[0].gate, report.result.controls[0].gate)


def test_cancelling_leaves_the_model_usable(handle: Handle, report: Report) -> None:
    told: list[float] = []

    def note(fraction: float, doing: str) -> None:
        told.append(fraction)

    def stop(fraction: float, doing: str) -> None:
        if "shut" in doing:
            raise Cancelled

    run([handle], report.config, note)
    assert told == sorted(told) and told[-1] == 1 and len(told) == 7
    with pytest.raises(Cancelled):
        run([handle], report.config, stop)
    assert run([handle], report.config).to_json() == report.to_json()


def test_bad_requests_are_one_sentence(handle: Handle) -> None:
    with pytest.raises(LabError, match="one model, not of 2"):
        GatesConfig(("a", "b"), (PROMPT,))
    with pytest.raises(PromptError, match="No prompt"):
        GatesConfig(("a",), ())
    for control in ("of", "off@", "off@x", "off@-1", ""):
        with pytest.raises(LabError, match="shuffled, zeroed, one_row, off"):
            asked(controls=(control,))
    with pytest.raises(LabError, match="no memory at layer 1: its memory layers are 0, 2"):
        run([handle], asked(controls=("off@1",)))
    for position in (99, -99):
        with pytest.raises(LabError, match=f"no position {position}"):
            run([handle], asked(position=position))
    with pytest.raises(TargetError, match="not one token"):
        run([handle], asked(target="old mill"))
    dense = Handle(tiny.make("llama"), tiny.byte_level(), "dense")
    with pytest.raises(LabError, match=r"^dense has no Engram memory: .*engram-mini\.$"):
        run([dense], GatesConfig(("dense",), (PROMPT,)))
