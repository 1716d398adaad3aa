"""The logit lens on tiny models, each figure against one computed another way."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from engram_lab.lab.fronts import front
from engram_lab.models.errors import AlignmentError, Cancelled, DataError, LabError, PromptError, TargetError
from engram_lab.models.handle import Handle
from engram_lab.probes.base import Report, arrays_of
from engram_lab.probes.lens import LensConfig, ModelLens, run
from tests.models import tiny

PROMPTS = (
    "The river runs past the old mill",
    "the the the",
    "naïve 東京 👍🏽",
    "A tab\tand\n two  spaces <s>",
)


@pytest.fixture(scope="module")
def pair() -> list[Handle]:
    """A tiny Engram and a tiny Llama with one tokenizer, which puts BOS first."""
    tokenizer = tiny.byte_level()
    return [Handle(tiny.engram(tokenizer), tokenizer, "memory"), Handle(tiny.make("llama"), tokenizer, "dense")]


def config_of(handles: list[Handle], prompts: tuple[str, ...] = PROMPTS, **options: Any) -> LensConfig:
    return LensConfig(tuple(h.name for h in handles), prompts, **options)


@pytest.fixture(scope="module")
def report(pair: list[Handle]) -> Report:
    return run(pair, config_of(pair, target=" the", top_k=4, bootstrap=50))


def reference(handle: Handle, ids: list[int]) -> np.ndarray:
    """Logits [layer, pos, vocab] in float64 from transformers' own hidden states, norm and head."""
    with torch.inference_mode():
        out = handle.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
        # The last of the hidden states has been through the norm already.
        before = [handle.model.lm_head(handle.model.model.norm(h)) for h in out.hidden_states[:-1]]
    return torch.cat([*before, out.logits]).double().numpy()


def prompts_of(lens: ModelLens) -> list[np.ndarray]:
    return [np.flatnonzero(lens.prompt_index == i) for i in range(lens.prompt_index.max() + 1)]


@pytest.mark.parametrize("n", [0, 1])
def test_every_figure_against_transformers(pair: list[Handle], report: Report, n: int) -> None:
    lens, handle = report.result.models[n], pair[n]
    for prompt, at in zip(PROMPTS, prompts_of(lens), strict=True):
        ids = handle.tokenizer(prompt)["input_ids"]
        assert lens.token_ids[at].tolist() == ids
        logits = reference(handle, ids)
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        p, final = np.exp(log_p), log_p[-1]
        np.testing.assert_allclose(lens.kl[:, at], (np.exp(final) * (final - log_p)).sum(-1), atol=2e-5)
        np.testing.assert_allclose(lens.entropy[:, at], -(p * log_p).sum(-1), atol=2e-5)
        order = np.argsort(-logits, axis=-1, kind="stable")
        np.testing.assert_allclose(lens.top_probs[:, at], np.take_along_axis(p, order[..., :4], -1), atol=1e-6)
        # float32 rounds, so near ties may come in the other order; their probabilities are the same.
        taken = np.take_along_axis(p, lens.top_ids[:, at], -1)
        np.testing.assert_allclose(taken, lens.top_probs[:, at], atol=1e-6)
        assert lens.target_id == handle.tokenizer(" the", add_special_tokens=False)["input_ids"][0]
        np.testing.assert_allclose(lens.target_prob[:, at], p[..., lens.target_id], atol=1e-6)
        close = np.abs(logits - logits[..., [lens.target_id]]) < 1e-5
        higher = (logits > logits[..., [lens.target_id]]).sum(-1)
        assert (np.abs(lens.target_rank[:, at] - higher) <= close.sum(-1)).all()
        for pos, where in enumerate(at):
            tops = lens.top_ids[:, where, 0]
            depth = min(d for d in range(len(tops)) if (tops[d:] == tops[-1]).all())
            assert lens.settle_depth[where] == depth
            if pos < len(at) - 1:
                assert lens.next_token_loss[where] == pytest.approx(-final[pos, ids[pos + 1]], abs=1e-5)
        assert np.isnan(lens.next_token_loss[at[-1]])
    assert not lens.kl[-1].any()


