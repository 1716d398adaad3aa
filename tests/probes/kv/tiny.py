"""Tiny models whose answers depend on what they attend to, and a scenario that they take."""

from __future__ import annotations

import dataclasses
from functools import cache as once

import torch

from engram_lab.models.handle import Handle
from engram_lab.probes.kv.effects import run_clean
from engram_lab.probes.kv.scenario import Scenario, prepare
from tests.models import tiny

FAMILIES = ["llama", "qwen2", "gpt2", "engram"]
RIVER = Scenario(
    "Paris is the {field} of France, and the sea.\nTokyo is the old", "capital", "river", "mill", "sea", "river", "look"
)


@once
def opened(family: str) -> Handle:
    """A random model, its weights five times as large, so that what is attended to shows in the logits."""
    tokenizer = tiny.byte_level()
    model = tiny.engram(tokenizer) if family == "engram" else tiny.make(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name and "wte" not in name:
                parameter.mul_(5)
    return Handle(model, tokenizer, family)


def right(handle: Handle, scenario: Scenario = RIVER) -> Scenario:
    """The scenario with two answers that the model gets right: its own top tokens, made so by trying."""
    clean = run_clean(handle, prepare(handle, scenario))
    pieces = {n: piece for n in range(handle.vocab_size) for piece in handle.pieces([n], whole=False)}
    words = [n for n, p in pieces.items() if p[:1] == b" " and p[1:].isalpha() and not handle.is_special(n)]
    old, new = (logits[words].double() for logits in (clean.old, clean.new))
    # [new answer, old answer]: how far the worse of the two clean prompts is on the right side.
    margin = torch.minimum(old[None] - old[:, None], new[:, None] - new[None])
    best_new, best_old = divmod(int(margin.argmax()), len(words))
    assert margin.max() > 1e-4, "no two answers that the model gets right"
    answers = (pieces[words[n]].decode() for n in (best_old, best_new))
    return dataclasses.replace(scenario, **dict(zip(("answer_old", "answer_new"), answers, strict=True)))
