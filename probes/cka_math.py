"""Linear CKA (arXiv 1905.00414) with an unbiased HSIC (arXiv 2010.15327): no matrix over pairs of points.

Axes: point, layer_a, layer_b, d_a, d_b, group (the sentence of a point), resample.
With X and Y centred over n points, C = X^T Y, a_i = |x_i|^2 and b_i = |y_i|^2, the estimator HSIC_1 of Song et al.
(J. Mach. Learn. Res. 13, 2012, eq. 5) is, for linear kernels,
    n (n - 3) HSIC_1 = |C|^2 - n / (n - 2) sum_i a_i b_i + (sum_i a_i) (sum_i b_i) / ((n - 1) (n - 2))
    CKA = HSIC_1(X, Y) / sqrt(HSIC_1(X, X) HSIC_1(Y, Y))
and the biased CKA is |C_xy|^2 / (|C_xx| |C_yy|). All of it follows from sums over points that are taken in one
pass, shifted by the mean of the first points so that large means cost no digits, and centred at the end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engram_lab.models.errors import LabError

MIN_POINTS = 4  # HSIC_1 divides by n - 3
NEAREST = 5  # layers in a soft alignment
# Of |C|^2: an HSIC of a layer with itself that is smaller is rounding. It is 0 where all points are equally far apart.
RESOLUTION = 1e-12
CROSS_BYTES = 2**30  # of the cross-covariances held at once; wider models take several rounds over the points
RESAMPLES_AT_ONCE = 100
# (x [point, layer_a, d_a], y [point, layer_b, d_b]) piece by piece; called again for another round.
Pieces = Callable[[], Iterable[tuple[Tensor, Tensor]]]


class Sums:
    """Sums over points from which the HSIC of every pair of layers follows; `own` pairs each layer with itself.

    One pass: `add` the points piece by piece, then `finish`. All of it is float64, whatever the points are: of one
    point that is a hundred times as long as the others, the fourth powers that cancel leave nothing of float32's seven
    digits. Memory does not depend on the number of points.
    """

    def __init__(self, own: bool = False) -> None:
        self.own, self.n = own, 0

    def _ein(self, pattern: str, *operands: Tensor) -> Tensor:
        """einsum, in which layer_b is layer_a for a layer with itself."""
        if self.own:
            pattern = re.sub(r"[a-z]+", lambda m: m[0].replace("b", "" if "a" in m[0] else "a"), pattern)
        return torch.einsum(pattern, *operands)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Take in x [point, layer_a, d_a] and y [point, layer_b, d_b] of the same points."""
        x, y = x.double(), y.double()
        if not self.n:
            self.shift = x.mean(dim=0), y.mean(dim=0)
        x, y = x - self.shift[0], y - self.shift[1]
        a, b = x.square().sum(dim=-1), y.square().sum(dim=-1)
        new = {
            "sum_x": x.sum(dim=0),  # [layer_a, d_a]
            "sum_y": y.sum(dim=0),
            "sum_a": a.sum(dim=0),  # [layer_a]
            "sum_b": b.sum(dim=0),
            "ab": self._ein("na,nb->ab", a, b),
            "bx": self._ein("nb,nax->abx", b, x),
            "ay": self._ein("na,nby->aby", a, y),
            "cross": self._ein("nax,nby->axby", x, y),
        }
        for name, value in new.items():
            setattr(self, name, getattr(self, name).add_(value) if self.n else value)
        self.n += len(x)

    sum_x: Tensor
    sum_y: Tensor
    sum_a: Tensor
    sum_b: Tensor
    ab: Tensor
    bx: Tensor
    ay: Tensor
    cross: Tensor

    def finish(self) -> tuple[Tensor, Tensor]:
        """(unbiased, biased): n (n - 3) HSIC_1 and |C|^2, [layer_a, layer_b], or [layer_a] of layers with themselves.

        LabError for fewer than 4 points.
        """
        n = self.n
        if n < MIN_POINTS:
            raise LabError(f"CKA needs at least {MIN_POINTS} points, and there are {n}: give more texts or points.")
        x, y = self.sum_x / n, self.sum_y / n  # the means of the shifted points
        xx, yy = x.square().sum(dim=-1), y.square().sum(dim=-1)
        self.centre = self.shift[0] + x, self.shift[1] + y
        self.cross -= n * self._ein("ax,by->axby", x, y)
        # sum_i |x_i - x|^2 |y_i - y|^2, multiplied out
        both = self.ab - 2 * self._ein("ax,abx->ab", x, self.bx) - 2 * self._ein("by,aby->ab", y, self.ay)
        both += 4 * self._ein("aby,by->ab", self._ein("ax,axby->aby", x, self.cross), y)
        both += self._ein("a,b->ab", xx, self.sum_b) + self._ein("a,b->ab", self.sum_a, yy)
        both += n * self._ein("a,b->ab", xx, yy)
        a, b = self.sum_a - n * xx, self.sum_b - n * yy
        biased = self._ein("axby,axby->ab", self.cross, self.cross)
        unbiased = biased - n / (n - 2) * both + self._ein("a,b->ab", a, b) / ((n - 1) * (n - 2))
        if self.own:
            unbiased[unbiased < RESOLUTION * biased] = 0
        return unbiased, biased

    def shares(self, x: Tensor, y: Tensor) -> Tensor:
        """What each point adds to |C|^2 - sum_i a_i b_i, that is x_i^T C y_i - a_i b_i, [point, layer_a, layer_b].

        After `finish`, for the points that were added.
        """
        x, y = (z.double() - centre for z, centre in zip((x, y), self.centre, strict=True))
        own = self._ein("na,nb->nab", x.square().sum(dim=-1), y.square().sum(dim=-1))
        if self.own:
            return (torch.einsum("nax,axy->nay", x, self.cross) * y).sum(dim=-1) - own
        for layer, c in enumerate(self.cross):  # one layer of A at a time: [point, layer_a, layer_b, d_b] never exists
            own[:, layer].neg_().add_((torch.mm(x[:, layer], c.flatten(1)).view_as(y) * y).sum(dim=-1))
        return own


