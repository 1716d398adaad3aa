"""The wheel that `pip install .` makes: what is in it, and that it works from any folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from setuptools import Distribution

ROOT = Path(__file__).parents[1]
FOLDERS = ("models", "probes", "lab", "pages", "assets")
PACKAGES = tuple(f"engram_lab.{name}" for name in FOLDERS)
TYPED = ("models", "probes", "lab", "pages")  # what a type checker reads as typed
JUNK = ("__pycache__", ".DS_Store")
OF_ITS_OWN = """
import models, probes
import engram_lab.models
from engram_lab.models.handle import open_model
assert (models.MINE, probes.MINE) == (1, 2), "the script's folder comes first"
print(engram_lab.models.__path__[0], open_model("dense-mini").name)
"""


def pip(*arguments: str | Path, python: Path | str = sys.executable) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(python), "--quiet", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy, so that no build folder is left in the checkout or read from it."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in (*FOLDERS, "tests"):
        shutil.copytree(ROOT / name, source / name)
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder, source)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another environment with the wheel in it; all that it requires is taken from this one.

    A folder named in a .pth file is searched last, and .pth files in it (such as an editable install of this
    checkout) are not obeyed. It is added last, or pip would take the wheel for installed already.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=os.name == "posix")
    python = folder / "bin" / "python"
    pip("install", "--no-deps", "--no-index", wheel, python=python)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (site_packages / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def expected() -> set[str]:
    """What the wheel is to hold: every file of the folders."""
    return {
        f"engram_lab/{file.relative_to(ROOT).as_posix()}"
        for package in FOLDERS
        for file in (ROOT / package).rglob("*")
        if file.is_file() and not any(part in JUNK for part in file.parts)
    }


def run(environment: Path, cwd: Path, *command: str) -> str:
    """What a command of the environment prints, run in a folder that is not the checkout."""
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    program = [str(environment / "bin" / command[0]), *command[1:]]
    done = subprocess.run(program, cwd=cwd, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_setuptools_would_put_every_file_into_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The short form: what setuptools finds with the settings of pyproject.toml, in a checkout, nothing built."""
    monkeypatch.chdir(ROOT)
    project = Distribution({"src_root": str(ROOT), "script_name": "setup.py"})
    project.parse_config_files([str(ROOT / "pyproject.toml")])
    assert {name.partition(".")[0] for name in project.packages} == {"engram_lab"} and not project.py_modules
    command = project.get_command_obj("build_py")
    command.build_lib, command.manifest_files = str(tmp_path), {}
    monkeypatch.setattr(type(command), "analyze_manifest", lambda self: None)  # a file list of a build before
    command.ensure_finalized()
    assert {Path(name).relative_to(tmp_path).as_posix() for name in command.get_outputs(False)} == expected()
    assert {f"engram_lab/{name}/py.typed" for name in TYPED} <= expected()


@pytest.mark.slow
def test_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    assert any(name.startswith("engram_lab/pages/") for name in expected())
    assert any(name.startswith("engram_lab/assets/") for name in expected())
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in archive.namelist())
    assert held == expected()
    assert {name.partition("/")[0] for name in held} == {"engram_lab"}, "one name in site-packages"


@pytest.mark.slow
def test_a_script_beside_folders_of_the_same_names_works(environment: Path, tmp_path: Path) -> None:
    for n, name in enumerate(("models", "probes"), 1):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"MINE = {n}\n")
    (tmp_path / "script.py").write_text(OF_ITS_OWN)
    where = run(environment, tmp_path, "python", "script.py")
    assert where.startswith(str(environment)) and where.endswith(" dense-mini\n")


@pytest.mark.slow
def test_wheel_is_what_runs(environment: Path, tmp_path: Path) -> None:
    program = f"import sys, {', '.join(PACKAGES)}\nfor name in {PACKAGES}: print(list(sys.modules[name].__path__)[0])"
    paths = run(environment, tmp_path, "python", "-c", program).splitlines()
    assert len(paths) == len(PACKAGES)
    assert all(Path(path).is_relative_to(environment) for path in paths), paths


@pytest.mark.slow
def test_command_runs_from_another_folder(environment: Path, tmp_path: Path) -> None:
    assert "probe" in run(environment, tmp_path, "engram-lab", "--help")
    models = run(environment, tmp_path, "engram-lab", "models")
    assert "engram-mini" in models and "dense-mini" in models


@pytest.mark.slow
def test_app_draws_its_first_page_from_another_folder(environment: Path, tmp_path: Path) -> None:
    program = (
        "from importlib.util import find_spec\n"
        "from streamlit.testing.v1 import AppTest\n"
        "app = AppTest.from_file(find_spec('engram_lab.lab.app.entry').origin, default_timeout=120).run()\n"
        "assert not app.exception, app.exception\n"
        "assert app.main.children, 'an empty page'\n"
    )
    run(environment, tmp_path, "python", "-c", program)
