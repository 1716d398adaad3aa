"""The pages of the app, as their files describe themselves: a new page is a file in pages/ with a PAGE, and no list."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "pages"


@dataclass(frozen=True)
class Page:
    """A page; `name` is its path in the URL too."""

    name: str
    title: str
    icon: str  # of Material Symbols
    section: str  # of the navigation
    place: float  # in the navigation, rising
    asks: str = ""  # the question that the start page lists it under
    models: bool = True  # whether it waits until models can be opened

    @property
    def file(self) -> Path:
        """Where it stands."""
        return FOLDER / f"{self.name}.py"


@functools.cache
def pages() -> tuple[Page, ...]:
    """All pages in the order of the navigation. They are read and not run: a page draws when it is imported."""
    found = []
    for file in FOLDER.glob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PAGE":
                found.append(Page(file.stem, **ast.literal_eval(node.value)))
    return tuple(sorted(found, key=lambda page: page.place))
