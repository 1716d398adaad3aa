"""Moved keys against the keys of a run at the other position, for every kind of rotary embedding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    GlmConfig,
    GptOssConfig,
    LlamaConfig,
    SmolLM3Config,
)

from engram_lab.models.handle import Handle, open_model
from engram_lab.models.kv import KV, KVError, splice
from engram_lab.models.kv_runs import continue_from, prefill
from engram_lab.models.rotary import find_rotary, move
from tests.models import tiny
from tests.models.test_kv import close, engram, text

SHAPE = tiny.SMALL_LLAMA
ROPE = {
    "default": {"rope_type": "default", "rope_theta": 100.0},
    "linear": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 100.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
# What is found out about each: how the module lists its angles, which entries are paired.
OTHERS: dict[str, tuple[Any, list[tuple[str, str] | None]]] = {
    "cohere": (CohereConfig(**SHAPE), [("twins", "twins")] * 3),
    "glm": (GlmConfig(**SHAPE, pad_token_id=0, partial_rotary_factor=0.5), [("halves", "twins")] * 3),
    "gpt_oss": (
        GptOssConfig(**SHAPE, num_local_experts=2, num_experts_per_tok=1, pad_token_id=0),
        [("once", "halves")] * 3,
    ),
    # Its third layer has no positions.
    "smollm3": (
        SmolLM3Config(**SHAPE, no_rope_layers=[1, 1, 0], pad_token_id=0),
        [("halves", "halves")] * 2 + [None],
    ),
}


def wrap(model: Any, name: str) -> Handle:
    with torch.no_grad():  # so that tokens matter to one another, and keys are far from zero
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in parameter_name:
                parameter.mul_(5)
    return Handle(model.eval(), tiny.byte_level(), name)


def make(config: Any, name: str) -> Handle:
    torch.manual_seed(0)
    return wrap(AutoModelForCausalLM.from_config(config), name)


def gap(one: KV, other: KV) -> float:
    """The largest difference of the keys, as a share of the largest key."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(one.keys, other.keys, strict=True))


def check_moves(handle: Handle) -> None:
    at = {start: prefill(handle, text(), start=start).kv for start in (0, 5, 40)}
    digest = at[0].digest()
    for start, to in [(0, 40), (5, 0), (40, 5)]:
        moved = move(handle, at[start], to)
        assert gap(at[start], at[to]) > 1e-2  # there is something to move
        assert gap(moved, at[to]) < 1e-4
        assert torch.equal(moved.positions, at[to].positions)
        assert all(map(torch.equal, moved.values, at[start].values))
        assert gap(move(handle, moved, start), at[start]) < 1e-6
    assert at[0].digest() == digest
    suffix = text(4, 3)
    assert close(continue_from(handle, move(handle, at[0], 40), suffix), continue_from(handle, at[40], suffix), 1e-4)


@pytest.mark.parametrize("kind", ROPE)
def test_every_scaling_of_the_frequencies(kind: str) -> None:
    handle = make(LlamaConfig(**SHAPE, rope_parameters=ROPE[kind]), kind)
    factor = handle.model.model.rotary_emb.attention_scaling
    assert (factor > 1.1) == (kind == "yarn")
    check_moves(handle)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gpt_neox", "gemma2", "granite"])
def test_every_family(family: str) -> None:
    check_moves(wrap(tiny.make(family), family))


@pytest.mark.parametrize("name", OTHERS)
def test_other_ways_of_pairing_are_found_out(name: str) -> None:
    config, wanted = OTHERS[name]
    handle = make(config, name)
    assert [found and found[1:] for found in find_rotary(handle).layers] == wanted
    check_moves(handle)


def test_layers_with_their_own_frequencies() -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    model = tiny.make("gemma3", layer_types=types)
    handle = wrap(type(model)(model.config), "gemma3")
    rotary = find_rotary(handle)
    assert [found and found[0] for found in rotary.layers] == types
    thetas = {kind: item["rope_theta"] for kind, item in model.config.rope_parameters.items()}
    assert thetas == {"sliding_attention": 1e4, "full_attention": 1e6}
    check_moves(handle)


