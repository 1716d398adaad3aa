"""The store of open models, on tiny ones: never too many, never one in use closed, the others' memory given back."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engram_lab.lab.app import settings, shortage
from engram_lab.lab.app.line import Line
from engram_lab.lab.app.open_models import OpenModels
from engram_lab.lab.app.settings import Settings
from engram_lab.models.errors import CheckpointError, LabError, OutOfMemoryError, UnknownModelError
from engram_lab.models.handle import Handle, open_model
from engram_lab.probes.lens import LensConfig
from tests.full import FULL
from tests.lab.app.test_line import SOON, Gone, soon

ROOT = Path(__file__).parents[3]


@pytest.fixture
def names(shipped: Path, tmp_path: Path) -> list[str]:
    """Folders of four tiny models."""
    for n in range(4):
        shutil.copytree(shipped / ("dense-mini" if n % 2 else "engram-mini"), tmp_path / str(n))
    return [str(tmp_path / str(n)) for n in range(4)]


class Opener:
    """Opens for real, and knows what was opened and how many were alive meanwhile."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.most = 0
        self.pause: Callable[[], object] = lambda: None

    def __call__(self, name: str) -> Handle:
        self.most = max(self.most, len(self.modules) + 1)
        self.pause()
        handle = open_model(name, device="cpu")
        self.opened.append(name)
        self.modules.add(handle.model)
        return handle


def store(most: int, opener: Opener | None = None) -> OpenModels:
    return OpenModels(Line(), opener or Opener(), lambda: most)


def use(models: OpenModels, *names: str) -> None:
    """A script run that uses these models."""
    leased = models.lease(names)
    for handle in leased:
        handle.residuals([[1, 2, 3]])
    models.release(leased)


def test_the_least_recently_used_goes_before_the_next_is_read(names: list[str]) -> None:
    opener = Opener()
    models = store(2, opener)
    for n in (0, 1, 0, 2):  # 1 was used longer ago than 0
        use(models, names[n])
    assert models.names() == [names[0], names[2]]
    use(models, names[0])
    assert opener.opened == [names[n] for n in (0, 1, 2)]
    use(models, names[1], names[3])
    assert models.names() == [names[1], names[3]] and len(opener.modules) == 2
    assert opener.most == 2, "the next one was read while the dropped one was still in memory"
    models.close()
    assert not opener.modules and not models.names()


def test_one_in_use_is_never_closed_and_who_finds_no_place_waits(names: list[str]) -> None:
    models = store(1)
    (held,) = models.lease(names[:1])
    told: list[int] = []
    got: list[Handle] = []
    waiter = threading.Thread(target=lambda: got.extend(models.lease(names[1:2], on_wait=told.append)), daemon=True)
    waiter.start()
    soon(lambda: told[:1] == [0], "it was not told")
    (again,) = models.lease(names[:1])  # sharing what is open needs no place
    models.release([again])
    assert not got and held.residuals([[1, 2]]).logits.shape[0] == 1
    second: list[int] = []

    def cancelled(before: int) -> None:
        second.append(before)
        raise Gone

    with pytest.raises(Gone):
        models.lease(names[2:3], on_wait=cancelled)
    assert second == [1], "one was before it"
    with pytest.raises(LabError, match="in use for a while"):
        models.lease(names[3:], patience=0.2)
    models.release([held])
    waiter.join(SOON)
    assert got and models.names() == [names[1]]
    with pytest.raises(LabError, match="closed"):
        _ = held.model
    models.release(got)
    use(models, names[3])  # nobody who left is still in the line


def test_more_at_once_than_there_are_places_is_one_sentence(names: list[str]) -> None:
    with pytest.raises(LabError, match="needs 2 models at once, and this server keeps 1"):
        store(1).lease(names[:2])
    models = store(2)
    held = models.lease(names[:2])
    with pytest.raises(LabError, match="needs 3 models"):
        models.lease(names[2:3], held=len(held))


