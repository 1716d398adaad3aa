"""The statistics that all probes share, each against brute force, a closed form or another library."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import scipy.stats
import torch

from engram_lab.probes import stats
from engram_lab.probes.batches import alike, by_length, padded


def test_draws_are_whole_samples_and_the_first_is_the_sample_itself() -> None:
    drawn = stats.draws(7, 4000, 3)
    assert drawn.shape == (4001, 7) and drawn.dtype == np.float64 and (drawn.sum(axis=1) == 7).all()
    assert (drawn[0] == 1).all() and (drawn == drawn.round()).all() and (drawn >= 0).all()
    # Each group is drawn Binomial(7, 1/7) times, and two of them are correlated by -1/6.
    assert drawn[1:].mean(axis=0) == pytest.approx(np.ones(7), abs=0.06)
    assert drawn[1:].var(axis=0) == pytest.approx(np.full(7, 6 / 7), abs=0.08)
    correlation = np.corrcoef(drawn[1:].T)
    assert correlation[~np.eye(7, dtype=bool)] == pytest.approx(np.full(42, -1 / 6), abs=0.06)


def test_the_order_of_draws_is_that_of_the_kept_sessions() -> None:
    """Sessions are replayed to the bit: these are the numbers of numpy's multinomial, one sample after the other."""
    rng, again = np.random.default_rng(11), np.random.default_rng(11)
    for n in (5, 1, 0, 3):
        expected = again.multinomial(n, np.full(n, 1 / n), size=6) if n > 1 else np.ones((0, n))
        assert np.array_equal(stats.draws(n, 6, rng)[1:], expected)
    assert np.array_equal(stats.draws(5, 6, 11)[1:], np.random.default_rng(11).multinomial(5, [0.2] * 5, size=6))


@pytest.mark.parametrize("n", [0, 1])
def test_one_group_or_none_is_not_resampled(n: int) -> None:
    assert stats.draws(n, 100, 0).tolist() == [[1.0] * n]


def test_a_ratio_by_nothing_is_nan() -> None:
    found = stats.ratio(np.array([[1.0, 2.0], [0.0, 3.0]]), np.array([4.0, 0.0]))
    assert found[:, 0].tolist() == [0.25, 0.0] and np.isnan(found[:, 1]).all()


def test_percentiles_by_hand() -> None:
    """Linear between the ordered values, as the definition of Hyndman and Fan's type 7 has it."""

    def point(values: list[float], level: float) -> float:
        ordered = sorted(v for v in values if not math.isnan(v))
        at = level * (len(ordered) - 1)
        below = math.floor(at)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (at - below) * (ordered[above] - ordered[below])

    values = np.random.default_rng(0).normal(size=(83, 2, 3))
    values[values > 1.5] = np.nan
    values[:, 1, 2] = np.nan
    low, high = stats.percentiles(values)
    assert low.shape == high.shape == (2, 3) and math.isnan(low[1, 2]) and math.isnan(high[1, 2])
    for i, j in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]:
        column = values[:, i, j].tolist()
        assert (low[i, j], high[i, j]) == pytest.approx((point(column, 0.025), point(column, 0.975)), rel=1e-12)
    low, high = stats.percentiles(values[:0])
    assert low.shape == (2, 3) and np.isnan(low).all() and np.isnan(high).all()
    assert [float(v) for v in stats.percentiles(np.array([1.0, 2.0]))] == pytest.approx([1.025, 1.975])


def test_an_interval_of_a_ratio_by_brute_force() -> None:
    rng = np.random.default_rng(5)
    sums, counts = rng.normal(size=(6, 2)), rng.integers(1, 9, 6).astype(float)
    drawn = stats.draws(6, 300, 1)
    mean, low, high = stats.ratio_interval(sums, counts, drawn)
    ratios = []
    for row in drawn[1:].astype(int):
        members = [g for g, times in enumerate(row) for _ in range(times)]
        ratios.append([sum(sums[g, c] for g in members) / sum(counts[g] for g in members) for c in range(2)])
    assert mean == pytest.approx([sums[:, c].sum() / counts.sum() for c in range(2)])
    assert low == pytest.approx([np.percentile([r[c] for r in ratios], 2.5) for c in range(2)])
    assert high == pytest.approx([np.percentile([r[c] for r in ratios], 97.5) for c in range(2)])
    mean, low, high = stats.ratio_interval(sums[:1], counts[:1], stats.draws(1, 300, 1))
    assert mean == pytest.approx(sums[0] / counts[0]) and np.isnan(low).all() and np.isnan(high).all()


def test_an_interval_of_a_mean_is_that_of_scipy() -> None:
    """Other draws, so within what 20,000 resamples leave: a fiftieth of the interval's width."""
    values = np.random.default_rng(2).exponential(size=40)
    ones = np.ones(40)
    mean, low, high = stats.ratio_interval(values, ones, stats.draws(40, 20_000, 0))
    theirs = scipy.stats.bootstrap((values,), np.mean, n_resamples=20_000, method="percentile", rng=1)
    near = (high - low) / 50
    assert mean == pytest.approx(values.mean())
    assert (low, high) == pytest.approx(
        (theirs.confidence_interval.low, theirs.confidence_interval.high), abs=float(near)
    )


