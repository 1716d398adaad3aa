"""Sweeps: the grid of a file, one table and one session of it, resumed after an interrupt."""

from __future__ import annotations

import io
import itertools
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from safetensors.torch import load_file, save_file

from engram_lab.lab.command import sweep
from engram_lab.lab.command.main import main
from engram_lab.lab.fronts import export
from engram_lab.lab.sessions import RunInfo, open_store
from engram_lab.lab.sweep import run as sweep_run
from engram_lab.lab.sweep import table as sweep_table
from engram_lab.models.handle import open_model
from engram_lab.probes import lens as lens_probe
from engram_lab.probes import running
from engram_lab.probes.lens import LensConfig

ROOT = Path(__file__).parents[3]
Capture = pytest.CaptureFixture[str]


def written(folder: Path, content: dict[str, Any] | str, name: str = "grid.yaml") -> Path:
    file = folder / name
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return file


def lens(models: Path, **options: Any) -> dict[str, Any]:
    """Two models by the paths of their folders, two prompts: four cells."""
    both = [str(models / name) for name in ("engram-mini", "dense-mini")]
    given = {"model": both, "prompt": ["The river runs", "past the old mill"], "top-k": 3}
    return {"probe": "lens", "options": given | options}


def run(file: Path, store: str, *more: str | Path) -> int:
    return main(["sweep", str(file), "--store", store, *map(str, more)])


def runs_of(store: str, session: str = "grid") -> tuple[RunInfo, ...]:
    opened = open_store(store)
    try:
        return opened.session(session).runs
    finally:
        opened.dispose()


def reports_of(store: str, session: str = "grid") -> list[str]:
    """The reports of a session as text, in their order."""
    opened = open_store(store)
    try:
        return [opened.report(own.id).to_json() for own in opened.session(session).runs]
    finally:
        opened.dispose()


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/store.db"


# --- The run -------------------------------------------------------------------------------------------------------


def test_one_table_and_one_session(shipped: Path, tmp_path: Path, store: str, capsys: Capture) -> None:
    content = lens(shipped, target=[None, " the"]) | {"note": "*why*", "tags": ["a"], "out": "all.csv"}
    assert run(written(tmp_path, content), store) == 0
    out, err = capsys.readouterr()
    assert err == "" and "8 cells: 8 computed, 0 taken from the session, 0 failed." in out
    assert "engram-lab session show grid" in out and "all.csv" in out

    # What `engram-lab probe` writes for each cell, one below the other.
    parts, expected, names = [], [], {"layer": str, "settle_layer": str}
    for model in content["options"]["model"]:
        handle = open_model(model)
        for prompt in content["options"]["prompt"]:
            for target in (None, " the"):
                config = LensConfig((model,), (prompt,), target, 3)
                report = lens_probe.run([handle], config)
                part = pd.read_csv(io.StringIO(export.csv_text(report)), dtype=names)
                for name, value in (("target", target), ("option_prompt", prompt), ("option_model", model)):
                    part.insert(0, name, value)
                parts.append(part)
                expected.append(report.to_json())
        handle.close()
    got = pd.read_csv(tmp_path / "all.csv", dtype=names)
    pd.testing.assert_frame_equal(got, pd.concat(parts, ignore_index=True), check_exact=True, check_dtype=False)
    assert reports_of(store) == expected
    info = open_store(store).session("grid")
    assert info.note == "*why*" and info.tags == ("a",)
    assert all(own.seconds and own.probe == "lens" and own.view for own in info.runs)


