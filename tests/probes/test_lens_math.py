"""Every statistic of the lens against an independent computation in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from engram_lab.models.errors import Cancelled
from engram_lab.probes import lens_math
from engram_lab.probes.lens_math import lens_statistics

LAYERS, POS, D_MODEL = 5, 11, 16


def states_and_head(vocab: int, seed: int = 0, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    """Random states [layer, pos, d_model], approaching the last one, and a head [vocab, d_model]."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(LAYERS, POS, D_MODEL, generator=generator)
    final = torch.randn(POS, D_MODEL, generator=generator)
    mix = torch.linspace(0, 1, LAYERS)[:, None, None]
    return (1 - mix) * noise + mix * final, scale * torch.randn(vocab, D_MODEL, generator=generator)


@pytest.mark.parametrize("vocab", [7, 128, 257, 640, 1000])
@pytest.mark.parametrize("top_k", [1, 3, 7])
def test_against_float64(vocab: int, top_k: int) -> None:
    states, head = states_and_head(vocab, seed=vocab)
    target = vocab // 3
    got = lens_statistics(states, lambda h: h @ head.T, top_k=top_k, target_id=target)
    logits = states.double() @ head.double().T
    log_p = torch.log_softmax(logits, dim=-1)
    # F.kl_div(input, target, log_target) is KL(target || input)
    expected_kl = torch.stack(
        [torch.nn.functional.kl_div(q, log_p[-1], reduction="none", log_target=True).sum(-1) for q in log_p]
    )
    torch.testing.assert_close(got.kl.double(), expected_kl, atol=2e-5, rtol=1e-5)
    expected_entropy = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(got.entropy.double(), expected_entropy, atol=2e-5, rtol=1e-5)
    values, ids = torch.topk(log_p.exp(), top_k, dim=-1)
    assert torch.equal(got.top_ids, ids)
    torch.testing.assert_close(got.top_probs.double(), values, atol=1e-6, rtol=2e-5)
    assert torch.equal(got.argmax, logits.argmax(-1))
    order = np.argsort(-logits.numpy(), axis=-1, kind="stable")
    assert np.array_equal(got.target_rank.numpy(), (order == target).argmax(-1))
    torch.testing.assert_close(got.target_prob.double(), log_p.exp()[..., target], atol=1e-6, rtol=2e-5)
    for pos in range(POS):
        top = order[:, pos, 0]
        assert got.settle_depth[pos] == min(n for n in range(LAYERS) if (top[n:] == top[-1]).all())


def test_settle_depth_takes_every_value() -> None:
    """The token wanders off and comes back; only the last arrival counts."""
    one_hot = torch.eye(4) * 9
    paths = [[0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [2, 3, 1, 1]]
    states = torch.stack([one_hot[path] for path in paths], dim=1)  # [layer, pos, d_model]
    got = lens_statistics(states, torch.clone)
    assert got.settle_depth.tolist() == [0, 1, 2, 3, 2]
    assert got.argmax.T.tolist() == paths
    assert got.top_ids.shape == (4, 5, 0) and got.target_rank is None and got.target_prob is None


@pytest.mark.parametrize("scale", [0.0, 1.0, 40.0])
def test_last_layer_is_exactly_zero_and_nothing_is_negative(scale: float) -> None:
    states, head = states_and_head(300, scale=scale)
    states[2] = states[-1]
    got = lens_statistics(states, lambda h: h @ head.T)
    assert torch.equal(got.kl[-1], torch.zeros(POS)) and (got.kl[2] < 1e-4).all()
    assert (got.kl >= 0).all() and (got.entropy >= 0).all()
    if scale == 0:
        torch.testing.assert_close(got.entropy, torch.full((LAYERS, POS), np.log(300.0), dtype=torch.float32))
        assert (got.argmax == 0).all()


def test_equal_logits_are_listed_by_rising_id() -> None:
    """bfloat16 has ties all the time; a cell must show the same tokens on every machine."""
    logits = torch.zeros(2, 3, 500)
    logits[..., [499, 130, 7, 129, 256]] = 3.0
    got = lens_statistics(logits, torch.clone, top_k=7, target_id=130)
    assert got.top_ids[1, 2].tolist() == [7, 129, 130, 256, 499, 0, 1]
    assert (got.target_rank == 0).all(), "no token has a larger logit"


@pytest.mark.parametrize("offset", [-100.0, 300.0])
def test_a_common_offset_of_the_logits_costs_no_precision(offset: float) -> None:
    """GPT-2's logits lie near -100, where float32 steps by 8e-6."""
    states, head = states_and_head(50257, scale=0.3)
    got = lens_statistics(states, lambda h: h @ head.T + offset)
    log_p = torch.log_softmax((states @ head.T + offset).double(), -1)
    expected = (log_p[-1].exp() * (log_p[-1] - log_p)).sum(-1)
    torch.testing.assert_close(got.kl.double(), expected, atol=3e-5, rtol=1e-5)
    torch.testing.assert_close(got.entropy.double(), -(log_p.exp() * log_p).sum(-1), atol=3e-5, rtol=1e-5)


def test_bfloat16_logits_are_taken_in_float32() -> None:
    states, head = states_and_head(900)

    def unembed(h: Tensor) -> Tensor:
        return (h @ head.T).bfloat16()

    got = lens_statistics(states, unembed, top_k=2)
    assert got.kl.dtype == got.entropy.dtype == got.top_probs.dtype == torch.float32
    log_p = torch.log_softmax(torch.cat([unembed(s)[None] for s in states]).double(), -1)
    expected = (log_p[-1].exp() * (log_p[-1] - log_p)).sum(-1)
    torch.testing.assert_close(got.kl.double(), expected, atol=2e-5, rtol=1e-5)


def seen_shapes(states: Tensor, head: Tensor) -> list[int]:
    rows: list[int] = []

    def unembed(h: Tensor) -> Tensor:
        rows.append(h.shape[0])
        return h @ head.T

    lens_statistics(states, unembed)
    return rows


def test_positions_go_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    states, head = states_and_head(200)
    whole = lens_statistics(states, lambda h: h @ head.T, top_k=3, target_id=5)
    monkeypatch.setattr(lens_math, "ROWS_CPU", 2 * LAYERS + 1)
    assert seen_shapes(states, head) == [2 * LAYERS] * 5 + [LAYERS]
    parts = lens_statistics(states, lambda h: h @ head.T, top_k=3, target_id=5)
    for name, value in vars(whole).items():
        torch.testing.assert_close(getattr(parts, name), value, atol=1e-5, rtol=1e-5)


def test_progress_rises_to_one_and_may_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lens_math, "ROWS_CPU", 2 * LAYERS)
    states, head = states_and_head(50)
    told: list[float] = []
    unembed: Callable[[Tensor], Tensor] = lambda h: h @ head.T  # noqa: E731
    lens_statistics(states, unembed, progress=lambda fraction, message: told.append(fraction))
    assert told == [2 / 11, 4 / 11, 6 / 11, 8 / 11, 10 / 11, 1.0]

    def stop(fraction: float, message: str) -> None:
        raise Cancelled

    with pytest.raises(Cancelled):
        lens_statistics(states, unembed, progress=stop)
