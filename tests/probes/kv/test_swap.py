"""The ladder on tiny models, every step against one made by hand on transformers' own cache."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache, GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

from engram_lab.models.errors import AlignmentError, Cancelled, LabError
from engram_lab.models.handle import Handle, open_model
from engram_lab.models.kv import KVError
from engram_lab.probes.kv.effects import differing, effects, run_clean
from engram_lab.probes.kv.scenario import Scenario, prepare
from engram_lab.probes.kv.swap import SwapConfig, SwapResult, run
from tests.models import tiny
from tests.probes.kv.tiny import FAMILIES, RIVER, opened, right


def config_of(handle: Handle, scenario: Scenario = RIVER, **options: Any) -> SwapConfig:
    return SwapConfig((handle.name,), scenario, **{"draws": 3} | options)


@pytest.fixture(params=FAMILIES)
def handle(request: pytest.FixtureRequest) -> Handle:
    return opened(request.param)


def by_hand(handle: Handle, result: SwapResult, positions: tuple[int, ...], layers: Any, part: str) -> np.ndarray:
    """Logits [vocab] of the last token, K and V copied with slices between two caches of transformers' own."""
    memory = getattr(handle.model.config, "engram_layer_ids", [])
    copied = list(layers)
    if part == "kv":  # what an Engram keeps beside K and V goes with them
        copied += [handle.n_layers + 1 + n for n, layer in enumerate(memory) if layer in layers]
        copied += [handle.n_layers] if memory and len(layers) == handle.n_layers else []
    with handle.running():
        stale, donor = DynamicCache(), DynamicCache()
        for cache, ids in ((stale, result.pair.ids_old), (donor, result.pair.ids_new)):
            handle.model(torch.tensor([ids[:-1]]), cache=cache, use_cache=True)
        for layer in copied:
            for name in ("keys", "values"):
                if name[0] in part:
                    source = getattr(donor.layers[layer], name)
                    getattr(stale.layers[layer], name)[:, :, list(positions)] = source[:, :, list(positions)]
        last, at = torch.tensor([[result.pair.ids_old[-1]]]), torch.tensor([[result.pair.n_editable]])
        return handle.model(last, cache=stale, position_ids=at, use_cache=True).logits[0, -1].double().numpy()


def log_p(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum())


@pytest.mark.parametrize(("part", "layers"), [("kv", None), ("k", (0, 2)), ("v", (1,))])
def test_every_step_against_one_made_by_hand(handle: Handle, part: str, layers: tuple[int, ...] | None) -> None:
    result = run([handle], config_of(handle, part=part, layers=layers)).result
    old, new = result.pair.answer_ids
    every = tuple(range(handle.n_layers))
    clean, donor = (by_hand(handle, result, at, every, "kv") for at in ((), tuple(range(result.pair.n_editable))))
    scores = clean[new] - clean[old], donor[new] - donor[old]
    assert result.oracle.score == pytest.approx(scores, abs=1e-4)
    assert result.oracle.prob_new[1] == pytest.approx(np.exp(log_p(donor))[new], rel=1e-3)
    got = result.effects
    for n, positions in enumerate(result.positions):
        logits = by_hand(handle, result, positions, every if layers is None else layers, part)
        score = logits[new] - logits[old]
        assert got.score[n] == pytest.approx(score, abs=1e-4)
        assert got.recovery[n] == pytest.approx((score - scores[0]) / (scores[1] - scores[0]), abs=2e-3)
        assert got.flip[n] == ((score > 0) != (scores[0] > 0)) or abs(score) < 1e-3
        assert got.top_id[n] == logits.argmax()
        assert got.prob_old[n] == pytest.approx(np.exp(log_p(logits))[old], rel=1e-3)
        cosine = logits @ donor / np.linalg.norm(logits) / np.linalg.norm(donor)
        assert got.cosine[n] == pytest.approx(cosine, abs=1e-5)
        kl = (np.exp(log_p(donor)) * (log_p(donor) - log_p(logits))).sum()
        assert got.kl[n] == pytest.approx(kl, abs=1e-4)
    assert result.layer_names == tuple(str(n) for n in (every if layers is None else layers))


def test_the_steps_are_the_positions_they_say(handle: Handle) -> None:
    result = run([handle], config_of(handle)).result
    pair, at = result.pair, dict(zip(result.names, result.positions, strict=True))
    assert at["the field"] == pair.field and at["all behind it"] == pair.downstream
    assert at["last 2"] == (pair.n_editable - 2, pair.n_editable - 1)
    assert at["all"] == tuple(range(pair.n_editable)) and at["none"] == ()
    assert result.position.tolist() == [*pair.field, *pair.downstream], "before the field both caches are the same"
    best = result.position[np.argsort(-result.single.recovery)][:4]
    assert set(at["best 4"]) == set(best.tolist()) and len(at["best 8"]) == 8
    drawn = [own for own, step in zip(result.positions, result.steps, strict=True) if step == "random"]
    assert len(drawn) == 12 and all(len(set(own)) == len(own) and set(own) <= set(pair.downstream) for own in drawn)
    assert len(set(drawn)) > 6
    for k, mean, low, high, sd in zip(
        result.random_k, result.random_mean, result.random_low, result.random_high, result.random_sd, strict=True
    ):
        mine = [r for r, n, d in zip(result.effects.recovery, result.k, result.draw, strict=True) if n == k and d >= 0]
        np.testing.assert_allclose((mean, low, high, sd), (np.mean(mine), min(mine), max(mine), np.std(mine, ddof=1)))
    few = run([handle], config_of(handle, last=(1, 99), best=(99,), random=(99,))).result
    assert few.names == ("the field", "all behind it", "last 1", "all", "none") and not few.random_k.size