def test_two_sessions_open_a_model_once(names: list[str]) -> None:
    opener, go = Opener(), threading.Event()
    opener.pause = lambda: go.wait(SOON)
    models = store(3, opener)
    got: list[Handle] = []
    told: list[int] = []
    threads = [
        threading.Thread(target=lambda: got.extend(models.lease(names[:2], on_wait=told.append)), daemon=True)
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    soon(lambda: len(told) >= 5, "the others do not wait for the first")
    go.set()
    for thread in threads:
        thread.join(SOON)
    assert len(got) == 12 and len(set(map(id, got))) == 2 and sorted(opener.opened) == names[:2]
    models.release(got)
    use(models, names[2], names[3], names[0])
    assert len(models.names()) == 3, "all leases were given back"


def test_where_opening_fails_each_is_told_and_the_place_is_free(names: list[str], tmp_path: Path) -> None:
    models = store(1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnknownModelError, match="no-such"):
        models.lease(["/no-such/model"])
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            models.lease([str(tmp_path / "empty")])
        except CheckpointError as error:
            failed.append(error)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert len(failed) == 3
    with pytest.raises(CheckpointError):
        store(2).lease([names[0], str(tmp_path / "empty")])
    use(models, names[0])


def test_files_that_changed_are_opened_anew(names: list[str]) -> None:
    opener = Opener()
    models = store(3, opener)
    (old,) = models.lease(names[:1])
    file = Path(names[0]) / "model.safetensors"
    os.utime(file, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns + 10**9))
    (new,) = models.lease(names[:1])
    assert new is not old and old.model is not None
    models.release([old])
    use(models, names[1])
    use(models, names[2])
    assert opener.opened.count(names[0]) == 2 and models.names() == names[:3], "the stale one went first"
    assert new.model is not None


