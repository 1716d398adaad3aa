"""CKA in feature space against a brute-force one over all pairs of points, and its intervals against a simulation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from engram_lab.models.errors import LabError
from engram_lab.probes import cka_math
from engram_lab.probes.cka_math import Sums, constant, hsic, linear_cka, ratio, resampled, soft_alignment


def hsic_1(k: np.ndarray, m: np.ndarray) -> float:
    """Song et al. (2012), equation 5, on kernel matrices."""
    n = len(k)
    k, m = k - np.diag(np.diag(k)), m - np.diag(np.diag(m))
    one = np.ones(n)
    value = np.trace(k @ m) + (one @ k @ one) * (one @ m @ one) / ((n - 1) * (n - 2))
    return float(value - 2 / (n - 2) * (one @ k @ m @ one)) / (n * (n - 3))


def brute(x: Tensor, y: Tensor) -> float:
    """Unbiased CKA through n x n kernels; centred first, which changes nothing but keeps the digits."""
    a, b = (z.double().numpy() - z.double().numpy().mean(0) for z in (x, y))
    k, m = a @ a.T, b @ b.T
    return hsic_1(k, m) / np.sqrt(hsic_1(k, k) * hsic_1(m, m))


def brute_biased(x: Tensor, y: Tensor) -> float:
    n = len(x)
    h = np.eye(n) - 1 / n
    k, m = (h @ (z.double().numpy() @ z.double().numpy().T) @ h for z in (x, y))
    return float((k * m).sum() / np.sqrt((k * k).sum() * (m * m).sum()))


def related(n: int, d_a: int, d_b: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Points that share a few directions, with large means and an outlier dimension, as residual streams have."""
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, 5, generator=g, dtype=torch.float64)
    x = z @ torch.randn(5, d_a, generator=g, dtype=torch.float64)
    y = z @ torch.randn(5, d_b, generator=g, dtype=torch.float64)
    x += torch.randn(n, d_a, generator=g, dtype=torch.float64)
    y += 2 * torch.randn(n, d_b, generator=g, dtype=torch.float64)
    x[:, 0] = 3 * x[:, 0] + 500
    return (x + 10).to(dtype), (y - 4).to(dtype)


def layers(n: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """x [point, 3, 7] and y [point, 2, 5]."""
    pairs = [related(n, 7, 5, seed + s, dtype) for s in range(3)]
    return torch.stack([p[0] for p in pairs], 1), torch.stack([p[1] for p in pairs[:2]], 1)


def split(x: Tensor, y: Tensor, size: int) -> cka_math.Pieces:
    return lambda: zip(x.split(size), y.split(size), strict=True)


@pytest.mark.parametrize(("n", "d_a", "d_b"), [(4, 3, 3), (5, 40, 2), (64, 8, 30), (300, 50, 20)])
def test_against_all_pairs_of_points(n: int, d_a: int, d_b: int) -> None:
    x, y = related(n, d_a, d_b)
    assert hsic(lambda: [(x[:, None], y[:, None])]).unbiased[0][0, 0] / (n * (n - 3)) == pytest.approx(
        hsic_1(*((z - z.mean(0)).numpy() @ (z - z.mean(0)).numpy().T for z in (x, y))), rel=1e-9
    )
    assert linear_cka(x, y) == pytest.approx(brute(x, y), abs=1e-10)
    assert linear_cka(x, y, biased=True) == pytest.approx(brute_biased(x, y), abs=1e-10)


@pytest.mark.parametrize("size", [1, 7, 500])
def test_pieces_and_layers_do_not_matter(size: int) -> None:
    """Points that come one by one, of which the first is nowhere near the mean, give the same."""
    x, y = layers(200)
    x[0] += 100
    found = hsic(split(x, y, size))
    wanted = [[brute(x[:, i], y[:, j]) for j in range(2)] for i in range(3)]
    np.testing.assert_allclose(ratio(*found.unbiased), wanted, atol=1e-9)
    wanted = [[brute_biased(x[:, i], y[:, j]) for j in range(2)] for i in range(3)]
    np.testing.assert_allclose(ratio(*found.biased), wanted, atol=1e-9)


def test_float32_keeps_six_digits() -> None:
    x, y = related(700, 128, 96, dtype=torch.float32)
    x[:, 1] += 5000
    assert linear_cka(x, y) == pytest.approx(brute(x, y), abs=1e-6)


def test_wide_layers_in_several_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = layers(60)
    group = np.arange(60) // 6
    whole = hsic(split(x, y, 20), group)
    for room in (1, 8 * 7 * 5, 8 * 7 * 5 * 2):  # a pair of layers, and both layers of y with one of x
        monkeypatch.setattr(cka_math, "CROSS_BYTES", room)
        again = hsic(split(x, y, 20), group)
        for which in range(3):
            np.testing.assert_allclose(again.unbiased[which], whole.unbiased[which], rtol=1e-12)
            np.testing.assert_allclose(again.biased[which], whole.biased[which], rtol=1e-12)
            np.testing.assert_allclose(again.shares[which], whole.shares[which], rtol=1e-9, atol=1e-9)


def test_independent_gaussians() -> None:
    """DESIGN.md: 768 wide, 256 points score .75 with the biased estimator and 0.00 +- .005 with this one."""
    g = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(256, 768, generator=g), torch.randn(256, 768, generator=g)) for _ in range(30)]
    found = np.array([linear_cka(x, y) for x, y in pairs])
    assert abs(found.mean()) < 0.003 and found.min() < 0 < found.max()
    # Of a degenerate U-statistic: sqrt(2) / n.
    assert found.std() == pytest.approx(np.sqrt(2) / 256, rel=0.4)
    assert linear_cka(*pairs[0], biased=True) == pytest.approx(0.75, abs=0.01)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_one_under_rotation_scale_and_shift(dtype: torch.dtype, tolerance: float) -> None:
    x, _ = related(100, 20, 5)
    rotation = torch.linalg.qr(torch.randn(20, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))[0]
    y = 7 * x @ rotation - 300
    assert linear_cka(x.to(dtype), y.to(dtype)) == pytest.approx(1, abs=tolerance)
    assert linear_cka(x, x) == pytest.approx(1, abs=1e-15)