def test_a_mean_over_positions_by_hand() -> None:
    rng = np.random.default_rng(3)
    index = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2])
    counted = np.array([0, 1, 1, 1, 1, 0, 1, 1, 1], dtype=bool)
    values = rng.normal(size=(2, 9)).astype(np.float32)
    values[:, 4] = np.nan
    drawn = stats.draws(3, 50, 9)
    mean, low, high = stats.mean_interval(values, counted, index, drawn)
    kept = [p for p in range(9) if counted[p] and p != 4]
    assert low is not None and high is not None
    for row in range(2):
        assert mean[row] == pytest.approx(sum(float(values[row, p]) for p in kept) / len(kept))
        means = []
        for times in drawn[1:]:
            total = sum(times[index[p]] for p in kept)
            if total:
                means.append(sum(times[index[p]] * float(values[row, p]) for p in kept) / total)
        assert (low[row], high[row]) == pytest.approx(tuple(np.percentile(means, [2.5, 97.5])))
    assert stats.mean_interval(values, counted, index * 0, stats.draws(1, 50, 9))[1:] == (None, None)
    nothing = stats.mean_interval(values, counted & False, index, drawn)
    assert np.isnan(nothing[0]).all() and nothing[1:] == (None, None)


def test_scalars_that_are_not_there_are_none() -> None:
    assert stats.scalar_fields("m", (np.float64(1.5), None, np.nan)) == {"m": 1.5, "m_low": None, "m_high": None}


def test_kl_by_hand_and_by_scipy() -> None:
    logits = torch.randn(2, 3, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    log_p, log_q = logits.log_softmax(-1)
    found = stats.kl(log_p, log_q)
    assert found.shape == (3,)
    assert found.numpy() == pytest.approx(scipy.stats.entropy(log_p.exp().numpy(), log_q.exp().numpy(), axis=-1))
    p, q = log_p[1].exp().tolist(), log_q[1].exp().tolist()
    assert float(found[1]) == pytest.approx(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
    assert float(stats.kl(log_q, log_q).abs().max()) == 0.0


def test_batches_hold_every_text_once_and_no_more_tokens_than_they_may() -> None:
    draw = random.Random(4)
    for _ in range(200):
        lengths, most = [draw.randint(1, 30) for _ in range(draw.randint(0, 40))], draw.randint(1, 90)
        together, like = alike(lengths, most), list(by_length(lengths, most))
        for batches in (together, like):
            assert sorted(n for batch in batches for n in batch) == list(range(len(lengths)))
            assert all(len(batch) == 1 or max(lengths[n] for n in batch) * len(batch) <= most for batch in batches)
        assert all(len({lengths[n] for n in batch}) == 1 for batch in together)
        in_order = [n for batch in like for n in batch]
        assert in_order == sorted(in_order, key=lambda n: (lengths[n], n))
        # No batch could have taken the next text as well.
        for batch, after in itertools.pairwise(like):
            assert lengths[after[0]] * (len(batch) + 1) > most
        for batch, after in itertools.pairwise(together):
            one_length = lengths[batch[0]] == lengths[after[0]]
            assert not one_length or lengths[batch[0]] * (len(batch) + 1) > most
    assert alike([(2, 3), (3, 2), (2, 3), (2, 3)], 6) == [[0, 2], [3], [1]]


def test_padding_is_behind() -> None:
    assert padded([(5, 6, 7), (8,)]).tolist() == [[5, 6, 7], [8, 0, 0]]


def test_equal_items_are_drawn_as_one() -> None:
    """A sentence that is said again is no second sample: the same draws, whatever its number of copies."""
    drawn = stats.draws(["a", "b", "a", "c", "b", "a"], 50, 4)
    assert drawn.shape == (51, 6) and (drawn[0] == 1).all()
    alone = stats.draws(3, 50, 4)
    assert np.array_equal(drawn[1:], alone[1:][:, [0, 1, 0, 2, 1, 0]])
    assert stats.draws(["a"] * 5, 50, 4).tolist() == [[1.0] * 5], "one group has no spread to tell"
    values = np.array([[1.0], [5.0], [2.0]])
    once = stats.ratio_interval(values, np.ones(3), alone)
    thrice = stats.ratio_interval(np.tile(values, (3, 1)), np.ones(9), stats.draws([0, 1, 2] * 3, 50, 4))
    assert np.array_equal(once, thrice)


def test_an_interval_holds_its_estimate() -> None:
    """Of one value in twenty far away, most resamples of few draws are on one side of the mean."""
    values = np.concatenate([np.zeros(4), [100.0]])
    for seed in range(20):
        mean, low, high = stats.ratio_interval(values, np.ones(5), stats.draws(5, 3, seed))
        assert low <= mean <= high
    low, high = stats.percentiles(np.array([[1.0, np.nan], [2.0, np.nan]]), np.array([9.0, 1.0]))
    assert (low[0], high[0]) == (1.025, 9.0) and np.isnan([low[1], high[1]]).all()
