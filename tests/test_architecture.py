"""The picture in CONTRIBUTING.md is that of the code."""

import importlib.util
from pathlib import Path

ASSETS = Path(__file__).parents[1] / "assets"


def test_the_committed_picture_is_what_the_code_draws() -> None:
    spec = importlib.util.spec_from_file_location("architecture", ASSETS / "architecture.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    edges = made.arrows(made.rooms())
    assert {("lab/fronts", "lab/draw"), ("pages", "lab/app"), ("probes", "models")} <= edges
    assert not {("models", "probes"), ("lab/draw", "lab/fronts")} & edges
    drawn = (ASSETS / "architecture.svg").read_text(encoding="utf-8")
    assert drawn == made.drawing(), "python assets/architecture.py draws it anew"