def test_more_points_take_no_more_memory() -> None:
    g = torch.Generator().manual_seed(0)
    sums, held = Sums(), []
    for _ in range(30):
        sums.add(torch.randn(64, 2, 8, generator=g), torch.randn(64, 3, 8, generator=g))
        held.append(sum(v.numel() * v.element_size() for v in vars(sums).values() if isinstance(v, Tensor)))
    assert sums.n == 30 * 64 and len(set(held)) == 1


def test_too_few_points_and_constant_ones_say_so() -> None:
    x, y = related(10, 4, 4)
    with pytest.raises(LabError, match=r"at least 4 points, and there are 3"):
        linear_cka(x[:3], y[:3])
    with pytest.raises(LabError, match="All 10 points of y are the same"):
        linear_cka(x, y[:1].expand(10, -1))
    # A regular simplex: nothing is left of its distances once they are centred.
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(LabError, match="equally far from each other"):
            linear_cka(torch.eye(6, dtype=dtype), y[:6].to(dtype))


def test_constant_layers_are_told_from_small_ones() -> None:
    x, y = (z.float() for z in layers(50))
    x[:, 1] = x[0, 1]
    y[:, 0] = 1000 + y[:, 0] * 1e-2  # small beside its mean, but not constant
    same = constant(zip(x.split(9), y.split(9), strict=True))
    assert same[0].tolist() == [False, True, False] and same[1].tolist() == [False, False]


def test_shares_are_what_leaving_a_sentence_out_does() -> None:
    """Each HSIC_1 without a sentence, by brute force, is HSIC less its share, to second order."""
    n, per = 450, 3
    x, y = layers(n)
    group = np.arange(n) // per
    found = hsic(split(x, y, 100), group)
    cases = [(x[:, 0], y[:, 1], 0, (0, 1)), (x[:, 0], x[:, 0], 1, (0,)), (y[:, 1], y[:, 1], 2, (1,))]
    for p, q, which, at in cases:
        value, share = found.unbiased[which][at], found.shares[which][(slice(None), *at)]
        assert abs(share.sum()) < 1e-9 * abs(value)
        moved = []
        for g in range(20):
            keep = group != g
            a, b = ((z[keep] - z[keep].mean(0)).numpy() for z in (p, q))
            without = hsic_1(a @ a.T, b @ b.T)
            moved.append(1 - without / (value / (n * (n - 3))))
        off = np.array(moved) - share[:20] / value
        assert np.sqrt(np.mean(off**2)) < 0.1 * np.std(moved)


def population_cka(mix_a: np.ndarray, mix_b: np.ndarray, noise_a: float, noise_b: float) -> float:
    """CKA of x = mix_a z + noise, y = mix_b z + noise, from their covariances."""
    cross = mix_a.T @ mix_b
    a = mix_a.T @ mix_a + noise_a**2 * np.eye(mix_a.shape[1])
    b = mix_b.T @ mix_b + noise_b**2 * np.eye(mix_b.shape[1])
    return float((cross**2).sum() / np.sqrt((a**2).sum() * (b**2).sum()))


