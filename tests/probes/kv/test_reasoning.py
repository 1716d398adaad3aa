"""Writing before the answer on tiny models, against greedy writing by hand, forward by forward."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from engram_lab.models.errors import Cancelled, LabError, PromptError
from engram_lab.models.handle import Handle
from engram_lab.probes.kv.reasoning import CUE, ReasoningConfig, ReasoningResult, run
from tests.models import tiny
from tests.probes.kv.test_erratum import TEMPLATE, forward, ids_of
from tests.probes.kv.tiny import FAMILIES, RIVER, opened, right

CUE_SHORT, TAIL = "\nthe", "Tokyo is the old"
ASKED = f"\n{TAIL}"


def config_of(handle: Handle, **options: Any) -> ReasoningConfig:
    return ReasoningConfig((handle.name,), RIVER, **{"tokens": (0, 2, 5), "cue": CUE_SHORT} | options)


@pytest.fixture(params=FAMILIES)
def handle(request: pytest.FixtureRequest) -> Handle:
    return opened(request.param)


def swapped(handle: Handle, result: ReasoningResult, ids: list[int]) -> np.ndarray:
    """Logits [vocab] of the last of `ids`, which run behind the old prompt's cache with the field from the new one's.

    Caches of transformers' own; an Engram's layers and history go along.
    """
    pair = result.pair
    with handle.running():
        stale, donor = DynamicCache(), DynamicCache()
        for cache, own in ((stale, pair.ids_old), (donor, pair.ids_new)):
            handle.model(torch.tensor([own[:-1]]), cache=cache, use_cache=True)
        for one, other in zip(stale.layers, donor.layers, strict=True):
            for name in ("keys", "values"):
                getattr(one, name)[:, :, list(pair.field)] = getattr(other, name)[:, :, list(pair.field)]
        at = torch.arange(pair.n_editable, pair.n_editable + len(ids))[None]
        out = handle.model(torch.tensor([ids]), cache=stale, position_ids=at, use_cache=True)
        return out.logits[0, -1].double().numpy()


def test_every_source_against_writing_by_hand(handle: Handle) -> None:
    result = run([handle], config_of(handle)).result
    pair = result.pair
    old, new = pair.answer_ids
    cue = ids_of(handle, TAIL + CUE_SHORT)[len(ids_of(handle, TAIL)) :]
    asked = ids_of(handle, TAIL + ASKED)[len(ids_of(handle, TAIL)) :]
    runs = {
        "old": lambda ids: forward(handle, [*pair.ids_old, *ids]),
        "field": lambda ids: swapped(handle, result, [pair.ids_old[-1], *ids]),
        "new": lambda ids: forward(handle, [*pair.ids_new, *ids]),
    }
    scores = {}
    for source, answer in runs.items():
        written: list[int] = []
        for _ in range(5):
            written.append(int(answer([*cue, *written]).argmax()))
        for k in (0, 2, 5):
            n = next(n for n, own in enumerate(result.sources) if own == source and result.tokens[n] == k)
            logits = answer([*cue, *written[:k], *asked])
            scores[source, k] = logits[new] - logits[old]
            assert result.effects.score[n] == pytest.approx(scores[source, k], abs=2e-4)
            assert result.written[n] == k
            assert result.texts[n] == b"".join(handle.pieces(written[:k], whole=False)).decode(
                errors="backslashreplace"
            )
    ties = 0
    for n, (source, k) in enumerate(zip(result.sources, result.tokens.tolist(), strict=True)):
        low, high = scores["old", k], scores["new", k]
        if abs(high - low) > 0.05:
            recovery = (scores[source, k] - low) / (high - low)
            # Each of the three scores may be 2e-4 off, as above.
            slack = 2 * 2e-4 * (1 + abs(recovery)) / abs(high - low)
            assert result.effects.recovery[n] == pytest.approx(recovery, abs=slack)
        if min(abs(low), abs(high)) < 1e-3:  # so near to 0 that another order of sums may change the sign
            ties += 1
        else:
            assert result.holds[n] == (low < 0 < high)
    assert ties <= 2, "so many ties that nothing was looked at"
    straight = [answer([]) for answer in runs.values()]
    np.testing.assert_allclose(result.direct.score, [own[new] - own[old] for own in straight], atol=1e-4)
    assert result.question == TAIL and len(result.sources) == 9


def test_the_same_request_gives_the_same_bytes(handle: Handle) -> None:
    first, second = run([handle], config_of(handle)), run([handle], config_of(handle))
    assert first.to_json() == second.to_json() and first == second
    stored = json.loads(first.to_json())
    assert ReasoningResult.from_dict(stored["result"]) == first.result
    assert ReasoningConfig.from_dict(stored["config"]) == first.config


def test_a_text_that_ends_is_asked_there() -> None:
    handle = Handle(tiny.make("llama"), tiny.byte_level(), "ending")
    free = run([handle], config_of(handle, tokens=(4,))).result
    cue = ids_of(handle, TAIL + CUE_SHORT)[len(ids_of(handle, TAIL)) :]
    asked = ids_of(handle, TAIL + ASKED)[len(ids_of(handle, TAIL)) :]
    ids, written = [*free.pair.ids_old, *cue], []
    for _ in range(4):
        written.append(int(forward(handle, [*ids, *written]).argmax()))
    handle.model.generation_config.eos_token_id = [written[2]]
    ended = run([handle], config_of(handle, tokens=(1, 4))).result
    length = written.index(written[2])
    assert ended.written[3] == length and ended.written[0] == min(1, length)
    logits, (old, new) = forward(handle, [*ids, *written[:length], *asked]), ended.pair.answer_ids
    assert ended.effects.score[3] == pytest.approx(logits[new] - logits[old], abs=1e-4)


def test_what_is_said_and_in_a_chat_template() -> None:
    handle = opened("llama")
    good = right(handle)
    said = run([handle], ReasoningConfig(("llama",), good, (0,), CUE_SHORT)).result.said
    assert said.startswith("The field alone recovers") and " after 0" in said
    wrong = dataclasses.replace(good, answer_old=good.answer_new, answer_new=good.answer_old)
    assert run([handle], ReasoningConfig(("llama",), wrong, (0,), CUE_SHORT)).result.said.startswith("No claim")
    tokenizer = tiny.byte_level(bos=False)
    tokenizer.chat_template = TEMPLATE
    chatty = Handle(tiny.make("llama", max_position_embeddings=256), tokenizer, "chatty")
    scenario = dataclasses.replace(RIVER, chat=True)
    result = run([chatty], ReasoningConfig(("chatty",), scenario, (0, 3))).result
    whole = [*result.pair.ids_new, *ids_of(chatty, CUE), *ids_of(chatty, f"\n<user>{TAIL}\n<a>")]
    logits, (old, new) = forward(chatty, whole), result.pair.answer_ids
    assert result.effects.score[2] == pytest.approx(logits[new] - logits[old], abs=1e-4)


def test_bad_requests_and_cancelling() -> None:
    handle = opened("llama")
    for tokens, match in [((), "at least one"), ((-1,), "0 or more"), ((4, 0), "rising")]:
        with pytest.raises(LabError, match=match):
            config_of(handle, tokens=tokens)
    with pytest.raises(PromptError, match="write fewer"):
        run([handle], config_of(handle, tokens=(60,)))

    def stop(fraction: float, doing: str) -> None:
        if doing == "writing":
            raise Cancelled

    with pytest.raises(Cancelled):
        run([handle], config_of(handle), stop)