def test_a_turn_is_a_product_with_a_complex_number() -> None:
    handle = make(LlamaConfig(**SHAPE, rope_parameters=ROPE["default"]), "llama")
    keys = torch.randn(2, 2, 5, 8, generator=torch.Generator().manual_seed(1))
    old, new = torch.arange(5), torch.tensor([30, 3, 7, 0, 63])
    got = find_rotary(handle).turn(keys, 1, old, new).numpy()
    frequency = 100.0 ** (-np.arange(0, 8, 2) / 8)
    numbers = keys.numpy()[..., :4] + 1j * keys.numpy()[..., 4:]
    turned = numbers * np.exp(1j * (new - old).numpy()[:, None] * frequency)
    assert np.abs(got - np.concatenate([turned.real, turned.imag], axis=-1)).max() < 1e-5


def test_an_engram_is_moved_with_its_history() -> None:
    for handle in (wrap(engram(), "engram"), open_model("engram-mini")):
        here, there = (prefill(handle, text(), start=start).kv for start in (0, 20))
        moved = move(handle, here, 20)
        assert gap(moved, there) < 1e-4
        assert torch.equal(moved.state[0], there.state[0])
        assert close(moved.state[1], there.state[1])


def test_the_longest_move_of_a_real_length() -> None:
    config = LlamaConfig(**SHAPE | {"max_position_embeddings": 4096}, rope_parameters=ROPE["default"])
    handle = make(config, "long")
    far = prefill(handle, text(), start=4000).kv
    assert gap(move(handle, prefill(handle, text()).kv, 4000), far) < 1e-4


def test_half_precision_is_as_good_as_its_rounding() -> None:
    handle = make(LlamaConfig(**SHAPE, dtype=torch.bfloat16), "half")
    handle.model.to(torch.bfloat16)
    handle = Handle(handle.model, tiny.byte_level(), "half")
    here, there = (prefill(handle, text(), start=start).kv for start in (0, 20))
    assert here.keys[0].dtype == torch.bfloat16
    # The first layer's keys depend on the token and the position alone.
    first = (move(handle, here, 20).keys[0] - there.keys[0]).abs().max() / there.keys[0].abs().max()
    assert float(first) < 2**-6


class _Other(nn.Module):
    """A rotary module whose angles are not what turned the keys, or that is called otherwise."""

    def __init__(self, real: nn.Module, factor: float) -> None:
        super().__init__()
        self.real, self.factor = real, factor

    def forward(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.real(like, positions * self.factor)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h: setattr(h.model.model.rotary_emb, "rope_type", "dynamic"), '"dynamic", whose frequencies depend'),
        (lambda h: setattr(h.model.model.rotary_emb, "rope_type", "longrope"), '"longrope", whose frequencies'),
        (lambda h: delattr(h.model.model, "rotary_emb"), "has no rotary embedding"),
    ],
)
def test_what_cannot_be_moved_is_said(change: Any, words: str) -> None:
    handle = make(LlamaConfig(**SHAPE), "llama")
    kv = prefill(handle, text()).kv
    change(handle)
    with pytest.raises(KVError, match=words):
        move(handle, kv, 3)


def test_keys_that_no_rotation_explains_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = make(LlamaConfig(**SHAPE), "llama")
    kv = prefill(handle, text()).kv
    # The keys are turned by this module too, so it is only read otherwise: as if its angles were others.
    real = handle.model.model.rotary_emb
    monkeypatch.setattr("engram_lab.models.rotary._module", lambda handle: _Other(real, 3.0))
    with pytest.raises(KVError, match="in layer 0 do not change with the position as a rotary"):
        move(handle, kv, 3)
    monkeypatch.setattr("engram_lab.models.rotary._module", lambda handle: nn.Linear(3, 3))
    with pytest.raises(KVError, match="rotary embedding of llama cannot be read"):
        move(handle, kv, 3)


def test_absolute_positions_and_the_end_of_the_context() -> None:
    gpt2 = wrap(tiny.make("gpt2"), "gpt2")
    with pytest.raises(KVError, match="gpt2 has no rotary embedding: its keys are tied to the positions"):
        move(gpt2, prefill(gpt2, text()).kv, 3)
    llama = make(LlamaConfig(**SHAPE), "llama")
    kv = prefill(llama, text()).kv
    for to in (53, -1):
        with pytest.raises(KVError, match=f"12 tokens moved to position {to} would not be inside the 64 positions"):
            move(llama, kv, to)
    assert move(llama, kv.first(0), 5).n_tokens == 0
    assert splice(kv, move(llama, kv, 12)).positions.tolist() == list(range(24))
