"""The arrows between the layers, and what no file of the project may contain."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LAYERS = ("pages", "lab", "probes", "models")  # an arrow may only point right
# Of the lab, likewise: an arrow may only point to a row below.
ROOMS = (("command", "app"), ("sweep",), ("sessions",), ("fronts",), ("ask",), ("draw",))
STARTS = {"command.app > app.server", "command.app > app.access"}  # the one command that starts the app
# What is still to be moved; these lists may only shrink.
KNOWN_CIRCLES: list[set[str]] = []
KNOWN_ARROWS: set[str] = set()
KNOWN_STREAMLIT: set[str] = set()
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


MODULES = {
    ".".join(("engram_lab", *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): file
    for layer in LAYERS
    for file in sorted((ROOT / layer).rglob("*.py"))
}


def imported_modules(source: str, package: tuple[str, ...], known: Collection[str]) -> set[str]:
    """The modules of ours that a file names in an import, at any depth of the code.

    Function-local imports count, for a circle is one whenever it is closed. So do those under TYPE_CHECKING: they are
    never executed, but who reads either file has to read the other. What a registry imports by a name that it is
    given (`importlib.import_module(f"...")`) does not: that is what a registry is for.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            whole = ".".join((*base, *filter(None, (node.module or "").split("."))))
            found |= {f"{whole}.{alias.name}" if f"{whole}.{alias.name}" in known else whole for alias in node.names}
    return found & set(known)


def graph() -> dict[str, set[str]]:
    """Each module of ours -> those that it imports."""
    return {
        name: imported_modules(
            file.read_text(encoding="utf-8"), ("engram_lab", *file.relative_to(ROOT).parts[:-1]), MODULES
        )
        for name, file in MODULES.items()
    }


def circles(edges: dict[str, set[str]]) -> list[set[str]]:
    """The sets of modules each of which reaches each other (strongly connected, of more than one, or of itself)."""

    def reached(start: str) -> set[str]:
        seen, waiting = set[str](), [start]
        while waiting:
            for name in edges[waiting.pop()] - seen:
                seen.add(name)
                waiting.append(name)
        return seen

    reach = {name: reached(name) for name in edges}
    return [
        set(found)
        for found in sorted({tuple(sorted(o for o in reach[n] if n in reach[o])) for n in edges if n in reach[n]})
    ]


def room(module: str) -> str:
    """ "models", "probes", "pages", or of the lab "lab.fronts" and the like; "" for a package itself."""
    parts = module.split(".")[1:]
    return ".".join(parts[: 2 if parts[0] == "lab" else 1])


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "d"}, "e": {"a"}}) == [{"a", "b", "c"}, {"d"}]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    known = {"p", "p.a", "p.b.c", "p.b"}
    source = "from p import a, x\nfrom p.b import c\nimport q\ndef f():\n    from . import d\n    from .b import y\n"
    assert imported_modules(source, ("p",), known) == {"p", "p.a", "p.b.c", "p.b"}


def test_nothing_imports_in_a_circle() -> None:
    assert [found for found in circles(graph()) if found not in KNOWN_CIRCLES] == []
    assert [found for found in KNOWN_CIRCLES if found not in circles(graph())] == [], "no longer: take it off the list"


def test_arrows_between_the_rooms_of_the_lab_point_right() -> None:
    """command, app > sweep > sessions > fronts > ask > draw; of command and app only the command starts the server."""
    rooms = {room(name) for name in MODULES if name.startswith("engram_lab.lab.")}
    assert rooms - {"lab.__main__"} == {f"lab.{name}" for row in ROOMS for name in row}, "a room without a place"
    place = {f"lab.{name}": n for n, row in enumerate(ROOMS) for name in row}
    wrong = {
        f"{a} > {b}".replace("engram_lab.lab.", "")
        for a, names in graph().items()
        for b in names
        if (here := room(a)) in place and (there := room(b)) in place and here != there and place[there] <= place[here]
    } - STARTS
    assert sorted(wrong - KNOWN_ARROWS) == []
    assert sorted(KNOWN_ARROWS - wrong) == [], "no longer: take it off the list"


def test_streamlit_is_in_the_pages_and_the_app_alone() -> None:
    users = {file for layer in LAYERS for file, names in layer_imports(layer).items() if "streamlit" in names}
    elsewhere = {file for file in users if not file.startswith(("pages/", "lab/app/"))}
    assert users - elsewhere and sorted(elsewhere - KNOWN_STREAMLIT) == []
    assert sorted(KNOWN_STREAMLIT - elsewhere) == [], "no longer: take it off the list"


@pytest.mark.slow
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
