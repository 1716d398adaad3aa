"""Replay on tiny models: the same bits, and each thing that may change them, changed by hand and named."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engram_lab.lab.command import main as cli
from engram_lab.lab.fronts import FRONTS, facts_alternatives
from engram_lab.lab.sessions import NewRun, environment, open_store
from engram_lab.lab.sessions.archive import export_session
from engram_lab.lab.sessions.replay import Replayed, Replayer
from engram_lab.models import listing
from engram_lab.models.errors import LabError
from engram_lab.models.handle import Handle, open_model
from engram_lab.probes import module_of
from engram_lab.probes.base import Record
from engram_lab.probes.cka import CKAConfig
from engram_lab.probes.facts.check import CheckConfig
from engram_lab.probes.facts.density import DensityConfig
from engram_lab.probes.facts.layers import LayersConfig
from engram_lab.probes.gates import GatesConfig
from engram_lab.probes.kv.compose import ComposeConfig
from engram_lab.probes.kv.erratum import ErratumConfig
from engram_lab.probes.kv.knockout import KnockoutConfig
from engram_lab.probes.kv.map import MapConfig
from engram_lab.probes.kv.reasoning import ReasoningConfig
from engram_lab.probes.kv.set import SetConfig
from engram_lab.probes.kv.swap import SwapConfig
from engram_lab.probes.lens import LensConfig
from engram_lab.probes.rows import RowsConfig
from engram_lab.probes.sensitivity import Item, SensitivityConfig, TextSet
from tests.lab.fronts.test_facts_alternatives import FACTS, SMALL, TEXTS
from tests.probes.kv.tiny import RIVER
from tests.tiny_lab import PROMPT

ENGRAM, DENSE = "engram-mini", "dense-mini"
LENS = LensConfig((ENGRAM, DENSE), (PROMPT,))
DENSE_LENS = LensConfig((DENSE,), ("The river runs past the mill",))
GATES = GatesConfig((ENGRAM,), (PROMPT,), controls=("shuffled",), knock_out=True)
LOOK = dataclasses.replace(RIVER, id="look", erratum="It is the sea.", question="What is old? The old")


@pytest.fixture
def lab(shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a lab of tiny models that a test may change."""
    folder = tmp_path / "models"
    shutil.copytree(shipped, folder)
    monkeypatch.setattr(listing, "SHIPPED", folder)
    return folder


@pytest.fixture
def handles(lab: Path) -> Iterator[dict[str, Handle]]:
    opened = {name: open_model(name) for name in (ENGRAM, DENSE)}
    yield opened
    for handle in opened.values():
        handle.close()


Make = Callable[..., NewRun]


@pytest.fixture
def make(handles: dict[str, Handle]) -> Make:
    """A run of a probe, as it is kept."""

    def made(probe: str, config: Record, **environ: str) -> NewRun:
        named: Any = config
        report = module_of(probe).run([handles[name] for name in named.models], config)
        return NewRun(report, seconds=0.5, environment=environment() | environ)

    return made


def replayed(*runs: NewRun, **options: Any) -> list[Replayed]:
    with Replayer(runs, range(1, len(runs) + 1), **options) as replayer:
        return [replayer.run(n) for n in replayer.chosen]


@pytest.mark.slow
def test_every_probe_comes_out_the_same_to_the_bit(make: Make) -> None:
    texts = tuple(f"The river runs past the {word}" for word in ("mill", "sea", "old mill", "town and the sea"))
    sets = (TextSet("own", (Item("The river runs"), Item("Paris is the capital of", " France"))),)
    one = (ENGRAM,)
    requests: dict[str, Any] = {
        "lens": LENS,
        "gates": GATES,
        "rows": RowsConfig(one, (PROMPT,), text=texts),
        "sensitivity": SensitivityConfig((ENGRAM, DENSE), sets, ("off", "shuffled"), bootstrap=9),
        "cka": CKAConfig((ENGRAM, DENSE), texts, points="all", bootstrap=9),
        "kv swap": SwapConfig(one, LOOK, draws=2),
        "kv map": MapConfig(one, LOOK),
        "kv knockout": KnockoutConfig(one, LOOK, draws=1),
        "kv erratum": ErratumConfig(one, LOOK),
        "kv reasoning": ReasoningConfig(one, LOOK),
        "kv compose": ComposeConfig(one, "Paris is", " the old", " mill", (" the", " sea"), lengths=(2, 5), time=True),
        "kv set": SetConfig(one, (LOOK, dataclasses.replace(LOOK, id="other", new="sea")), bootstrap=9),
        "facts check": CheckConfig(one, FACTS, texts=TEXTS, bootstrap=9),
        "facts layers": LayersConfig(one, FACTS, bootstrap=9),
        "facts density": DensityConfig(one, FACTS, sizes=(1, 2), bootstrap=9),
        "facts alternatives": facts_alternatives.request(one, FACTS, TEXTS, 1, time=True, **SMALL),
    }
    assert set(requests) == set(FRONTS)
    found = replayed(*(make(probe, config) for probe, config in requests.items()))
    assert [(own.probe, own.verdict, own.wrong, own.causes) for own in found] == [
        (probe, "identical", (), ()) for probe in requests
    ]
    assert all(own.seconds is not None and own.seconds > 0 and own.recorded_seconds == 0.5 for own in found)
    assert {own.probe for own in found if own.left_out} == {"kv compose", "facts alternatives"}