def test_finished_cells_are_taken_from_the_session(shipped: Path, tmp_path: Path, store: str, capsys: Capture) -> None:
    """Known by the weights: a changed model is computed again, and nothing else is."""
    models = tmp_path / "models"
    shutil.copytree(shipped, models)
    file = written(tmp_path, lens(models))
    assert run(file, store, "--out", tmp_path / "a.parquet") == 0
    first = runs_of(store)
    assert run(file, store, "--out", tmp_path / "b.parquet") == 0
    assert runs_of(store) == first and len(first) == 4
    assert "0 computed, 4 taken" in capsys.readouterr().out
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()

    content = lens(models)
    content["options"]["prompt"].append("into the sea")
    assert run(written(tmp_path, content), store) == 0
    second = runs_of(store)
    assert second[:4] == first and len(second) == 6, "only the new prompt, for both models"

    weights = models / "dense-mini" / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.embed_tokens.weight"][5, 3] += 1
    save_file(tensors, weights, metadata={"format": "pt"})
    assert run(file, store) == 0
    third = runs_of(store)
    assert third[:6] == second and [own.models[0].name for own in third[6:]] == [str(models / "dense-mini")] * 3
    assert third[6].models[0].fingerprint != first[2].models[0].fingerprint

    assert run(file, store, "--fresh") == 0
    assert runs_of(store)[:9] == third and len(runs_of(store)) == 15


def test_cells_that_ask_for_the_same_are_computed_once(shipped: Path, tmp_path: Path, store: str) -> None:
    (tmp_path / "same.txt").write_text("The river runs\n", encoding="utf-8")
    (tmp_path / "again.txt").write_text("\nThe river runs\n\n", encoding="utf-8")
    content = lens(shipped, model=str(shipped / "dense-mini"), prompts=["same.txt", "again.txt"])
    del content["options"]["prompt"]
    out = tmp_path / "t.parquet"
    assert run(written(tmp_path, content), store, "--out", out) == 0
    assert len(runs_of(store)) == 1
    table = pd.read_parquet(out)
    assert table["prompts"].drop_duplicates().tolist() == ["same.txt", "again.txt"]
    assert (
        table[table["prompts"] == "same.txt"]["kl_nats"].tolist()
        == table[table["prompts"] == "again.txt"]["kl_nats"].tolist()
    )


def test_a_failing_cell_does_not_lose_the_others(shipped: Path, tmp_path: Path, store: str, capsys: Capture) -> None:
    nowhere = str(tmp_path / "nowhere")
    content = lens(shipped, target=[" the", "the river"], prompt="The river runs")
    content["options"]["model"].insert(1, nowhere)
    out = tmp_path / "t.parquet"
    assert run(written(tmp_path, content), store, "--out", out) == 1
    text, err = capsys.readouterr()
    assert "6 cells: 2 computed, 0 taken from the session, 4 failed." in text
    lines = err.splitlines()
    assert [line.split(" failed: ")[0] for line in lines] == [f"Cell {n}" for n in (2, 3, 4, 6)]
    assert "not one token" in lines[0] and nowhere in lines[1] and nowhere in lines[2] and "not one token" in lines[3]
    assert pd.read_parquet(out)["model"].nunique() == 2
    assert len(runs_of(store)) == 2


def test_a_sweep_of_nothing_but_failures_leaves_no_table(tmp_path: Path, store: str, capsys: Capture) -> None:
    content = {"probe": "lens", "options": {"model": str(tmp_path), "prompt": ["a", "b"]}}
    assert run(written(tmp_path, content), store, "--out", tmp_path / "t.csv") == 1
    assert "No table was written" in capsys.readouterr().out and not (tmp_path / "t.csv").exists()
    assert open_store(store).sessions() == []


@pytest.mark.parametrize("given", [{"name": "two\nlines"}, {"name": " "}, {"tags": ["x" * 500]}])
def test_a_session_that_cannot_be_costs_nothing(
    given: dict[str, Any], tmp_path: Path, store: str, capsys: Capture
) -> None:
    file = written(tmp_path, given | {"probe": "lens", "options": {"model": "m", "prompt": "a"}})
    assert run(file, store) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "store.db").exists()


@pytest.mark.parametrize(
    ("out", "words"), [("t.xlsx", ".parquet or .csv"), (".csv", ".parquet or .csv"), ("no/t.csv", "no folder")]
)
def test_a_table_that_cannot_be_written_costs_nothing(
    out: str, words: str, tmp_path: Path, store: str, capsys: Capture
) -> None:
    file = written(tmp_path, {"probe": "lens", "options": {"model": "m", "prompt": "a"}})
    assert run(file, store, "--out", tmp_path / out) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "store.db").exists()


