"""The comparison of ways to keep facts on the command line, as rows, as a figure and as words."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engram_lab.lab.ask import facts as facts_files
from engram_lab.lab.ask import flags
from engram_lab.lab.ask.texts import held_out
from engram_lab.lab.fronts import facts_alternatives as front
from engram_lab.models.errors import LabError
from engram_lab.models.handle import Handle
from engram_lab.probes.base import Report
from engram_lab.probes.facts import alternatives
from engram_lab.probes.facts.alternatives import AlternativesConfig, StatedFact, Writing, prompts_of

FACTS = (
    StatedFact("The river runs past", " the sea", ("Past the mill runs",)),
    StatedFact("Paris is the <b>capital</b> of", " France"),
)
TEXTS = ("The mill runs past the river", "Tokyo and Japan", "zzz qqq")
SMALL: dict[str, Any] = {"ranks": (2,), "lora_steps": 3, "lora_rate": 0.05, "bootstrap": 40}


def parsed(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    front.ASK.add_arguments(parser)
    flags.add_outputs(parser)
    return parser.parse_args(words)


@pytest.fixture(scope="module")
def report(pair: list[Handle]) -> Report:
    return alternatives.run(pair[:1], front.request(("engram-mini",), FACTS, TEXTS, 1, time=True, **SMALL))


def test_the_request_of_the_command_line_holds_what_ships() -> None:
    config = front.ASK.config(parsed(["--model=m", "--n-texts=2"]))
    assert config == front.request(("m",), facts_files.persona(), held_out()[:2], writing=Writing(facts_files.USER))
    assert (config.ranks, len(config.facts), config.time) == ((64, 8), 50, False)
    assert len(config.retrieved) == len(prompts_of(config.facts)) + 2 and max(map(len, config.retrieved)) == 3
    assert all(config.retrieved[n][0] == n for n in range(50))  # a trigger finds its own fact
    assert len(front.ASK.config(parsed(["--model=m"])).unrelated) == front.N_TEXTS
    assert front.ASK.config(parsed(["--model=m", "--best=0"])).retrieved == ()


def test_the_facts_of_each_text_are_retrieved_for_it() -> None:
    config = front.request(("m",), FACTS, TEXTS, 1)
    assert config.retrieved == ((0,), (1,), (0,), (0,), (), ())
    assert front.request(("m",), FACTS, TEXTS, 2).retrieved[0] == (0, 1)  # "the" is in both
    with pytest.raises(LabError, match="retrieved is -1"):
        front.request(("m",), FACTS, TEXTS, -1)


@pytest.mark.parametrize(
    "config",
    [
        front.request(("a 'model'",), FACTS, TEXTS, 2),
        front.request(("m",), FACTS, held_out()[:3], 1, writing=Writing("x", 1, "closed_form", 3, 0.1, 0.2), **SMALL),
        front.request(("m",), (StatedFact("a b", " c"),), ("t u",), 0, time=True, seed=4, lora_stop=0.3),
    ],
)
def test_the_flags_of_a_request_make_it_again(
    config: AlternativesConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in front.ASK.files(config).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert front.ASK.config(parsed(shlex.split(" ".join(front.ASK.options(config))))) == config


def test_rows(report: Report) -> None:
    rows, result = list(front.rows(report)), report.result
    assert len(rows) == len(result.methods) * (3 + 3)
    assert len({tuple(row) for row in rows}) == 1
    row = rows[6 * 2 + 2]
    assert (row["method"], row["kind"], row["text"]) == ("rows, optimised", "paraphrases", "Past the mill runs")
    assert row["answer"] == " the sea" and row["probability"] == result.probability[2, 2] and row["tokens"] == ""
    row = rows[6 * 3 + 3]
    assert (row["method"], row["kind"], row["text"]) == ("LoRA, rank 2", "unrelated", TEXTS[0])
    assert row["size_nats"] == result.text_size[3, 0] and row["positions_changed"] == result.positions[0]
    assert sum(row["positions_changed"] for row in rows if row["kind"] == "unrelated") == result.changed.sum()


def test_the_figure_shows_the_report(report: Report, pair: list[Handle]) -> None:
    result = report.result
    figure = front.figure(report, "dark", pair)
    triggers, paraphrases, unrelated = figure.data
    assert list(triggers.x) == result.top1[0].tolist() and list(paraphrases.x) == result.top1[1].tolist()
    np.testing.assert_allclose(triggers.error_x.array, result.top1_high[0] - result.top1[0])
    known = np.flatnonzero(result.size)
    assert list(unrelated.y) == known.tolist() and list(unrelated.x) == result.size[known].tolist()
    np.testing.assert_allclose(unrelated.error_x.arrayminus, (result.size - result.size_low)[known])
    zeros = [note.y for note in figure.layout.annotations if note.text == "0 exactly"]
    assert 0 in zeros and len(zeros) == len(result.methods) - len(known)
    assert figure.layout.xaxis2.type == "log"
    assert list(figure.layout.yaxis.ticktext) == list(result.methods)


def made(report: Report, rows: float) -> Report:
    """The report with other figures: the rows move unrelated text by `rows`, LoRA by 0.5."""
    result = report.result
    n, m, lora = len(result.methods), result.methods.index("rows, optimised"), result.methods.index("LoRA, rank 2")
    size = np.where(np.arange(n) == lora, 0.5, 0.0)
    size[m] = rows
    more = size / rows if rows else np.full(n, np.nan)
    gap = np.full_like(result.gap, -0.5)
    gap[0, lora] = 0.25
    changed = (size > 0).astype(np.int64)
    own = {"size": size, "more": more, "more_kl": more, "gap": gap}
    own |= {f"{name}{end}": values.copy() for name, values in own.items() for end in ("_low", "_high")}
    return dataclasses.replace(report, result=dataclasses.replace(result, changed=changed, **own))


def test_the_number_that_people_quote(report: Report) -> None:
    first, second = front.sentences(made(report, 0.01))
    assert first == (
        "LoRA, rank 2: the loss of an unrelated token moves by 0.5000 [0.5000, 0.5000] nats, "
        "50.0 [50.0, 50.0] times the rows."
    )
    assert second == "LoRA, rank 2 says more answers to triggers than the rows, by 0.25 [0.25, 0.25]."
    assert front.sentences(made(report, 0.0))[0].endswith("nats; with the rows by 0 exactly.")
    row = front.table(made(report, 0.0))[3]
    assert row["method"] == "LoRA, rank 2" and row["times the rows"] == ""
    assert row["unrelated: |change|, nats a token"].startswith("0.5000")
    rows = front.table(made(report, 0.0))[2]
    assert rows["unrelated: |change|, nats a token"] == rows["KL, nats"] == "0 exactly"
    assert front.table(made(report, 0.01))[3]["times the rows"] == "50.0 [50.0, 50.0]"


def test_the_table_tells_what_it_costs(report: Report) -> None:
    rows = {row["method"]: row for row in front.table(report)}
    assert rows["facts in the prompt"]["bytes"] == str(int(report.result.bytes[-2]))
    assert rows["nothing"]["seconds to write"] == ""
    lora = report.result.methods.index("LoRA, rank 2")
    assert float(rows["LoRA, rank 2"]["seconds to write"]) == pytest.approx(report.result.seconds[lora], rel=0.05)
    fast = dataclasses.replace(report.result, seconds=np.full(len(report.result.methods), 0.00046))
    assert front.table(dataclasses.replace(report, result=fast))[lora]["seconds to write"] == "0.00046"
    assert rows["nothing"]["positions changed"].startswith("0 of ")
    assert int(rows["facts in the prompt"]["tokens before a prompt"]) > 10