@dataclass(frozen=True)
class Hsic:
    """n (n - 3) HSIC of all pairs of layers, float64; `of_a` and `of_b` are those of a layer with itself.

    unbiased, biased: [layer_a, layer_b], [layer_a], [layer_b]. shares: the same with a leading axis group, how much
    a group adds to the unbiased one to first order, adding up to 0; None if no groups were asked for.
    """

    unbiased: tuple[np.ndarray, np.ndarray, np.ndarray]
    biased: tuple[np.ndarray, np.ndarray, np.ndarray]
    shares: tuple[np.ndarray, np.ndarray, np.ndarray] | None


def constant(sums: Iterable[tuple[Tensor, Tensor]]) -> tuple[np.ndarray, np.ndarray]:
    """Which layers [layer_a], [layer_b] are the same at every point, to the precision of their numbers; one pass."""
    first: tuple[Tensor, Tensor] | None = None
    for pair in sums:
        if first is None:
            first = pair[0][0].clone(), pair[1][0].clone()
            most = [torch.zeros(len(z)) for z in first]
        for z, at, m in zip(pair, first, most, strict=True):
            torch.maximum(m, (z - at).norm(dim=-1).amax(dim=0).cpu().float(), out=m)
    assert first is not None, "there are no points"
    same = [
        (m <= 4 * torch.finfo(z.dtype).eps * z.norm(dim=-1).cpu().float()).numpy()
        for z, m in zip(first, most, strict=True)
    ]
    return same[0], same[1]


