"""The set: each row against the ladder, means and intervals against plain numpy, refusals as rows."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from engram_lab.models.errors import Cancelled, DataError, LabError
from engram_lab.models.handle import Handle
from engram_lab.models.kv import KVEdit, blank_each
from engram_lab.models.kv_runs import continue_from
from engram_lab.probes.kv import swap
from engram_lab.probes.kv.effects import run_clean
from engram_lab.probes.kv.knockout import notes
from engram_lab.probes.kv.scenario import Scenario, prepare
from engram_lab.probes.kv.set import ALL, EDITS, FEWEST, SetConfig, SetResult, run
from engram_lab.probes.kv.swap import SwapConfig
from tests.probes.kv.tiny import FAMILIES, RIVER, opened, right


def scenarios(handle: Handle) -> tuple[Scenario, ...]:
    """Of kind a: three that the model gets right and one that it does not; of kind b: one right, one refused."""
    templates = [
        "Paris is the {field} of France, and the sea.\nTokyo is the old",
        "The {field} runs past the old mill, and into the sea of",
        "the old {field}: Paris, Tokyo, and that of France\n the capital of",
        "A new {field}, and the river runs past, the",
    ]
    good = [
        dataclasses.replace(right(handle, dataclasses.replace(RIVER, template=template)), id=str(n), kind="a")
        for n, template in enumerate(templates)
    ]
    wrong = dataclasses.replace(
        good[0], id="wrong", kind="a", answer_old=good[0].answer_new, answer_new=good[0].answer_old
    )
    refused = dataclasses.replace(RIVER, id="refused", kind="b", new="xenon")
    return (*good[:3], wrong, dataclasses.replace(good[3], kind="b"), refused)


@pytest.fixture(params=FAMILIES)
def handle(request: pytest.FixtureRequest) -> Handle:
    return opened(request.param)


def test_every_row_against_the_ladder_and_a_blank_by_itself(handle: Handle) -> None:
    chosen = scenarios(handle)
    result = run([handle], SetConfig((handle.name,), chosen, bootstrap=50)).result
    assert result.ids == ("0", "1", "2", "wrong", "3", "refused") and result.edits == EDITS
    assert result.right.tolist() == [True, True, True, False, True, False]
    assert result.served.tolist() == [True] * 5 + [False]
    assert "different numbers of tokens" in result.reasons[5] and result.reasons[3].startswith("No claim")
    assert not any(result.reasons[n] for n in (0, 1, 2, 4)) and np.isnan(result.recovery[5]).all()
    for n, scenario in enumerate(chosen[:5]):
        alone = swap.run([handle], SwapConfig((handle.name,), scenario, draws=1)).result
        np.testing.assert_allclose(result.recovery[n, :2], alone.effects.recovery[:2], atol=2e-3)
        assert result.flip[n, :2].tolist() == alone.effects.flip[:2].tolist()
        assert (result.score_old[n], result.score_new[n]) == alone.oracle.score
        pair = prepare(handle, scenario)
        clean, signs = run_clean(handle, pair), notes(handle, pair)
        assert result.note_tokens[n] == len(signs) and result.field_tokens[n] == 1 and signs
        for edit, how, positions in [
            ("notes zero", "zero", signs),
            ("notes mean", "mean", signs),
            ("downstream zero", "zero", pair.downstream),
        ]:
            logits = continue_from(handle, blank_each(clean.stale, [KVEdit(tuple(positions))], how), clean.last)[0, -1]
            kept = logits[pair.answer_ids[0]] > logits[pair.answer_ids[1]]
            if alone.oracle.top[0]:
                kept &= logits.argmax() == pair.answer_ids[0]
            assert result.flip[n, EDITS.index(edit)] == (not kept)
            assert np.isnan(result.recovery[n, EDITS.index(edit)])


def test_means_and_intervals_are_those_of_the_rows_that_count() -> None:
    handle = opened("llama")
    config = SetConfig((handle.name,), scenarios(handle), bootstrap=4000)
    report = run([handle], config)
    result = report.result
    assert result.kind_names == ("a", "b", ALL)
    assert result.n_scenarios.tolist() == [4, 2, 6] and result.n_served.tolist() == [4, 1, 5]
    assert result.n_right.tolist() == [3, 1, 4]
    a, everything = result.recovery[:3, :2], result.recovery[[0, 1, 2, 4], :2]
    np.testing.assert_allclose(result.mean[0, :2], a.mean(0))
    np.testing.assert_allclose(result.mean[1, :2], result.recovery[4, :2])
    np.testing.assert_allclose(result.mean[2, :2], everything.mean(0))
    np.testing.assert_allclose(result.contrast[2], (everything[:, 0] - everything[:, 1]).mean())
    np.testing.assert_allclose(result.flips[0], result.flip[:3].mean(0))
    assert np.isnan(result.mean[0, 3:]).all(), "a knock-out recovers nothing"
    # All samples of three with replacement, each as likely: the exact bootstrap.
    exact = [a[[i, j, k]].mean(0) for i in range(3) for j in range(3) for k in range(3)]
    low, high = np.quantile(np.repeat(exact, 1000, axis=0), [0.025, 0.975], axis=0)
    spread = np.ptp(a, axis=0)
    np.testing.assert_array_less(np.abs(result.mean_low[0, :2] - low), 0.05 * spread + 1e-9)
    np.testing.assert_array_less(np.abs(result.mean_high[0, :2] - high), 0.05 * spread + 1e-9)
    assert np.isnan(result.mean_low[1]).all() and np.isnan(result.contrast_high[1]), "one scenario has no interval"
    assert result.said[1].startswith("too few") and FEWEST == 3
    verdicts = {(True, True): "read from the field", (False, False): "read behind the field"}
    for k in (0, 2):
        signs = (bool(result.contrast_low[k] > 0), bool(result.contrast_high[k] > 0))
        assert result.said[k] == verdicts.get(signs, "no clear difference")
    assert run([handle], config).to_json() == report.to_json()
    assert SetResult.from_dict(json.loads(report.to_json())["result"]) == result
    assert len(report.protocol.prompt_ids[0]) == 10


def test_bad_requests_progress_and_cancelling() -> None:
    handle = opened("llama")
    with pytest.raises(DataError, match="No scenario"):
        SetConfig((handle.name,), ())
    with pytest.raises(DataError, match="same id"):
        SetConfig((handle.name,), (RIVER, RIVER))
    with pytest.raises(LabError, match="1 or more"):
        SetConfig((handle.name,), (RIVER,), bootstrap=0)
    with pytest.raises(DataError, match="None of the 1 scenarios can be run on llama; the first: The values"):
        run([handle], SetConfig((handle.name,), (dataclasses.replace(RIVER, new="xenon"),)))
    seen: list[tuple[float, str]] = []

    def stop(fraction: float, doing: str) -> None:
        seen.append((fraction, doing))
        if len(seen) == 2:
            raise Cancelled

    with pytest.raises(Cancelled):
        run([handle], SetConfig((handle.name,), scenarios(handle)), stop)
    assert seen == [(0.0, "scenario 0"), (1 / 6, "scenario 1")]


def test_a_scenario_without_notes() -> None:
    handle = opened("llama")
    bare = dataclasses.replace(RIVER, template="The {field} of the old sea")
    result = run([handle], SetConfig((handle.name,), (bare,))).result
    assert result.note_tokens.tolist() == [0]
    for edit in EDITS:
        assert np.isnan(result.flip[0, EDITS.index(edit)]) == ("notes" in edit)
    assert np.isnan(result.recovery[0, EDITS.index("notes")]) and not np.isnan(result.recovery[0, :2]).any()
