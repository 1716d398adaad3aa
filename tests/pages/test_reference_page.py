"""The reference: every probe is explained, its page shows it, its formula is whole, its command runs as it stands."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from engram_lab.lab.command.main import build_parser
from engram_lab.lab.fronts import FRONTS, front, reference
from engram_lab.lab.fronts.entry import rows
from engram_lab.models.handle import open_model
from engram_lab.pages import facts_writing
from tests import memory_lab
from tests.pages.driving import PAGES, clean, open_page
from tests.probes.kv.tiny import RIVER, right

COMMAND = re.compile(r"\\[A-Za-z]+")
# What KaTeX draws of what our formulas use; a word that is misspelt is drawn in red.
KNOWN = set(
    COMMAND.findall(
        r"\mathrm \text \frac \tfrac \sum \ln \lVert \rVert \langle \rangle \sqrt \quad \qquad \big \Big \top \le \odot"
        r"\gamma \bigoplus \bmod \mathbb \ell \iff \partial \mid \min \lambda \forall \arg \max \in \sigma \pm \lvert"
        r"\rvert"
    )
)


def balanced(formula: str) -> bool:
    """Whether braces, and \\big and \\Big brackets, close in their order."""
    depth = 0
    for piece in re.findall(r"\\.|[{}]", formula):
        depth += {"{": 1, "}": -1}.get(piece, 0)
        if depth < 0:
            return False
    sized = {kind: formula.count(rf"\{kind}(") - formula.count(rf"\{kind})") for kind in ("big", "Big")}
    return depth == 0 and not any(sized.values())


def test_every_probe_has_an_entry() -> None:
    for name, entry in ((name, reference.entry(name)) for name in FRONTS):
        assert entry.asks.endswith("?") and entry.formula and entry.symbols and entry.sources and entry.controls, name
        assert entry.not_shown[0].islower() and entry.not_shown.endswith("."), "it goes on behind 'It does not show'"
        assert (PAGES / f"{entry.page}.py").exists()


@pytest.mark.parametrize("probe", FRONTS)
def test_the_formula_is_whole(probe: str) -> None:
    entry = reference.entry(probe)
    written = [entry.formula, *(symbol for symbol, _, _ in entry.symbols)]
    written += re.findall(r"\$([^$]+)\$", " ".join([entry.meaning, *(what for _, what, _ in entry.symbols)]))
    for latex in written:
        assert balanced(latex), latex
        assert set(COMMAND.findall(latex)) <= KNOWN, latex
    assert entry.meaning.count("$") % 2 == 0
    for row in entry.symbols:
        assert not any("|" in cell for cell in row), "they stand in a Markdown table"
        assert set(COMMAND.findall(row[0])) - {r"\text", r"\mathrm"} <= set(COMMAND.findall(entry.formula)), row
    # Every symbol that the list explains is in the formula.
    bare = re.sub(r"[\s{}]", "", entry.formula)
    for symbol, _, _ in entry.symbols:
        for part in re.split(r",\\ ", symbol):
            assert re.sub(r"[\s{}]|\(s\)$", "", part) in bare, (part, probe)


def test_a_broken_formula_is_found() -> None:
    assert balanced(r"\frac{a}{b}") and not balanced(r"\frac{a}{b") and not balanced(r"}{") and not balanced(r"\big(x")
    assert balanced(r"\{") and not balanced("{")


@pytest.mark.parametrize("probe", FRONTS)
def test_the_command_is_one_that_the_lab_takes(probe: str) -> None:
    words = shlex.split(reference.command(probe))
    args = build_parser().parse_args(words[1:])
    assert args.probe == probe and front(probe).ASK.config(args).models[0] in ("engram-mini", "smollm2-135m")
    options = set(re.findall(r"--[a-z][a-z-]*", reference.usage(probe)))
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options


@pytest.fixture(scope="module")
def small_lab(memory_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tiny models, few texts, and one scenario of each kind that the tiny Engram gets right."""
    handle = open_model(str(memory_models / "engram-mini"))
    look = right(handle, dataclasses.replace(RIVER, id="look", kind="lookup", third="sea", erratum="It is the river."))
    handle.close()
    with (
        memory_lab.few_texts(tmp_path_factory.mktemp("small"), [look]),
        memory_lab.served(memory_models) as patch,
    ):
        patch.setattr(facts_writing, "FIRST", 2)
        yield


def explained(at: AppTest, probe: str) -> None:
    """Under the chart stand the formula and the text of the reference."""
    (latex,) = clean(at).latex
    formula, text = reference.shown(probe)
    assert same_latex(latex.value, formula)
    assert text in [m.value for m in at.markdown]


def same_latex(shown: str, formula: str) -> bool:
    return shown.strip().strip("$").strip() == rows(formula)


# Where a probe's page shows it: the rest of the link, and the button that has to be pressed.
ASKED: dict[str, tuple[dict[str, str | list[str]], str]] = {
    "lens": ({"prompt": "The river"}, ""),
    "cka": ({"sentences": "4", "bootstrap": "100"}, ""),
    "gates": ({"prompt": "The river"}, ""),
    "rows": ({"prompt": "The river", "texts": "3"}, ""),
    "sensitivity": ({"bootstrap": "100"}, ""),
    "kv swap": ({"experiment": "Swap"}, ""),
    "kv map": ({"experiment": "Map"}, ""),
    "kv knockout": ({"experiment": "Knock-out"}, ""),
    "kv erratum": ({"experiment": "Erratum"}, ""),
    "kv reasoning": ({"experiment": "Reasoning"}, ""),
    "kv compose": ({"experiment": "Compose", "decide": "", "lengths": ["16"]}, ""),
    "kv set": ({"experiment": "Whole library"}, ""),
    "facts check": ({"facts_view": "Write and check", "facts_texts": "3"}, "write"),
    "facts layers": ({"facts_view": "Layers"}, "facts_run"),
    "facts density": ({"facts_view": "Density"}, "facts_run"),
    "facts alternatives": ({"facts_view": "Alternatives", "facts_unrelated": "3"}, "facts_run"),
}


@pytest.mark.parametrize("probe", FRONTS)
def test_each_page_explains_its_probe(probe: str, small_lab: None) -> None:
    query, button = ASKED[probe]
    at = clean(open_page(reference.entry(probe).page, **query))
    if button:
        at.button(key=button).click().run()
    explained(at, probe)


def test_the_reference_shows_every_entry(small_lab: None) -> None:
    at = clean(open_page("reference"))
    seen = set()
    for probe, entry in ((name, reference.entry(name)) for name in FRONTS):
        clean(at.selectbox(key="about").set_value(probe).run())
        (latex,) = at.latex
        assert same_latex(latex.value, entry.formula)
        said = " ".join(m.value for m in at.markdown)
        assert entry.controls in said and entry.not_shown in said and reference.defined(probe) in said
        assert all(source in said for source in entry.sources) and all(what in said for _, what, _ in entry.symbols)
        assert [c.value for c in at.code] == [reference.command(probe), reference.usage(probe).rstrip("\n")]
        seen.add(said)
    assert len(seen) == len(FRONTS)
