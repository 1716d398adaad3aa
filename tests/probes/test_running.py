"""A probe by its name: the file is the name, and every module that is a probe has a front and no other has."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import engram_lab.probes
from engram_lab.lab.fronts import FRONTS
from engram_lab.models.handle import Handle
from engram_lab.probes import module_of, running
from engram_lab.probes.lens import LensConfig

FOLDER = Path(engram_lab.probes.__path__[0])


def test_the_fronts_are_those_of_the_probes() -> None:
    """By the text of the files, not by their imports."""
    probes = set()
    for file in FOLDER.rglob("*.py"):
        assigned = [node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.Assign)]
        if any(isinstance(name, ast.Name) and name.id == "RESULT" for node in assigned for name in ast.walk(node)):
            probes.add(" ".join(file.relative_to(FOLDER).with_suffix("").parts))
    assert len(probes) >= 16 and probes == set(FRONTS) and len(FRONTS) == len(probes)


@pytest.mark.parametrize("probe", FRONTS)
def test_a_probe_has_all_that_a_probe_has(probe: str) -> None:
    module = module_of(probe)
    assert {"CONFIG", "RESULT", "run"} <= vars(module).keys()
    assert Path(str(module.__file__)) == FOLDER.joinpath(*probe.split()).with_suffix(".py")


NONE = "base|lens_math|lens math|kv|kv | lens|Lens|kv.swap|..os|os|no such|kv no|kv  swap|lens\n|../kv|kv swap more|"


@pytest.mark.parametrize("name", NONE.split("|"))
def test_what_is_no_probe_is_one_sentence(name: str) -> None:
    with pytest.raises(LookupError, match="This version of the lab has no probe"):
        module_of(name)


def test_what_a_probe_itself_lacks_is_not_hidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_package\n", encoding="utf-8")
    monkeypatch.setattr(engram_lab.probes, "__path__", [*engram_lab.probes.__path__, str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        module_of("broken")


def test_compute_gives_the_report_of_run_and_its_time(pair: list[Handle]) -> None:
    config = LensConfig(tuple(handle.name for handle in pair), ("the river runs",))
    heard: list[float] = []
    report, seconds = running.compute("lens", tuple(pair), config, lambda fraction, doing: heard.append(fraction))
    assert report == module_of("lens").run(pair, config) and seconds > 0 and heard


def test_what_a_result_depends_on(pair: list[Handle]) -> None:
    names = tuple(handle.name for handle in pair)
    tuned = LensConfig(names, ("a",), tuned=True)
    assert running.depends("lens", pair, tuned) == module_of("lens").depends(pair, tuned)
    assert len(running.depends("lens", pair, tuned)) == 2
    assert running.depends("lens", pair, LensConfig(names, ("a",))) == []
    assert running.depends("cka", pair, LensConfig(names, ("a",))) == []
