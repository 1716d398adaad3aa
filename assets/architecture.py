"""Draws architecture.svg, the picture in CONTRIBUTING.md, from the packages and their imports.

`python assets/architecture.py` writes it; a test keeps the file what the code draws.
"""

from __future__ import annotations

import ast
import html
import textwrap
from pathlib import Path

from engram_lab.lab.draw.theme import PALETTES, translucent

ROOT = Path(__file__).parents[1]
PALETTE = PALETTES["light"]
COLOURS = dict(zip(("models", "probes", "lab", "pages"), PALETTE.series, strict=False))
WIDTH, LEFT, TALL, GAP, TOP, SIDE = 900, 20, 62, 22, 56, 130


def rooms() -> dict[str, list[Path]]:
    """Room -> its files: pages, probes and models with all below them, and each folder of the lab."""
    folders = [ROOT / name for name in ("pages", "probes", "models")]
    folders += [folder for folder in sorted((ROOT / "lab").iterdir()) if (folder / "__init__.py").exists()]
    return {folder.relative_to(ROOT).as_posix(): sorted(folder.rglob("*.py")) for folder in folders}


def arrows(files: dict[str, list[Path]]) -> set[tuple[str, str]]:
    """(room, a room that a file of it imports), at any depth of the code."""
    found = set()
    for room, paths in files.items():
        for path in paths:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("engram_lab"):
                    whole = [f"{node.module}.{alias.name}" for alias in node.names]
                elif isinstance(node, ast.Import):
                    whole = [alias.name for alias in node.names]
                else:
                    continue
                parts = [name.split(".")[1:] for name in whole if name.startswith("engram_lab.")]
                named = {"/".join(part[: 2 if part[0] == "lab" else 1]) for part in parts}
                found |= {(room, other) for other in named & set(files) if other != room}
    return found


def order(names: list[str], edges: set[tuple[str, str]]) -> list[str]:
    """The rooms so that as few arrows as possible point up: next always the one that the fewest others still import."""
    left, out = list(names), []
    while left:
        first = min(left, key=lambda name: (sum((other, name) in edges for other in left), names.index(name)))
        out.append(first)
        left.remove(first)
    return out


def text(x: int, y: int, words: str, size: int = 13, colour: str = PALETTE.ink, extra: str = "") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" {extra}>{html.escape(words)}</text>'


def drawing() -> str:
    """The whole picture as SVG: a room below another, and an arrow for what no other arrows lead to."""
    files = rooms()
    edges = arrows(files)
    names = order(list(files), edges)
    place = {name: n for n, name in enumerate(names)}
    # What is reached by way of another room needs no arrow of its own.
    drawn = {(a, b) for a, b in edges if not any((a, c) in edges and (c, b) in edges for c in names)}
    height = TOP + len(names) * (TALL + GAP) + 20
    right = WIDTH - SIDE
    shapes = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" role="img">',
        "<title>The rooms of the code, and which imports which</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 Z" fill="{PALETTE.quiet}"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" rx="10" fill="{PALETTE.page}"/>',
        text(LEFT, 34, "A room imports what its arrows lead to, directly or by way of other rooms.", 16),
    ]
    for name in names:
        y, colour = TOP + place[name] * (TALL + GAP), COLOURS[name.partition("/")[0]]
        about = ast.get_docstring(ast.parse((ROOT / name / "__init__.py").read_text(encoding="utf-8"))) or ""
        shapes.append(
            f'<rect x="{LEFT}" y="{y}" width="{right - LEFT}" height="{TALL}" rx="7" '
            f'fill="{translucent(colour, 0.1)}" stroke="{colour}"/>'
        )
        shapes.append(text(LEFT + 14, y + 24, f"{name}/", 17, extra='font-weight="bold"'))
        line = textwrap.shorten(about.partition("\n")[0], 112, placeholder=" …")
        shapes.append(text(LEFT + 14, y + 48, line, 12, PALETTE.quiet))
    lanes = 0
    for a, b in sorted(drawn, key=lambda edge: (place[edge[0]], place[edge[1]])):
        if place[b] - place[a] == 1:
            x, y = (LEFT + right) // 2, TOP + place[b] * (TALL + GAP)
            course = f"M{x} {y - GAP} V{y - 3}"
        else:
            lanes += 1
            y0, y1 = (TOP + place[name] * (TALL + GAP) + TALL // 2 for name in (a, b))
            x, y0, y1 = right + 14 * lanes, y0 + 3 * lanes % 18, y1 - 3 * lanes % 18
            course = f"M{right} {y0} H{x} V{y1} H{right + 4}"
        shapes.append(
            f'<path d="{course}" fill="none" stroke="{PALETTE.quiet}" stroke-width="1.6" marker-end="url(#tip)"/>'
        )
    return "\n".join([*shapes, "</svg>\n"])


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(drawing(), encoding="utf-8")
