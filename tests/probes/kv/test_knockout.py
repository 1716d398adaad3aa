"""Knock-outs against caches changed by hand, and the two anecdotes on prompts where they hold and where not."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from engram_lab.models.errors import LabError, PromptError
from engram_lab.models.handle import Handle
from engram_lab.probes.kv.knockout import UNRELATED, KnockoutConfig, KnockoutResult, notes, run, unrelated_ids
from engram_lab.probes.kv.scenario import prepare
from tests.probes.kv.tiny import FAMILIES, RIVER, opened, right


@pytest.fixture(params=FAMILIES)
def handle(request: pytest.FixtureRequest) -> Handle:
    return opened(request.param)


def config_of(handle: Handle, **options: Any) -> KnockoutConfig:
    return KnockoutConfig((handle.name,), **{"scenario": RIVER, "draws": 2} | options)


def by_hand(handle: Handle, result: KnockoutResult, positions: tuple[int, ...], how: str, other: Any) -> np.ndarray:
    """Logits [vocab] of the last token on transformers' own cache with K, V overwritten."""
    ids = result.pair.ids_old
    at = list(positions)
    with handle.running():
        cache, source = DynamicCache(), DynamicCache()
        handle.model(torch.tensor([ids[:-1]]), cache=cache, use_cache=True)
        handle.model(torch.tensor([other]), cache=source, use_cache=True)
        for layer, donor in zip(cache.layers, source.layers, strict=True):
            for name in ("keys", "values"):
                tensor = getattr(layer, name)
                history = tensor.dtype == torch.int64  # of an Engram: which n-grams are read, kept when blanked
                if how == "unrelated":
                    tensor[:, :, at] = getattr(donor, name)[:, :, at]
                elif not history and tensor.numel():
                    tensor[:, :, at] = 0 if how == "zero" else tensor.mean(dim=2, keepdim=True)
        last, where = torch.tensor([[ids[-1]]]), torch.tensor([[len(ids) - 1]])
        return handle.model(last, cache=cache, position_ids=where, use_cache=True).logits[0, -1].double().numpy()


def log_p(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum())


def test_every_knock_out_against_one_made_by_hand(handle: Handle) -> None:
    config = config_of(handle, targets=("field", "notes", "downstream", "positions"), positions=(4, 1))
    report = run([handle], config)
    result = report.result
    old, new = result.pair.answer_ids
    other = unrelated_ids(handle, UNRELATED, result.pair.n_editable)
    assert report.protocol.prompt_ids[0][2] == other and len(other) == result.pair.n_editable
    clean = by_hand(handle, result, (), "zero", other)
    assert result.margin_clean == pytest.approx(clean[old] - clean[new], abs=1e-4)
    assert len(result.hows) == 4 * (3 + config.draws)
    for n, (how, positions) in enumerate(zip(result.hows, result.positions, strict=True)):
        if how == "random":
            continue
        logits = by_hand(handle, result, positions, how, other)
        assert result.margin[n] == pytest.approx(logits[old] - logits[new], abs=1e-4)
        assert result.effects.top_id[n] == logits.argmax()
        kl = (np.exp(log_p(clean)) * (log_p(clean) - log_p(logits))).sum()
        assert result.effects.kl[n] == pytest.approx(kl, abs=1e-4)
    at = dict(zip(result.targets, result.positions, strict=True))
    assert at["field"] == result.pair.field and at["positions"] == (1, 4)
    noise = [n for n, how in enumerate(result.hows) if how == "random"]
    assert len(set(result.margin[noise].tolist())) == len(noise), "each draw is another"
    assert run([handle], config).to_json() == report.to_json()
    other_seed = run([handle], dataclasses.replace(config, seed=1)).result
    assert (other_seed.margin != result.margin).tolist() == [how == "random" for how in result.hows]
    assert KnockoutResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_notes_are_signs_and_line_ends_behind_the_field() -> None:
    handle = opened("llama")
    pair = prepare(handle, dataclasses.replace(RIVER, template='So, "the {field}" (old), 2 %: yes -\n\n the sea'))
    assert "".join(pair.token_texts_old[p] for p in notes(handle, pair)) == '" (),%:-\n\n'
    assert all(p in pair.downstream for p in notes(handle, pair))
    special = prepare(handle, dataclasses.replace(RIVER, template="the {field} old<|eos|> the sea"))
    assert [special.token_texts_old[p] for p in notes(handle, special)] == ["<|eos|>"]


def test_the_anecdotes_say_what_was_found() -> None:
    handle = opened("llama")
    result = run([handle], config_of(handle, scenario=right(handle), draws=4)).result
    assert result.oracle.both and len(result.anecdotes) == 3
    field, cleared, _ = result.anecdotes
    top = result.oracle.top[0]
    for anecdote, target, hows, stays in (
        (field, "field", ("random", "unrelated"), True),
        (cleared, "notes", ("zero", "mean"), False),
    ):
        mine = [
            n for n, (t, h) in enumerate(zip(result.targets, result.hows, strict=True)) if t == target and h in hows
        ]
        kept = [
            result.margin[n] > 0 and (not top or result.effects.top_id[n] == result.pair.answer_ids[0]) for n in mine
        ]
        assert [result.kept[n] for n in mine] == kept and anecdote.held == tuple(k == stays for k in kept)
    assert all(
        a.said == ("It held here." if all(a.held) else "It did not hold here.")
        if all(a.held) or not any(a.held)
        else f"in {sum(a.held)} of {len(a.held)} tries" in a.said
        for a in result.anecdotes
    )
    good = right(handle)
    wrong = run([handle], config_of(handle, scenario=dataclasses.replace(
        good, answer_old=good.answer_new, answer_new=good.answer_old
    ))).result  # fmt: skip
    assert all(a.said.startswith("No claim") for a in wrong.anecdotes)
    partly = run([handle], config_of(handle, targets=("field",), hows=("zero",))).result
    assert partly.anecdotes == ()


def test_bad_requests() -> None:
    handle = opened("llama")
    for options, match in [
        ({"targets": ("all",)}, "at least one target"),
        ({"targets": ()}, "at least one target"),
        ({"hows": ("zero", "zero")}, "at least one way"),
        ({"positions": (1,)}, "go together"),
        ({"targets": ("positions",)}, "go together"),
        ({"draws": 0}, "draws 1 or more"),
    ]:
        with pytest.raises(LabError, match=match):
            config_of(handle, **options)
    with pytest.raises(PromptError, match="unrelated text is empty"):
        config_of(handle, unrelated=" ")
    with pytest.raises(LabError, match="cannot be knocked out"):
        run([handle], config_of(handle, targets=("positions",), positions=(99,)))
    bare = dataclasses.replace(RIVER, template="The {field} of the old sea")
    with pytest.raises(LabError, match="no position of notes"):
        run([handle], config_of(handle, scenario=bare, targets=("notes",)))
    result = run([handle], config_of(handle, scenario=bare, hows=("zero",))).result
    assert result.left_out == ("notes",) and result.targets == ("field", "downstream")


def test_the_other_text_is_repeated_until_it_is_long_enough() -> None:
    handle = opened("llama")
    ids = unrelated_ids(handle, "the sea", 7)
    once = handle.tokenizer("the sea", add_special_tokens=False)["input_ids"]
    assert len(ids) == 7 and ids[0] == 0 and list(ids[1 : 1 + len(once)]) == once