def test_means_leave_out_the_leading_special_token(report: Report) -> None:
    for lens in report.result.models:
        leading = [at[0] for at in prompts_of(lens)]
        assert (lens.token_ids[leading] == 0).all(), "every prompt starts with BOS"
        kept = np.setdiff1d(np.arange(len(lens.token_ids)), leading)
        assert np.flatnonzero(lens.counted).tolist() == kept.tolist()
        np.testing.assert_allclose(lens.mean_kl, lens.kl[:, kept].astype(np.float64).mean(1), rtol=1e-12)
        np.testing.assert_allclose(lens.kl_p10, np.percentile(lens.kl[:, kept], 10, axis=1), rtol=1e-6)
        np.testing.assert_allclose(lens.kl_p90, np.percentile(lens.kl[:, kept], 90, axis=1), rtol=1e-6)
        assert lens.mean_loss == pytest.approx(np.nanmean(lens.next_token_loss[kept].astype(np.float64)))
        assert lens.mean_settle_depth == pytest.approx(lens.settle_depth[kept].mean())


def test_intervals_are_a_bootstrap_over_prompts(pair: list[Handle], report: Report) -> None:
    """Against resampling by hand: concatenate the drawn prompts' positions and take the mean."""
    draws = np.random.default_rng(0).multinomial(4, [0.25] * 4, size=50)

    def by_hand(values: np.ndarray, counted: np.ndarray, prompts: list[np.ndarray]) -> list[np.ndarray]:
        kept = [at[counted[at]] for at in prompts]
        drawn = [np.concatenate([kept[i] for i in range(4) for _ in range(row[i])]) for row in draws]
        means = [np.nanmean(values[..., at].astype(np.float64), axis=-1) for at in drawn]
        return [np.percentile(means, q, axis=0) for q in (2.5, 97.5)]

    for lens in report.result.models:
        prompts = prompts_of(lens)
        low, high = by_hand(lens.kl, lens.counted, prompts)
        np.testing.assert_allclose(lens.mean_kl_low, low, rtol=1e-9)
        np.testing.assert_allclose(lens.mean_kl_high, high, rtol=1e-9)
        low, high = by_hand(lens.next_token_loss, lens.counted, prompts)
        assert (lens.mean_loss_low, lens.mean_loss_high) == pytest.approx((low, high))
        low, high = by_hand(lens.settle_depth, lens.counted, prompts)
        assert (lens.mean_settle_depth_low, lens.mean_settle_depth_high) == pytest.approx((low, high))
    a, b, difference = *report.result.models, report.result.difference
    low, high = by_hand(a.kl.astype(np.float64) - b.kl, a.counted, prompts_of(a))
    np.testing.assert_allclose(difference.mean_kl, a.mean_kl - b.mean_kl, atol=1e-12)
    np.testing.assert_allclose(difference.mean_kl_low, low, atol=1e-12)
    np.testing.assert_allclose(difference.mean_kl_high, high, atol=1e-12)
    assert difference.loss == pytest.approx(a.mean_loss - b.mean_loss)
    assert difference.settle_depth == pytest.approx(a.mean_settle_depth - b.mean_settle_depth)
    assert difference.loss_low < difference.loss < difference.loss_high
    assert difference.settle_depth_low <= difference.settle_depth <= difference.settle_depth_high


def test_tokens_join_back_to_the_prompts(report: Report) -> None:
    for lens in report.result.models:
        for prompt, at in zip(PROMPTS, prompts_of(lens), strict=True):
            raw = prompt.encode()
            spans = list(zip(lens.char_start[at], lens.char_end[at], strict=True))
            assert spans[0] == (0, 0) and spans[-1][1] == len(raw)
            assert all(before[1] == after[0] for before, after in pairwise(spans))
            for where, (start, end) in zip(at[1:], spans[1:], strict=True):
                assert lens.token_texts[where] == raw[start:end].decode(errors="backslashreplace")
        assert "�" not in "".join(lens.token_texts)
    repeated = prompts_of(report.result.models[0])[1]
    assert len(repeated) >= 4, "equal tokens keep a column each"