def test_each_model_is_opened_once_and_few_at_a_time(
    shipped: Path, tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a grid whose table goes from model to model with every row."""
    names = []
    for n in range(4):
        shutil.copytree(shipped / "dense-mini", tmp_path / f"m{n}")
        names.append(f"m{n}")
    opened: list[str] = []
    alive: list[Any] = []
    most = 0

    def counting(name: str, **options: Any) -> Any:
        nonlocal most
        opened.append(Path(name).name)
        alive.append(open_model(name, **options))
        most = max(most, sum(handle.is_open for handle in alive))
        return alive[-1]

    monkeypatch.setattr("engram_lab.models.handle.open_model", counting)
    content = {"probe": "lens", "options": {"prompt": ["a", "b"], "model": names, "bootstrap": 5}}
    assert run(written(tmp_path, content), store, "--out", tmp_path / "t.parquet") == 0
    assert opened == names and most == 1 and not any(handle.is_open for handle in alive)
    column = pd.read_parquet(tmp_path / "t.parquet")["option_model"]
    assert [name for name, _ in itertools.groupby(column)] == names * 2

    opened.clear(), alive.clear()
    most = 0
    pairs = {"model": names[:2], "against": names[2:], "prompt": ["a", "b"], "bootstrap": 5}
    assert run(written(tmp_path, {"probe": "lens", "options": pairs}), store, "--save", "pairs") == 0
    assert sorted(opened) == names and most == 3 and not any(handle.is_open for handle in alive)


def test_a_tuned_lens_that_was_fitted_anew_is_computed_anew(
    shipped: Path, tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a probe reads from disk beside the weights is a part of what a finished cell is known by."""
    now = ["lens.safetensors 1"]
    monkeypatch.setattr(lens_probe, "depends", lambda handles, config: list(now))
    file = written(tmp_path, lens(shipped, prompt="a"))
    assert run(file, store) == 0 and run(file, store) == 0
    assert len(runs_of(store)) == 2
    now[:] = ["lens.safetensors 2"]
    assert run(file, store) == 0 and len(runs_of(store)) == 4
    assert run(file, store) == 0 and len(runs_of(store)) == 4


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_keeps_what_is_done(
    how: signal.Signals,
    code: int,
    shipped: Path,
    tmp_path: Path,
    store: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    """The short form of the next: it comes while the fourth cell is computed."""
    file, table, kept = written(tmp_path, lens(shipped, seed=[0, 1])), tmp_path / "t.parquet", []
    computed = running.compute

    def pressed(*arguments: Any) -> Any:
        if len(kept) == 3:
            if how == signal.SIGINT:  # which a shell may have told these tests to ignore
                raise KeyboardInterrupt
            signal.raise_signal(how)
        kept.append(arguments)
        return computed(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(running, "compute", pressed)
        assert run(file, store, "--out", table) == code
    before = runs_of(store)
    out, err = capsys.readouterr()
    assert len(before) == 3 and not table.exists() and out == "" and err.count("\n") == 1, err
    assert '3 of 8 cells are kept in the session "grid"; run the same command again' in err
    assert run(file, store, "--out", table) == 0
    assert len(runs_of(store)) == 8 and runs_of(store)[:3] == before, "those that were kept are not computed again"


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_after_an_interrupt_it_goes_on(how: signal.Signals, shipped: Path, tmp_path: Path, store: str) -> None:
    (tmp_path / "set.txt").write_text("The river runs\npast the old mill\ninto the sea\n" * 12, encoding="utf-8")
    content = lens(shipped, seed=list(range(8)), prompts="set.txt", bootstrap=20_000)  # so that a cell takes a while
    del content["options"]["prompt"]
    file, table = written(tmp_path, content), tmp_path / "t.parquet"
    command = [sys.executable, "-m", "engram_lab.lab", "sweep", str(file), "--store", store, "--out", str(table)]
    opened = open_store(store)

    def runs() -> tuple[RunInfo, ...]:
        return opened.session("grid").runs if opened.sessions() else ()

    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 200
        before = runs()
        while len(before) < 3 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
            before = runs()
        process.send_signal(how)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    kept = runs()
    assert kept[: len(before)] == before and 3 <= len(kept) < 16 and not table.exists() and out == "", err
    if how != signal.SIGKILL:
        assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[how] and err.count("\n") == 1
        assert f'{len(kept)} of 16 cells are kept in the session "grid"; run the same command again' in err
    assert run(file, store, "--out", table) == 0
    done = runs()
    assert len(done) == 16 and done[: len(kept)] == kept, "those that were kept are not computed again"
    assert len({own.request for own in done}) == 16
    assert len(pd.read_parquet(table).groupby(["option_model", "seed"])) == 16


def test_the_line_of_progress_counts_cells_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    job = sweep_run.Job((0,), None, ())
    jobs = [job, sweep_run.Job((1, 2), None, ()), job, job]
    now, shown = [0.0], []
    monkeypatch.setattr(sweep.time, "monotonic", lambda: now[0])
    line = sweep.Line(lambda fraction, doing: shown.append((fraction, doing)), jobs)
    line.done(sweep_run.Outcome(jobs[0], taken=True))
    now[0] = 100.0
    line.within(0.5, "layer 3")
    assert shown[-1] == (0.375, "cell 2 of 5: layer 3 · about 8 min left"), "100 s for half a job, 2.5 are left"
    now[0] = 200.0
    line.done(sweep_run.Outcome(jobs[1]))
    line.within(0.5, "layer 3")
    assert shown[-1] == (0.625, "cell 4 of 5: layer 3 · about 3 min left"), "200 s for 1.5 jobs, 1.5 are left"
    texts = [sweep.duration(seconds) for seconds in (0.2, 89, 90, 3600, 7200)]
    assert texts == ["1 s", "89 s", "2 min", "60 min", "2.0 h"]


# --- The table -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        ([1, None, 3], "Int64", [1, None, 3]),
        ([1, 2.5, None], "float64", [1.0, 2.5, None]),
        (["", True, False], "boolean", [None, True, False]),
        (["", 0.5], "float64", [None, 0.5]),
        (["", "a"], "string", ["", "a"]),
        (["", ""], "string", ["", ""]),
        (["4 5", 4, None], "string", ["4 5", "4", None]),
        ([None, None], "float64", [None, None]),
        ([["off"], ["off", "zeroed"]], "string", ['["off"]', '["off", "zeroed"]']),
    ],
)
def test_a_column_has_one_type(values: list[Any], dtype: str, expected: list[Any], tmp_path: Path) -> None:
    series = sweep_table.series(values)
    assert str(series.dtype) == dtype
    file = tmp_path / "t.parquet"
    sweep_table.write(pd.DataFrame({"x": series}), file)
    again = pd.read_parquet(file)["x"]
    assert [None if pd.isna(value) else value for value in again] == expected
    assert list(tmp_path.iterdir()) == [file]


def test_columns_that_some_cells_lack_are_empty_there(shipped: Path, tmp_path: Path, store: str) -> None:
    """A condition of the probe that only some cells ask for."""
    both = [str(shipped / "engram-mini"), str(shipped / "dense-mini")]
    content = {
        "probe": "lens",
        "options": {"model": both[0], "against": [None, both[1]], "prompt": "a", "bootstrap": 5},
    }
    assert run(written(tmp_path, content), store, "--out", tmp_path / "t.parquet") == 0
    table = pd.read_parquet(tmp_path / "t.parquet")
    assert table.columns[0] == "against" and table["against"].isna().sum() * 2 == table["against"].notna().sum()
    assert set(table[table["against"].notna()]["model"]) == set(both)


def test_what_a_gpu_computed_is_not_taken_for_the_cpus() -> None:
    from engram_lab.lab.sweep.run import _devices
    from engram_lab.probes.base import ModelProtocol

    protocols = [ModelProtocol("m", "f", device, "float32", 3) for device in ("cpu", "cuda:1")]
    assert _devices(protocols) == ["cpu", "cuda"] and _devices(protocols[:1]) != _devices(protocols[1:])