@pytest.mark.slow
def test_to_and_fro_keeps_one_and_no_memory() -> None:
    """On the shipped models, whose weights are worth looking at: in a process of its own, which is small before."""
    code = """
        import psutil, sys
        from engram_lab.lab.app.line import Line
        from engram_lab.lab.app.open_models import OpenModels
        models = OpenModels(Line(), most=lambda: 1)
        def rss():
            return psutil.Process().memory_info().rss / 1e6
        def use(name):
            handles = models.lease([name])
            handles[0].residuals([[1, 2, 3]])
            models.release(handles)
        kept, one = [], 0
        for n in range(int(sys.argv[1])):
            use("engram-mini")
            weights = sum(p.numel() * 4 for p in models.lease(["engram-mini"])[0].model.parameters()) / 1e6
            models.release([p.handle for p in models._places.values()])
            with_engram = rss()
            use("dense-mini")
            kept.append(rss())
        models.close()
        print(weights, with_engram, *kept, rss())
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), "20" if FULL else "9"], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    weights, with_engram, *kept, after = map(float, run.stdout.split())
    print(f"weights {weights:.0f} MB; with it {with_engram:.0f}, with its twin {kept[0]:.0f}, {kept[5]:.0f} and "
          f"{kept[-1]:.0f} MB after 1, 6 and {len(kept)} times; all closed {after:.0f} MB")  # fmt: skip
    assert abs(kept[-1] - kept[5]) < 0.02 * kept[5], "it grows"
    assert with_engram - kept[-1] > 0.6 * (weights - 20), "the larger one's memory came back"


def test_settings_come_from_the_server_and_the_environment(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    monkeypatch.setattr(settings, "_settings", Settings())
    monkeypatch.setenv("ENGRAM_LAB_MODELS", "2")
    assert settings.from_environment().models == 2
    monkeypatch.setenv("ENGRAM_LAB_MODELS", "many")
    assert settings.from_environment().models == 3
    settings.configure("cpu", "bfloat16", 1)
    assert settings.settings() == Settings("cpu", "bfloat16", 1)
    models = OpenModels(Line())
    (handle,) = models.lease(names[:1])
    assert handle.dtype == torch.bfloat16 and torch.get_default_dtype() == torch.float32
    models.release([handle])
    with pytest.raises(LabError, match="--models is 0"):
        settings.configure(models=0)
    with pytest.raises(LabError, match="not a dtype"):
        settings.configure(dtype="float3")
    assert settings.settings() == Settings("cpu", "bfloat16", 1)


def test_a_format_that_changes_the_default_waits_until_nobody_runs(
    monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    line = Line()
    models = OpenModels(line, Opener(), lambda: 3)
    for dtype, waits in ((None, False), ("bfloat16", True)):
        monkeypatch.setattr(settings, "_settings", Settings("cpu", dtype))
        told: list[int] = []
        with line.turn(["another model"]):
            thread = threading.Thread(
                target=lambda n=int(waits), t=told: models.release(models.lease([names[n]], on_wait=t.append)),
                daemon=True,
            )
            thread.start()
            if waits:
                soon(lambda t=told: t[:1] == [1], "it does not wait")
            else:
                thread.join(SOON)
                assert not thread.is_alive() and not told
        thread.join(SOON)
        assert not thread.is_alive()


# --- When memory runs out --------------------------------------------------------------------------------------------


def test_a_lack_of_memory_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as real:
        torch.empty(1 << 50)
    assert shortage.shortage(real.value) is real.value and shortage.asked(str(real.value)) == 4 << 50
    wrapped = CheckpointError("this cannot be loaded")
    wrapped.__cause__ = real.value
    assert shortage.shortage(wrapped) is real.value
    import numpy as np

    with pytest.raises(MemoryError) as numpys:
        np.empty(1 << 50)
    assert shortage.shortage(numpys.value) is numpys.value and shortage.asked(str(numpys.value)) == 8 << 50
    # As CUDA words it.
    assert shortage.asked("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of") == 5 << 29
    assert shortage.shortage(RuntimeError("shapes cannot be multiplied")) is None
    with pytest.raises(RuntimeError, match="shapes"), shortage.told("This"):
        raise RuntimeError("shapes")


def test_the_sentence_says_what_would_fit_and_the_failed_run_holds_nothing(pair: list[Handle]) -> None:
    config = LensConfig(("engram-mini",), ("The river runs past the mill",) * 40)
    tokens = len(pair[0].encode(config.prompts[0]))
    tensors: list[weakref.ref[torch.Tensor]] = []

    def failing() -> None:
        held = torch.ones(1000)
        tensors.append(weakref.ref(held))
        torch.empty(1 << 50)

    gc.disable()  # so that it is the frames that are let go of, not cycles found later
    try:
        with pytest.raises(OutOfMemoryError) as caught, shortage.told("The probe lens", pair[:1], config):
            failing()
    finally:
        gc.enable()
    assert tensors[0]() is None
    said = str(caught.value)
    assert said.startswith("The probe lens ran out of the memory of this computer") and said.endswith(".")
    assert f"instead of {tokens} tokens" in said and "of the 40 texts" in said and "--dtype bfloat16" in said
    assert f"{4 * 2**50 / 1e9:,.1f} GB" in said and "\n" not in said


def test_weights_that_do_not_fit_are_one_sentence_and_the_store_goes_on(names: list[str]) -> None:
    def too_large(name: str) -> Handle:
        if name == names[0]:
            torch.empty(1 << 50)
        return open_model(name, device="cpu")

    models = OpenModels(Line(), too_large, lambda: 1)
    with pytest.raises(OutOfMemoryError, match=r"Opening .* ran out of .*--dtype bfloat16.*--models 1"):
        models.lease(names[:1])
    use(models, names[1])


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
@pytest.mark.slow
def test_a_run_that_the_computer_has_no_memory_for_leaves_a_working_app() -> None:
    """The app itself, in a process that may not have more than a little beside what it has now."""
    code = """
        import ctypes, gc, psutil, resource
        from streamlit.testing.v1 import AppTest
        at = AppTest.from_file("lab/app/entry.py", default_timeout=200)
        at.query_params["against"] = "nothing"
        at.run()
        at.switch_page("../../pages/lens.py").run()
        assert not at.error and not at.exception and len(at.get("plotly_chart")) > 1
        gc.collect()
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)  # what is free already is no room for the run
        limit = psutil.Process().memory_info().vms + (12 << 20)
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        at.text_area(key="prompt").set_value("The river runs past the old mill and into the sea. " * 40).run()
        print("SAID", at.error[0].value.replace("\\\\", "") if at.error else None, at.exception)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        at.text_area(key="prompt").set_value("The river runs").run()
        assert not at.error and not at.exception and len(at.get("plotly_chart")) > 1
        print("GOES ON")
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), "20" if FULL else "9"], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    print(run.stdout, run.stderr[-3000:])
    assert "GOES ON" in run.stdout, run.stderr
    said = next(line for line in run.stdout.splitlines() if line.startswith("SAID"))
    assert "The probe lens ran out of the memory of this computer" in said and "tokens" in said