def test_bos_is_shown_as_often_as_the_model_got_it() -> None:
    for bos in (True, False):
        handle = Handle(tiny.make("llama"), tiny.byte_level(bos), "dense")
        for text in ("The river", "<|bos|>The river"):
            lens = run([handle], config_of([handle], (text,))).result.models[0]
            ids = handle.tokenizer(text)["input_ids"]
            n_bos = bos + text.startswith("<|bos|>")
            assert lens.token_ids.tolist() == ids and ids[: n_bos + 1].count(0) == n_bos
            assert lens.char_end[-1] == len(text)
            assert lens.counted.sum() == len(ids) - (n_bos > 0)


def test_a_single_prompt_has_no_interval(pair: list[Handle]) -> None:
    result = run(pair, config_of(pair, ("The river",))).result
    for lens in result.models:
        assert lens.mean_kl_low is None and lens.mean_loss_high is None and lens.mean_settle_depth_low is None
        assert lens.target_id is None and lens.target_rank is None and lens.target_prob is None
    assert result.difference.mean_kl is not None and result.difference.mean_kl_low is None


def test_a_single_token_has_no_loss() -> None:
    handle = Handle(tiny.make("llama"), tiny.byte_level(bos=False), "dense")
    report = run([handle], config_of([handle], ("a", "b")))
    lens = report.result.models[0]
    assert len(lens.token_ids) == 2 and lens.mean_loss is None and lens.mean_loss_low is None
    assert lens.mean_kl_low is not None and Report.from_dict(json.loads(report.to_json())) == report


def test_without_detail_the_rest_stays(pair: list[Handle], report: Report) -> None:
    lens = run(pair[:1], config_of(pair[:1], detail=False, bootstrap=50)).result.models[0]
    assert lens.top_ids is None and lens.top_probs is None and lens.token_names is None
    full = report.result.models[0]
    for name in ("kl", "entropy", "settle_depth", "mean_kl", "mean_kl_low"):
        assert np.array_equal(getattr(lens, name), getattr(full, name)), name


def test_every_listed_token_has_its_name(pair: list[Handle], report: Report) -> None:
    lens = report.result.models[0]
    assert set(lens.token_names) == set(lens.top_ids.ravel().tolist())
    for token_id, name in lens.token_names.items():
        piece = pair[0].tokenizer.convert_ids_to_tokens(token_id)
        assert name == piece or not piece.isascii() or name.startswith("\\x")


def test_json_has_the_promised_shape(report: Report) -> None:
    stored = json.loads(report.to_json())
    assert list(stored) == ["probe", "config", "protocol", "result"] and stored["probe"] == "lens"
    lens = stored["result"]["models"][0]
    assert lens["layer_names"] == ["embed", "0", "1", "2"]
    assert len(lens["kl"]) == len(lens["mean_kl"]) == 4 and len(lens["kl"][0]) == len(lens["token_ids"])
    assert len(lens["top_ids"][3][0]) == 4 and lens["next_token_loss"][-1] is None
    assert stored["result"]["axes"]["kl"] == ["layer", "pos"] and stored["result"]["units"]["kl"] == "nats"
    for name, held in arrays_of(ModelLens).items():
        size = lens[name]
        for _ in held.axes:
            size = size[0]
    protocol = stored["protocol"]
    assert [m["name"] for m in protocol["models"]] == ["memory", "dense"]
    assert [len(m["fingerprint"]) for m in protocol["models"]] == [16, 16]
    assert list(chain.from_iterable(protocol["prompt_ids"][0])) == lens["token_ids"]
    back = Report.from_dict(stored)
    assert back == report and back.to_json() == report.to_json()