def test_a_changed_weight_is_named_with_both_fingerprints(make: Make, lab: Path) -> None:
    runs = make("lens", DENSE_LENS), make("gates", GATES)
    before = runs[0].report.protocol.models[0].fingerprint
    file = lab / DENSE / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if name.endswith("layers.0.self_attn.q_proj.weight"))
    weights[name][0, 0] += 1.0
    save_file(weights, file, {"format": "pt"})
    dense, engram = replayed(*runs)
    after = open_model(DENSE).fingerprint
    assert dense.verdict == "changed" and dense.failed and before != after
    assert dense.causes == (f"weights of {DENSE}: {before} -> {after}",)
    assert dense.largest is not None and dense.largest > 1e-4 and dense.where.startswith("models[0].")
    assert dense.wrong and all(text.startswith("models[0].") for text in dense.wrong)
    assert (engram.verdict, engram.causes, engram.failed) == ("identical", (), False)


def test_a_changed_tokenizer_is_named(make: Make, lab: Path) -> None:
    run = make("lens", dataclasses.replace(DENSE_LENS, prompts=("Tokyo", *DENSE_LENS.prompts)))
    file = lab / DENSE / "tokenizer.json"
    stored = json.loads(file.read_text())
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in stored["model"]["merges"]]
    # Without its last merge " river" comes apart.
    del stored["model"]["merges"][next(n for n, merge in enumerate(merges) if merge.replace(" ", "") == "Ġriver")]
    file.write_text(json.dumps(stored))
    (own,) = replayed(run)
    assert own.verdict == "changed" and own.wrong[0] == "prompt_ids: the models got other token ids"
    assert own.causes == (f"tokenizer of {DENSE}: other ids for prompt 2",)


def test_versions_and_surroundings_are_named_though_the_bits_are_the_same(make: Make) -> None:
    here = environment()
    run = make("lens", DENSE_LENS, cpu=f"not {here['cpu']}", device=f"not {here['device']}")  # on no machine this one
    protocol = run.report.protocol
    old = dataclasses.replace(protocol, versions=protocol.versions | {"torch": "1.0", "engram_lab": "0.0"})
    (own,) = replayed(dataclasses.replace(run, report=dataclasses.replace(run.report, protocol=old)))
    now = protocol.versions
    assert own.verdict == "identical" and not own.failed
    assert own.causes == (
        f"torch 1.0 -> {now['torch']}",
        f"engram-lab 0.0 -> {now['engram_lab']}",
        f"CPU capability not {here['cpu']} -> {here['cpu']}",
        f"processor not {here['device']} -> {here['device']}",
    )


def test_as_many_threads_as_then_and_then_as_many_as_before(make: Make) -> None:
    before = torch.get_num_threads()
    runs = (make("lens", DENSE_LENS, threads="3"), make("lens", DENSE_LENS, threads="99999999999"))
    used: list[int] = []
    with Replayer(runs, (1, 2)) as replayer:
        first = replayer.run(1, lambda fraction, doing: used.append(torch.get_num_threads()))
        assert set(used) == {3}
        used.clear()
        second = replayer.run(2, lambda fraction, doing: used.append(torch.get_num_threads()))
        assert set(used) == {before}
    assert torch.get_num_threads() == before
    assert not any(text.startswith("threads") for text in first.causes)
    assert second.causes == (f"threads 99999999999 -> {before}",) and second.verdict == "identical"


def test_a_device_that_is_not_here_is_replaced_by_the_cpu_and_named(make: Make) -> None:
    run = make("lens", DENSE_LENS)
    (model,) = run.report.protocol.models
    protocol = dataclasses.replace(run.report.protocol, models=(dataclasses.replace(model, device="cuda:93"),))
    (own,) = replayed(dataclasses.replace(run, report=dataclasses.replace(run.report, protocol=protocol)))
    assert own.verdict == "identical" and own.causes == (f"device of {DENSE}: cuda:93 -> cpu",)


def test_the_dtype_on_record_is_used(lab: Path) -> None:
    from engram_lab.probes import lens as lens_probe

    half = NewRun(lens_probe.run([open_model(DENSE, dtype="bfloat16")], DENSE_LENS))
    assert half.report.protocol.models[0].dtype == "bfloat16"
    (own,) = replayed(half)
    assert (own.verdict, own.causes) == ("identical", ())


def test_a_model_that_is_not_here_and_a_request_that_cannot_be_served(make: Make, lab: Path) -> None:
    runs = make("lens", DENSE_LENS), make("gates", GATES), make("lens", DENSE_LENS)
    shutil.rmtree(lab / DENSE)
    report = dataclasses.replace(runs[1].report, config=GatesConfig((ENGRAM,), ("",)))
    found = replayed(runs[0], dataclasses.replace(runs[1], report=report), runs[2])
    assert [own.verdict for own in found] == ["not run"] * 3 and all(own.failed for own in found)
    assert DENSE in found[0].wrong[0] and found[0].seconds is None and found[0].largest is None
    assert found[1].wrong == ("The prompt is empty: type at least one character.",)