def hsic(pieces: Pieces, group: np.ndarray | None = None, told: Callable[[float], None] | None = None) -> Hsic:
    """The HSICs of all pairs of layers of the points that `pieces` gives.

    `group` [point] numbers the sentences from 0: with it, the points are read once more for the shares. `told`
    hears the fraction done, and may raise to stop.
    """
    x, y = next(iter(pieces()))
    (_, layers_a, d_a), (_, layers_b, d_b) = x.shape, y.shape
    step_b = min(layers_b, max(1, CROSS_BYTES // (8 * d_a * d_b)))
    step_a = min(layers_a, max(1, CROSS_BYTES // (8 * d_a * d_b * step_b)))
    blocks = [
        (slice(i, i + step_a), slice(j, j + step_b))
        for i in range(0, layers_a, step_a)
        for j in range(0, layers_b, step_b)
    ]
    shapes: tuple[tuple[int, ...], ...] = ((layers_a, layers_b), (layers_a,), (layers_b,))
    unbiased, biased = (tuple(map(np.zeros, shapes)) for _ in range(2))
    n_groups = 0 if group is None else int(group.max()) + 1
    shares = tuple(np.zeros((n_groups, *shape)) for shape in shapes)
    jobs: list[list[tuple[int, tuple[slice, ...], Sums]]] = [[(0, block, Sums())] for block in blocks]
    jobs[0] += [(1, (slice(None),), Sums(own=True)), (2, (slice(None),), Sums(own=True))]

    def rounds(number: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(index of the first point, x, y) of a round, telling how far it is."""
        done = 0
        for x, y in pieces():
            yield done, x, y
            done += len(x)
            if told is not None:
                told((number + done / max(len(group) if group is not None else done, 1)) / n_rounds)

    def sides(which: int, at: tuple[slice, ...], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return ((x[:, at[0]], y[:, at[-1]]), (x, x), (y, y))[which]

    n_rounds = len(jobs) * (1 if group is None else 2)
    number = 0
    for job in jobs:
        for _, x, y in rounds(number):
            for which, at, sums in job:
                sums.add(*sides(which, at, x, y))
        for which, at, sums in job:
            values = sums.finish()
            unbiased[which][at], biased[which][at] = (value.cpu().numpy() for value in values)
        number += 1
        if group is None:
            continue
        for start, x, y in rounds(number):
            index = torch.from_numpy(group[start : start + len(x)]).to(x.device)
            for which, at, sums in job:
                found = sums.shares(*sides(which, at, x, y))
                total = found.new_zeros(n_groups, *found.shape[1:]).index_add_(0, index, found)
                shares[which][(slice(None), *at)] += total.cpu().numpy()
        number += 1
        job.clear()  # its cross-covariances
    if group is not None:
        size = np.bincount(group, minlength=n_groups)
        for share in shares:
            # Twice: every point is in a pair as its first and as its second.
            share -= np.multiply.outer(size / size.sum(), share.sum(axis=0))
            share *= 2
    return Hsic(unbiased, biased, shares if group is not None else None)  # type: ignore[arg-type]


def ratio(cross: np.ndarray, of_a: np.ndarray, of_b: np.ndarray) -> np.ndarray:
    """CKA [..., layer_a, layer_b] of HSICs; NaN where that of a layer with itself is not positive."""
    with np.errstate(invalid="ignore"):
        scale = (
            np.sqrt(np.where(of_a > 0, of_a, np.nan))[..., :, None]
            * np.sqrt(np.where(of_b > 0, of_b, np.nan))[..., None, :]
        )
    found: np.ndarray = cross / scale
    return found


def linear_cka(x: Tensor, y: Tensor, biased: bool = False) -> float:
    """CKA of x [point, d_a] and y [point, d_b]; LabError for fewer than 4 points or points that are all the same."""
    pair = x[:, None], y[:, None]
    if len(x) >= MIN_POINTS:
        for name, same in zip("xy", constant([pair]), strict=True):
            if same[0]:
                raise LabError(f"All {len(x)} points of {name} are the same, so it has no CKA: give different points.")
    found = hsic(lambda: [pair])
    value = float(ratio(*(found.biased if biased else found.unbiased))[0, 0])
    if np.isnan(value):
        raise LabError(f"The {len(x)} points of x or of y are all equally far from each other, so there is no CKA.")
    return value


def resampled(found: Hsic, draws: int, seed: int) -> Iterator[np.ndarray]:
    """CKA [resample, layer_a, layer_b] of resamples of the groups, drawn with replacement, a block at a time.

    A plain resample would hold copies of a group, and pairs of a point with its copy are what an unbiased HSIC
    leaves out. So each HSIC follows its shares: to first order what drawing a group w times does. This is the
    bootstrap of the Hajek projection of a U-statistic; where HSIC is 0 it is wider than needed, not narrower. To first
    order a resample can leave [-1, 1], where every CKA lies (HSIC_1 is an inner product): it is put at the end.
    """
    assert found.shares is not None
    rng = np.random.default_rng(seed)
    n = len(found.shares[0])
    for first in range(0, draws, RESAMPLES_AT_ONCE):
        count = min(RESAMPLES_AT_ONCE, draws - first)
        weights = rng.multinomial(n, np.full(n, 1 / n), size=count).astype(np.float64)
        moved = [
            value + (weights @ share.reshape(n, -1)).reshape(count, *value.shape)
            for value, share in zip(found.unbiased, found.shares, strict=True)
        ]
        yield np.clip(ratio(*moved), -1, 1)


def soft_alignment(cka: np.ndarray, index: np.ndarray) -> np.ndarray:
    """CKA-weighted mean of `index` [layer_b] over each layer's 5 best [..., layer_a, layer_b] -> [..., layer_a].

    A negative CKA has weight 0; NaN where no layer has a positive one.
    """
    best = np.argsort(-cka, axis=-1, kind="stable")[..., :NEAREST]
    weight = np.maximum(np.take_along_axis(cka, best, axis=-1), 0)  # NaN stays
    total = weight.sum(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean: np.ndarray = (weight * index[best]).sum(axis=-1) / total
    return mean