def test_bits(handle: Handle) -> None:
    """Self-swap and swap-all are the clean runs; the same request gives the same bits; sources stay."""
    config = config_of(handle)
    first, second = run([handle], config), run([handle], config)
    assert first == second and first.to_json() == second.to_json()
    result = first.result
    assert result.self_equal and result.all_equal
    clean = run_clean(handle, result.pair)
    assert clean.digests == result.digests == (clean.stale.digest(), clean.donor.digest())
    assert result.digests[0] != result.digests[1]
    stored = json.loads(first.to_json())
    assert SwapResult.from_dict(stored["result"]) == result and SwapConfig.from_dict(stored["config"]) == config
    n = list(result.names).index("all")
    assert result.effects.recovery[n] == pytest.approx(1, abs=1e-4) and result.effects.kl[n] < 1e-6
    assert result.effects.recovery[-1] == pytest.approx(0, abs=1e-4)


def test_no_claim_where_the_model_is_wrong() -> None:
    handle = opened("llama")
    good = right(handle)
    result = run([handle], config_of(handle, good)).result
    assert result.oracle.both and result.oracle.right == (True, True) and "recovers" in result.said
    swapped = dataclasses.replace(good, answer_old=good.answer_new, answer_new=good.answer_old)
    wrong = run([handle], config_of(handle, swapped)).result
    assert not wrong.oracle.both and wrong.oracle.right == (False, False)
    assert wrong.said.startswith("No claim") and "recovers" not in wrong.said and "the old prompt" in wrong.said
    np.testing.assert_allclose(wrong.effects.recovery, result.effects.recovery, atol=1e-9)
    assert not wrong.effects.flip[-1]


def test_equal_scores_have_no_recovery() -> None:
    handle = opened("llama")
    pair = prepare(handle, RIVER)
    clean = run_clean(handle, pair)
    same = dataclasses.replace(clean, new=clean.old)
    assert np.isnan(effects([clean.new[None]], pair, same, same.new).recovery).all()
    assert differing(dataclasses.replace(clean, donor=clean.stale)) == ()


def test_bad_requests_and_cancelling() -> None:
    handle = opened("llama")
    for options, match in [
        ({"part": "q"}, "no part"),
        ({"align": "pad"}, "no way"),
        ({"layers": ()}, "at least one"),
        ({"best": (0,)}, "1 or more"),
        ({"draws": 0}, "draws 1 or more"),
    ]:
        with pytest.raises(LabError, match=match):
            config_of(handle, **options)
    with pytest.raises(LabError, match="one model"):
        SwapConfig(("a", "b"), RIVER)
    with pytest.raises(LabError, match="no layer 3"):
        run([handle], config_of(handle, layers=(3,)))
    with pytest.raises(LabError, match="2 were given"):
        run([handle] * 2, config_of(handle))
    longer = dataclasses.replace(RIVER, new="xenon")
    with pytest.raises(AlignmentError, match="different numbers of tokens"):
        run([handle], config_of(handle, longer))
    assert run([handle], config_of(handle, longer, align="split")).result.pair.split

    def stop(fraction: float, doing: str) -> None:
        if fraction > 0.4:
            raise Cancelled

    with pytest.raises(Cancelled):
        run([handle], config_of(handle), stop)


def test_the_shipped_engram_carries_its_state() -> None:
    handle = open_model("engram-mini")
    scenario = Scenario("The {field} runs past the mill.\nIt is in the", "dog", "cat", "dog", "cat")
    result = run([handle], SwapConfig((handle.name,), scenario, draws=2)).result
    assert result.self_equal and result.all_equal
    assert result.effects.recovery[list(result.names).index("all")] == pytest.approx(1, abs=1e-4)


def test_a_model_without_a_cache_per_token_is_refused() -> None:
    shape = tiny.SMALL_LLAMA | {"layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 8}
    shape |= {"mamba_d_head": 8, "mamba_d_state": 8, "num_local_experts": 2, "shared_intermediate_size": 32}
    model = GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**shape)).eval()
    with pytest.raises(KVError, match="running state"):
        run([handle := Handle(model, tiny.byte_level(), "mixed")], config_of(handle))