def test_the_same_request_gives_the_same_bytes(pair: list[Handle], report: Report) -> None:
    again = run(pair, config_of(pair, target=" the", top_k=4, bootstrap=50))
    assert again.to_json() == report.to_json()
    other = run(pair, config_of(pair, target=" the", top_k=4, bootstrap=50, seed=1))
    assert not np.array_equal(other.result.models[0].mean_kl_low, report.result.models[0].mean_kl_low)
    assert np.array_equal(other.result.models[0].kl, report.result.models[0].kl)


def test_a_report_that_is_damaged_is_refused(report: Report) -> None:
    stored = json.loads(report.to_json())
    del stored["result"]["models"][0]["kl"][0]
    with pytest.raises(DataError):
        Report.from_dict(stored)


def test_cancelling_leaves_the_models_usable(pair: list[Handle], report: Report) -> None:
    told: list[tuple[float, str]] = []

    def stop(fraction: float, doing: str) -> None:
        told.append((fraction, doing))
        if fraction > 0.3:
            raise Cancelled

    config = config_of(pair, target=" the", top_k=4, bootstrap=50)
    with pytest.raises(Cancelled):
        run(pair, config, stop)
    assert [fraction for fraction, _ in told] == sorted(fraction for fraction, _ in told)
    assert told[0][1] == "memory: prompt 1 of 4"
    free: list[bool] = []

    def take(lock: Any) -> None:
        free.append(lock.acquire(blocking=False))
        lock.release()

    for handle in pair:
        # From another thread, because the lock may be taken again by its owner.
        thread = threading.Thread(target=take, args=(handle.lock,))
        thread.start()
        thread.join()
    assert free == [True, True]
    assert run(pair, config).to_json() == report.to_json()
    assert not torch.is_inference_mode_enabled()


def test_progress_ends_at_one(pair: list[Handle]) -> None:
    told: list[float] = []
    run(pair, config_of(pair), lambda fraction, _: told.append(fraction))
    assert told[-1] == 1.0 and min(told) > 0 and told == sorted(told)


def test_two_tokenizers_are_matched_by_the_text() -> None:
    a = Handle(tiny.make("llama"), tiny.byte_level(), "bytes")
    b = Handle(
        tiny.make("gemma2", num_hidden_layers=2, layer_types=["full_attention"] * 2),
        tiny.sentencepiece(False),
        "pieces",
    )
    texts = ("the river Paris", "Paris is the rest")
    result = run([a, b], config_of([a, b], texts, target=" the", bootstrap=20)).result
    lens_a, lens_b = result.models
    pairs = list(zip(result.aligned.pos_a, result.aligned.pos_b, strict=True))
    assert len(pairs) > 6
    for pos_a, pos_b in pairs:
        assert lens_a.prompt_index[pos_a] == lens_b.prompt_index[pos_b]
        assert lens_a.char_end[pos_a] == lens_b.char_end[pos_b]
    for i in range(2):  # none is left out
        ends = [set(lens.char_end[lens.prompt_index == i].tolist()) for lens in result.models]
        assert ends[0] & ends[1] == {int(lens_a.char_end[x]) for x, _ in pairs if lens_a.prompt_index[x] == i}
    assert lens_a.target_id != lens_b.target_id
    difference = result.difference
    assert difference.mean_kl is None and difference.loss is None and difference.settle_depth is None
    assert (
        Report.from_dict(json.loads(run([a, b], config_of([a, b], texts)).to_json())).result.aligned == result.aligned
    )