@pytest.mark.parametrize("per_sentence", [1, 3])
def test_intervals_cover_the_truth(per_sentence: int) -> None:
    """Of 150 samples of 80 sentences, whose points are alike, about 95 % of the intervals hold the population's CKA."""
    rng = np.random.default_rng(0)
    mix_a, mix_b = rng.normal(size=(6, 10)), rng.normal(size=(6, 8))
    truth = population_cka(mix_a, mix_b, 1.0, 2.0)
    n_groups, hits, values, widths = 80, 0, [], []
    group = np.repeat(np.arange(n_groups), per_sentence)
    for seed in range(150):
        own = rng.normal(size=(n_groups, 6))
        # Points of a sentence share half of their variance; the points' own distribution stays standard normal.
        z = (own[group] + rng.normal(size=(len(group), 6))) / np.sqrt(2)
        x = torch.from_numpy(z @ mix_a + rng.normal(size=(len(group), 10)))[:, None]
        y = torch.from_numpy(z @ mix_b + 2 * rng.normal(size=(len(group), 8)))[:, None]
        found = hsic(lambda x=x, y=y: [(x, y)], group)  # type: ignore[misc]
        drawn = np.concatenate(list(resampled(found, 300, seed)))[:, 0, 0]
        low, high = np.quantile(drawn, [0.025, 0.975])
        hits += low <= truth <= high
        values.append(float(ratio(*found.unbiased)[0, 0]))
        widths.append(high - low)
    assert 0.9 <= hits / 150 <= 0.99
    assert np.mean(values) == pytest.approx(truth, abs=0.02)
    # As wide as the estimate really scatters.
    assert np.mean(widths) / 3.92 == pytest.approx(np.std(values), rel=0.25)


def test_a_plain_bootstrap_would_be_off() -> None:
    """Why copies are not paired: a plain resample of independent clouds has a CKA far above 0."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(100, 50, generator=g), torch.randn(100, 50, generator=g)
    drawn = np.random.default_rng(0).integers(100, size=100)
    assert linear_cka(x[drawn], y[drawn]) > 0.2
    found = hsic(lambda: [(x[:, None], y[:, None])], np.arange(100))
    values = np.concatenate(list(resampled(found, 250, 0)))
    assert values.shape == (250, 1, 1)
    assert abs(values.mean() - linear_cka(x, y)) < 0.005
    low, high = np.quantile(values, [0.025, 0.975])
    assert low < 0 < high


def test_identical_clouds_have_no_spread() -> None:
    x, _ = layers(60)
    found = hsic(lambda: [(x, x)], np.arange(60) // 3)
    values = np.concatenate(list(resampled(found, 50, 0)))
    np.testing.assert_allclose(values[:, range(3), range(3)], 1, atol=1e-12)


def test_soft_alignment_by_hand() -> None:
    cka = np.array([[0.1, 0.5, 0.4, 0.3, 0.2, 0.05, -0.3], [-0.1, -0.2, 0.5, -0.3, -0.4, 0.25, -0.5]])
    index = np.arange(-1.0, 6.0)
    # 5 best of the first: -1 .. 3; of the second only two are above 0.
    wanted = [(0.1 * -1 + 0.5 * 0 + 0.4 * 1 + 0.3 * 2 + 0.2 * 3) / 1.5, (0.5 * 1 + 0.25 * 4) / 0.75]
    np.testing.assert_allclose(soft_alignment(cka, index), wanted)
    assert np.isnan(soft_alignment(-np.ones((1, 7)), index)).all()
    np.testing.assert_allclose(soft_alignment(np.array([[0.5, 1.0]]), np.array([0.0, 1.0])), [2 / 3])


def test_ratio_of_sums_is_not_a_mean_of_ratios() -> None:
    """NaN where a layer's HSIC with itself is not above 0, and only there."""
    found = ratio(np.ones((2, 2)), np.array([4.0, -1.0]), np.array([9.0, 1.0]))
    np.testing.assert_allclose(found, [[1 / 6, 1 / 2], [np.nan, np.nan]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_massive_point_leaves_its_digits_to_the_others(dtype: torch.dtype) -> None:
    """Its fourth power is 1e9 times the others': of float32's seven digits nothing would be left to them."""
    x, y = (z.clamp(-60, 60).to(dtype) for z in related(40, 6, 8))
    x[3], y[7] = 240 * x[3], 240 * y[7]
    x, y = (torch.nan_to_num(z, posinf=6e4, neginf=-6e4) for z in (x, y))
    assert linear_cka(x, y) == pytest.approx(brute(x, y), abs=1e-9)
    assert linear_cka(x, y, biased=True) == pytest.approx(brute_biased(x, y), abs=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_no_cka_is_beyond_one(seed: int) -> None:
    """Of few points with heavy tails, and of their resamples."""
    rng = np.random.default_rng(seed)
    points = rng.standard_t(1, size=(2, 12, 3, 4))
    x, y = (torch.from_numpy(z) for z in points)
    found = hsic(lambda: [(x, x + 0.1 * y)], np.arange(12) // 2)
    drawn = np.concatenate(list(resampled(found, 300, seed)))
    assert np.nanmax(np.abs(ratio(*found.unbiased))) <= 1 + 1e-12 and np.nanmax(np.abs(drawn)) <= 1
