"""The map: every cell against one position at a time, and cells that are not run."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from engram_lab.models.errors import Cancelled, LabError
from engram_lab.models.handle import Handle
from engram_lab.models.kv import swap
from engram_lab.models.kv_runs import continue_from, prefill
from engram_lab.probes.kv import effects
from engram_lab.probes.kv.map import MapConfig, MapResult, layer_groups, run
from tests.probes.kv.tiny import FAMILIES, RIVER, opened, right


@pytest.fixture(params=FAMILIES)
def handle(request: pytest.FixtureRequest) -> Handle:
    return opened(request.param)


@pytest.mark.parametrize(("groups", "part"), [(0, "kv"), (2, "v")])
def test_every_cell_is_that_of_a_forward_of_its_own(
    handle: Handle, groups: int, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = MapConfig((handle.name,), RIVER, groups, part)
    result = run([handle], config).result
    pair = result.pair
    old, new = pair.answer_ids
    caches = [prefill(handle, ids).kv.first(pair.n_editable) for ids in (pair.ids_old, pair.ids_new)]

    def score(kv: object) -> float:
        logits = continue_from(handle, kv, pair.ids_old[-1:])[0, -1]
        return float(logits[new]) - float(logits[old])

    clean, donor = map(score, caches)
    assert result.recovery.shape == (groups or 3, pair.n_editable)
    for g, group in enumerate(result.groups):
        for p in range(pair.n_editable):
            alone = score(swap(*caches, [p], group, part))
            assert result.recovery[g, p] == pytest.approx((alone - clean) / (donor - clean), abs=2e-3)
    assert np.flatnonzero(result.differs).tolist() == [*pair.field, *pair.downstream]
    assert not result.recovery[:, : pair.field_start].any() and not result.flip[:, : pair.field_start].any()
    assert (np.abs(result.recovery[:, pair.field[0]]) > 1e-3).any()
    assert result.n_forwards == 1 and run([handle], config).result == result
    assert MapResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result
    # A smaller budget makes more forwards of the same cells.
    monkeypatch.setattr(effects, "BUDGET", 5 * caches[0].n_bytes)
    parts: list[float] = []
    small = run([handle], config, lambda fraction, doing: parts.append(fraction)).result
    cells = int(result.differs.sum()) * len(result.groups)
    assert small.n_forwards == len(parts) == -(-cells // 5) and parts == sorted(parts)
    np.testing.assert_allclose(small.recovery, result.recovery, atol=2e-3)
    np.testing.assert_allclose(small.kl, result.kl, atol=1e-4)


def test_groups() -> None:
    assert layer_groups(5, 0) == ((0,), (1,), (2,), (3,), (4,))
    assert layer_groups(5, 2) == ((0, 1, 2), (3, 4)) and layer_groups(5, 1) == ((0, 1, 2, 3, 4),)
    with pytest.raises(LabError, match="cannot make 6 groups"):
        layer_groups(5, 6)
    with pytest.raises(LabError, match="0, for each layer"):
        MapConfig(("m",), RIVER, -1)


def test_what_is_said_is_the_largest_cell_and_it_can_be_cancelled() -> None:
    handle = opened("llama")
    result = run([handle], MapConfig((handle.name,), right(handle), 3)).result
    g, p = np.argwhere(result.recovery == result.recovery.max())[0]
    assert f"position {p} " in result.said and f"layer {result.group_names[g]}: " in result.said

    def stop(fraction: float, doing: str) -> None:
        raise Cancelled

    with pytest.raises(Cancelled):
        run([handle], MapConfig((handle.name,), RIVER), stop)
    with handle.running():  # the lock is free again
        assert torch.is_inference_mode_enabled()
