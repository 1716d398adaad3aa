"""Composition on tiny models, against full forwards and against caches put together by hand."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from engram_lab.models.errors import Cancelled, LabError, PromptError, TargetError
from engram_lab.models.handle import Handle, open_model
from engram_lab.models.kv import KVError
from engram_lab.probes.kv.compose import ComposeConfig, ComposeResult, crossover, parts, run
from tests.probes.kv.test_erratum import forward, ids_of, softmax
from tests.probes.kv.tiny import opened

PREFIX, BLOCK, SUFFIX = "Paris is the capital", " of France, and the river runs past the", " old mill and"


def config_of(handle: Handle, **options: Any) -> ComposeConfig:
    given = {"prefix": PREFIX, "block": BLOCK, "suffix": SUFFIX, "answers": (" the", " sea"), "lengths": (5, 20)}
    return ComposeConfig((handle.name,), **given | options)


@pytest.fixture(params=["llama", "qwen2", "engram"])
def handle(request: pytest.FixtureRequest) -> Handle:
    return opened(request.param)


def whole_of(handle: Handle, config: ComposeConfig, length: int) -> list[int]:
    """The ids of all three parts, the block repeated or cut."""
    prefix, block, suffix = parts(handle, config)
    return [*prefix, *(block * 9)[:length], *suffix]


def logits_of(handle: Handle, ids: Any, positions: Any, cache: DynamicCache) -> np.ndarray:
    with handle.running():
        at = torch.tensor([list(positions)])
        out = handle.model(torch.tensor([list(ids)]), position_ids=at, past_key_values=cache, use_cache=True)
        return out.logits[0, -1].double().numpy()


def by_hand(handle: Handle, config: ComposeConfig, length: int, k: int) -> np.ndarray:
    """Logits [vocab] at the end: the block runs alone at the positions it will have, so that no key has to turn."""
    prefix, block, suffix = parts(handle, config)
    block = (block * 9)[:length]
    p = len(prefix)
    front, alone = DynamicCache(), DynamicCache()
    logits_of(handle, [*prefix, *block[:k]], range(p + k), front)
    logits_of(handle, block, range(p, p + length), alone)
    for one, other in zip(front.layers, alone.layers, strict=True):
        one.keys = torch.cat([one.keys, other.keys[:, :, k:]], dim=2)
        one.values = torch.cat([one.values, other.values[:, :, k:]], dim=2)
    return logits_of(handle, suffix, range(p + length, p + length + len(suffix)), front)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_every_composition_against_one_put_together_by_hand(family: str) -> None:
    handle = opened(family)
    config = config_of(handle)
    result = run([handle], config).result
    prefix, block, suffix = parts(handle, config)
    assert [*prefix, *block, *suffix] == ids_of(handle, PREFIX + BLOCK + SUFFIX), "no merge at the seams of this text"
    answers = [ids_of(handle, f"{SUFFIX}{a}")[len(ids_of(handle, SUFFIX))] for a in config.answers]
    moved = [n for n, kind in enumerate(result.kinds) if kind == "moved"]
    assert [(result.block_length[n], result.k[n]) for n in moved] == [
        (length, k) for length in (len(block), 5, 20) for k in (0, 2, 8) if k < length
    ]
    differ = 0
    for n in moved:
        length, k = int(result.block_length[n]), int(result.k[n])
        got, full = by_hand(handle, config, length, k), forward(handle, whole_of(handle, config, length))
        assert result.cosine[n] == pytest.approx(got @ full / np.linalg.norm(got) / np.linalg.norm(full), abs=1e-5)
        p, q = softmax(full), softmax(got)
        assert result.kl[n] == pytest.approx((p * np.log(p / q)).sum(), abs=1e-4)
        assert result.largest_difference[n] == pytest.approx(abs(got - full).max(), abs=2e-4)
        assert result.same_top[n] == (got.argmax() == full.argmax()) and result.top_id[n] == got.argmax()
        assert result.same_decision[n] == (got[answers].argmax() == full[answers].argmax())
        assert result.decisions[n] == config.answers[got[answers].argmax()]
        assert result.computed[n] == k + len(suffix)
        differ += result.largest_difference[n] > 0.05
    assert differ >= 4, "the block has not seen the prefix, and that shows"
    assert result.full_tokens.tolist() == [len(whole_of(handle, config, n)) for n in result.lengths.tolist()]


def test_all_run_again_is_the_full_prefill(handle: Handle) -> None:
    config = config_of(handle)
    result = run([handle], config).result
    full = [n for n, kind in enumerate(result.kinds) if kind == "all"]
    assert len(full) == 3 and max(result.largest_difference[full]) < 1e-4 and min(result.cosine[full]) > 1 - 1e-6
    for n in full:
        length = int(result.block_length[n])
        assert result.k[n] == length and result.computed[n] == length + result.n_suffix
        assert result.top_id[n] == forward(handle, whole_of(handle, config, length)).argmax()
    assert result.position == result.n_prefix == len(ids_of(handle, PREFIX))


def test_an_empty_prefix_needs_no_composing(handle: Handle) -> None:
    result = run([handle], config_of(handle, prefix="")).result
    mine = [n for n, kind in enumerate(result.kinds) if kind in ("moved", "all")]
    assert result.n_prefix == result.position == 0 and max(result.largest_difference[mine]) < 1e-4
    assert result.largest_difference[result.kinds.index("unrotated")] < 1e-4, "nothing had to turn"


def test_the_controls(handle: Handle) -> None:
    config = config_of(handle, lengths=())
    result = run([handle], config).result
    assert result.names == ("K = 0", "K = 2", "K = 8", "K = all", "not rotated", "no block")
    prefix, _, suffix = parts(handle, config)
    left = forward(handle, [*prefix, *suffix])
    assert result.top_id[5] == left.argmax() and result.computed[5] == len(suffix)
    assert result.largest_difference[4] > 1e-3


def test_the_same_request_gives_the_same_bytes_and_times_are_no_part_of_it(handle: Handle) -> None:
    config = config_of(handle, lengths=(5,))
    first, second = run([handle], config), run([handle], config)
    assert first.to_json() == second.to_json() and first == second and first.result.timing is None
    stored = json.loads(first.to_json())
    assert ComposeResult.from_dict(stored["result"]) == first.result
    assert ComposeConfig.from_dict(stored["config"]) == config
    timed = run([handle], dataclasses.replace(config, time=True))
    timing = timed.result.timing
    assert run([handle], timed.config) == timed
    assert (timing.full > 0).all() and (timing.continued > 0).all() and timing.k == (0, 2, 8)
    measured = np.array([kind in ("moved", "all") for kind in timed.result.kinds])
    assert (timing.seconds[measured] > 0).all() and np.isnan(timing.seconds[~measured]).all()
    assert len(timing.crossover_full) == 3 and "full prefill" in timing.said


def test_crossover() -> None:
    assert crossover([16, 4, 64], [1.0, 3.0, 1.0], [2.0, 1.0, 9.0]) == 16
    assert crossover([4, 16, 64], [1.0, 1.0, 1.0], [2.0, 2.0, 1.0]) == 0
    assert crossover([4, 16, 64], [1.0, 9.0, 1.0], [2.0, 2.0, 2.0]) == 64
    assert crossover([4, 16], [float("inf"), 1.0], [2.0, 2.0]) == 16


def test_what_cannot_be_composed() -> None:
    with pytest.raises(KVError, match="gpt2 has no rotary embedding"):
        run([opened("gpt2")], config_of(opened("gpt2")))
    handle = opened("llama")
    for options, match in [
        ({"block": " "}, "some text each"),
        ({"recompute": (2, 0)}, "rising order"),
        ({"lengths": (0,)}, "1 or more"),
        ({"answers": ("a",)}, "at least two"),
    ]:
        with pytest.raises(LabError, match=match):
            config_of(handle, **options)
    with pytest.raises(PromptError, match="leave out the longest"):
        run([handle], config_of(handle, lengths=(99,)))
    with pytest.raises(TargetError, match="same token"):
        run([handle], config_of(handle, answers=(" the", " the old")))

    def stop(fraction: float, doing: str) -> None:
        if fraction > 0.3:
            raise Cancelled

    with pytest.raises(Cancelled):
        run([handle], config_of(handle), stop)


def test_the_shipped_engram() -> None:
    """Our own model, with texts of its kind: what runs again in full is the full prefill."""
    handle = open_model("engram-mini")
    result = run([handle], ComposeConfig(("engram-mini",), answers=(), lengths=(), recompute=(0,))).result
    assert result.largest_difference[1] < 1e-3 and result.decisions == ("",) * 4
    assert result.cosine[0] > result.cosine[3] and result.largest_difference[0] > 1e-3