def merging(*merges: tuple[str, str]) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of a, b, c, d and these merges, without BOS."""
    parts = dict.fromkeys(["a", "b", "c", "d", *map("".join, merges)])
    core = Tokenizer(BPE({part: i for i, part in enumerate(parts)}, list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def test_tokens_that_meet_only_at_the_end_are_refused() -> None:
    left = Handle(tiny.make("llama"), merging(("a", "b")), "left")
    right = Handle(tiny.make("llama"), merging(("b", "c")), "right")
    with pytest.raises(AlignmentError, match="left and right meet only at the end"):
        run([left, right], config_of([left, right], ("abc", "abc")))
    result = run([left, right], config_of([left, right], ("abc", "abcd"))).result
    # ab|c and a|bc, then ab|c|d and a|bc|d
    assert result.aligned.pos_a.tolist() == [1, 3, 4] and result.aligned.pos_b.tolist() == [1, 3, 4]
    a, b = result.models
    expected = (a.kl[:, [1, 3, 4]].astype(np.float64) - b.kl[:, [1, 3, 4]]).mean(1)
    np.testing.assert_allclose(result.difference.mean_kl, expected, atol=1e-12)
    assert result.difference.loss is None, "losses of different tokens do not compare"
    assert run([left, right], config_of([left, right], ("ab",))).result.aligned.pos_b.tolist() == [1]


def test_a_tokenizer_that_changes_the_text_is_refused_only_in_comparisons() -> None:
    changing = tiny.byte_level()
    changing.backend_tokenizer.normalizer = normalizers.Lowercase()
    plain = Handle(tiny.make("llama"), tiny.byte_level(), "plain")
    lower = Handle(tiny.make("llama"), changing, "lower")
    with pytest.raises(AlignmentError, match=r"that of lower changes the text of prompt 2"):
        run([plain, lower], config_of([plain, lower], ("the river", "The river")))
    assert run([lower], config_of([lower], ("The river",))).result.models[0].char_end[-1] == len("The river")
    same = run([plain, lower], config_of([plain, lower], ("the river",))).result
    assert same.aligned.pos_a.tolist() == same.aligned.pos_b.tolist() == list(range(len(same.models[0].kl[0])))


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        ({"prompts": ("fine", "")}, PromptError, "empty"),
        ({"prompts": ("x y " * 80,)}, PromptError, "64"),
        ({"prompts": ()}, PromptError, "prompt"),
        ({"prompts": ("a",), "target": "the river runs"}, TargetError, "not one token"),
        ({"prompts": ("a",), "target": ""}, TargetError, "empty"),
        ({"prompts": ("a",), "top_k": 0}, LabError, "top_k"),
        ({"prompts": ("a",), "top_k": 101}, LabError, "top_k"),
        ({"prompts": ("a",), "seed": -1}, LabError, "seed"),
    ],
)
def test_bad_requests_end_in_one_sentence_before_any_work(
    pair: list[Handle], request_: dict[str, Any], error: type[LabError], words: str
) -> None:
    def never(fraction: float, doing: str) -> None:
        raise AssertionError("work was done")

    with pytest.raises(error, match=words) as caught:
        run(pair, config_of(pair, **request_), never)
    assert "\n" not in str(caught.value)


def test_the_number_of_models_has_to_fit(pair: list[Handle]) -> None:
    with pytest.raises(LabError, match="names 2 models"):
        run(pair[:1], config_of(pair))
    with pytest.raises(LabError, match="one model or two"):
        LensConfig((), PROMPTS)


def test_bfloat16_gives_float32_statistics() -> None:
    handle = Handle(tiny.make("llama").bfloat16(), tiny.byte_level(), "half")
    report = run([handle], config_of([handle], ("The river runs",)))
    lens = report.result.models[0]
    assert report.protocol.models[0].dtype == "bfloat16" and lens.kl.dtype == np.float32
    assert not lens.kl[-1].any() and np.isfinite(lens.kl).all()
    assert (np.diff(lens.top_probs, axis=-1) <= 0).all()
    stay: Callable[[np.ndarray], bool] = lambda tops: bool((tops == tops[-1]).all())  # noqa: E731
    for pos, depth in enumerate(lens.settle_depth):
        assert stay(lens.top_ids[depth:, pos, 0])


def test_definitions_name_figures_that_exist() -> None:
    named = set(front("lens").DEFINITIONS) - {"mean", "interval"}
    assert named <= {field for field in ModelLens.__dataclass_fields__}
