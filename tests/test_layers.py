"""The arrows between the layers, and what no file of the project may contain."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LAYERS = ("pages", "lab", "probes", "models")  # an arrow may only point right
FRONT_END = {"streamlit", "plotly", "kaleido", "pandas", "sklearn"}


def imports(source: str, package: tuple[str, ...]) -> Iterator[str]:
    """What a file imports, at any depth: the top-level name, of ours with the layer; `package` is where it lies."""

    def top(dotted: str) -> str:
        parts = dotted.split(".")
        return ".".join(parts[: 2 if parts[0] == "engram_lab" else 1])

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (top(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            dotted = ".".join((*base, *filter(None, (node.module or "").split("."))))
            yield from (top(f"{dotted}.{alias.name}") for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "attr", getattr(node.func, "id", "")) in ("import_module", "__import__")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield top(str(node.args[0].value))


def layer_imports(layer: str) -> dict[str, set[str]]:
    files = sorted((ROOT / layer).rglob("*.py"))
    assert files, f"{layer}/ holds no Python file, so nothing would be checked"
    found = {}
    for file in files:
        relative = file.relative_to(ROOT)
        found[str(relative)] = set(imports(file.read_text(encoding="utf-8"), ("engram_lab", *relative.parts[:-1])))
    return found


def test_imports_are_seen_in_every_form() -> None:
    source = (
        "import a.b, c as d\nfrom e.f import g\nfrom . import h\nfrom .. import i\nfrom ..lab import j\n"
        "def k():\n    import l\n    importlib.import_module('m.n')\n"
    )
    models, lab = "engram_lab.models", "engram_lab.lab"
    assert set(imports(source, ("engram_lab", "models", "deep"))) == {"a", "c", "e", models, "l", "m"}
    assert set(imports("from ..lab import j\nimport engram_lab.lab.k", ("engram_lab", "models"))) == {lab}
    assert set(imports("from engram_lab import lab", ())) == {lab}


@pytest.mark.parametrize("layer", LAYERS)
def test_arrows_point_right(layer: str) -> None:
    forbidden = {*(f"engram_lab.{left}" for left in LAYERS[: LAYERS.index(layer)]), *LAYERS, "tests"}
    if layer in ("probes", "models"):
        forbidden |= FRONT_END
    wrong = {file: names & forbidden for file, names in layer_imports(layer).items() if names & forbidden}
    assert not wrong


def test_models_and_probes_import_without_the_front_end() -> None:
    """On a machine that has torch, transformers and nnsight only, as the GPU check's is."""
    modules = [
        ".".join(("engram_lab", *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        for layer in ("models", "probes")
        for file in sorted((ROOT / layer).rglob("*.py"))
        if file.stem != "__main__"
    ]
    program = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({sorted(FRONT_END | {'gguf', 'datasets'})!r}))\n"
        f"for name in {[*modules, 'engram_lab.lab.command.main']!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def declared(*extras: str) -> list[Requirement]:
    """What pyproject.toml requires, with these extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    return [Requirement(line) for line in sum((optional[extra] for extra in extras), project["dependencies"])]


def required_by(needed: Requirement) -> Iterator[Requirement]:
    """What an installed distribution itself requires here, with the extras asked of it."""
    for line in importlib.metadata.requires(needed.name) or []:
        found = Requirement(line)
        if not found.marker or any(found.marker.evaluate({"extra": extra}) for extra in (*needed.extras, "")):
            yield found


def test_every_import_is_a_declared_dependency() -> None:
    """Otherwise it works here, where the tests' own packages are, and not where the wheel is installed."""
    allowed = {canonicalize_name(found.name) for found in declared("datasets", "dask")}
    distributions = importlib.metadata.packages_distributions()
    for layer in LAYERS:
        for file, names in layer_imports(layer).items():
            for name in {name for name in names if not name.startswith("engram_lab.")} - sys.stdlib_module_names:
                owners = {canonicalize_name(owner) for owner in distributions.get(name, [name])}
                assert owners & allowed, f"{file} imports {name}, which pyproject.toml does not require"


def test_everything_that_is_installed_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line}
    waiting = [need for need in declared("datasets", "dask", "dev") if need.name != "engram-lab"]
    seen: set[Requirement] = set()
    while waiting:
        need = waiting.pop()
        if need not in seen:
            seen.add(need)
            waiting += required_by(need)
    # torch alone decides which CUDA libraries its build needs, and pins them itself
    names = {canonicalize_name(need.name) for need in seen}
    names = {name for name in names if not name.startswith(("nvidia-", "cuda-", "triton"))}
    assert len(names) > 50
    assert names <= pins, f"not in constraints.txt: {sorted(names - pins)}"


def project_files() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in listing.stdout.decode().split("\0") if name]
    return [file for file in files if file.is_file() and file.suffix not in {".safetensors", ".png"}]


def test_no_file_names_this_workplace_or_a_registry() -> None:
    """A clone must work anywhere: no path beside the checkout, none of one machine, no registry's address.

    The expressions do not match their own text, so this file is searched like the others.
    """
    elsewhere = re.compile(
        rb"\.\.[/\\]shared|(?<![\w.}-])/(?:work|root)/|/home/[a-z]"
        rb"|(?:pypi|pythonhosted|npmjs|anaconda|deb\.debian|download\.pytorch)\.(?:org|com)\b|--(?:extra-)?index-url"
    )
    found = [
        f"{file.relative_to(ROOT)}: {match[0].decode()}"
        for file in project_files()
        for match in elsewhere.finditer(file.read_bytes())
    ]
    assert not found