def test_models_are_opened_once_and_closed_when_no_run_needs_them(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = make("lens", LENS), make("lens", DENSE_LENS), make("gates", GATES)
    opened: list[Handle] = []

    def spied(*args: Any, **options: Any) -> Handle:
        opened.append(open_model(*args, **options))
        return opened[-1]

    def closed(handle: Handle) -> bool:
        try:
            return handle.model is None
        except LabError:
            return True

    monkeypatch.setattr("engram_lab.models.handle.open_model", spied)
    with Replayer(runs, (3, 1, 2, 1)) as replayer:
        assert replayer.chosen == [1, 2, 3]
        replayer.run(1)
        assert [handle.name for handle in opened] == [ENGRAM, DENSE] and not any(map(closed, opened))
        replayer.run(2)
        assert list(map(closed, opened)) == [False, True]
    assert len(opened) == 2 and all(map(closed, opened))
    for wrong in (0, 4):
        with pytest.raises(LabError, match=f"There is no run {wrong}: the session has runs 1 to 3"):
            Replayer(runs, (1, wrong))


# --- The command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def archive(make: Make, tmp_path: Path) -> Path:
    """A session of two runs, as a file."""
    store = open_store(f"sqlite:///{tmp_path / 'store.db'}", tmp_path / "store")
    for run in (make("lens", DENSE_LENS), make("gates", GATES)):
        store.save(run.report, "two", seconds=run.seconds)
    export_session(store, "two", tmp_path / "two.zip")
    store.dispose()
    return tmp_path / "two.zip"


def test_the_table_and_exit_code_of_a_session_that_comes_out_the_same(
    archive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["replay", str(archive)]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].split() == [
        "run",
        "probe",
        "models",
        "verdict",
        "largest",
        "difference",
        "seconds",
        "not",
        "as",
        "it",
        "was",
    ]
    assert lines[1].split()[:5] == ["1", "lens", DENSE, "identical", "0"] and lines[2].split()[:3] == [
        "2",
        "gates",
        ENGRAM,
    ]
    assert lines[3:] == ["2 runs: 2 identical"] and err == ""


def test_what_changed_is_in_table_json_and_exit_code(
    archive: Path, lab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = lab / DENSE / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] += 0.5
    save_file(weights, file, {"format": "pt"})
    assert cli.main(["replay", str(archive), "--json", str(tmp_path / "found.json")]) == 1
    out = capsys.readouterr().out.splitlines()
    assert f"weights of {DENSE}: " in out[1] and "changed" in out[1] and "more" in out[1]
    assert out[-1] == "2 runs: 1 identical, 1 changed (see run 1)"
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["session"] == "two" and found["tolerance"] == 1e-4
    assert [run["verdict"] for run in found["runs"]] == ["changed", "identical"]
    assert len(found["runs"][0]["wrong"]) > 3 and found["runs"][1]["wrong"] == []
    # Only the run that was asked for, and nothing but JSON on stdout.
    assert cli.main(["replay", str(archive), "--run", "2", "--json", "-"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["run"], run["probe"], run["verdict"]) == (2, "gates", "identical")
    assert cli.main(["replay", str(archive), "--run=1", "--tolerance=1e9"]) == 1  # winning tokens turned all the same


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{archive}", "--run", "3"], "There is no run 3"),
        (["{archive}", "--tolerance", "-1"], "it must be 0 or more"),
        (["{archive}.none"], "Could not read or write"),
        (["{archive}", "--run", "x"], "--run"),
    ],
)
def test_a_bad_request_is_one_sentence(
    archive: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["replay", *(word.format(archive=archive) for word in words)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and len(err.splitlines()) == 1


def test_a_file_that_is_no_session_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.zip").write_bytes(b"PK\x03\x04 no zip")
    assert cli.main(["replay", str(tmp_path / "x.zip")]) == 2
    assert "cannot be read as a session of the lab" in capsys.readouterr().err


def test_an_interrupt_closes_the_models_and_ends_with_130(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Handle] = []

    def interrupted(*args: Any, **options: Any) -> Handle:
        if opened:
            raise KeyboardInterrupt
        opened.append(open_model(*args, **options))
        torch.set_num_threads(torch.get_num_threads() + 1)
        return opened[0]

    before = torch.get_num_threads()
    monkeypatch.setattr("engram_lab.models.handle.open_model", interrupted)
    assert cli.main(["replay", str(archive)]) == 130
    assert torch.get_num_threads() == before
    with pytest.raises(LabError, match="was closed"):
        _ = opened[0].model


def test_names_out_of_a_file_cannot_steer_the_terminal() -> None:
    from engram_lab.lab.command.replay import _cells, _line

    own = Replayed(1, "lens", ("a\x1b[31m\rb\n",), "not run", wrong=("\x07ring",))
    line = _line(_cells(own), [0] * 7)
    assert line.isprintable() and "a�[31m�b�" in line
