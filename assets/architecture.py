"""Draws architecture.svg, the picture in CONTRIBUTING.md: `python assets/architecture.py`."""

from __future__ import annotations

from pathlib import Path

from engram_lab.lab.draw.theme import PALETTES, translucent

PALETTE = PALETTES["light"]
BLUE, ORANGE, GREEN, PINK = PALETTE.series[:4]
# Column by column, in the order of the layers: name, what it is, its colour, its parts with what they do.
LAYERS = [
    ("pages/", "thin: form, run, figures", PINK, [
        ("lens.py, gates.py, kv.py …", "one file for each page"),
        ("sessions.py", "find, reopen, compare, share"),
        ("reference.py", "formula and source of each probe"),
    ]),
    ("lab/", "what a front end needs", GREEN, [
        ("app.py, server.py", "the app, for one or many"),
        ("cli.py, fronts/", "the command line of each probe"),
        ("runner.py, line.py", "results kept, fair waiting"),
        ("*_figures.py, labels.py", "Report to figure, token text"),
        ("store/, archive.py", "sessions: database, blobs, .zip"),
        ("replay.py, sweep.py", "compute again; grids"),
    ]),
    ("probes/", "run(handles, config) → Report", ORANGE, [
        ("base.py", "Record, Array, Report, Protocol"),
        ("lens.py, cka.py", "layers"),
        ("gates.py, rows.py, …", "the memory"),
        ("kv_*.py", "caches"),
        ("fact_*.py", "facts in rows"),
    ]),
    ("models/", "what runs a model", BLUE, [
        ("engram.py, hashing.py", "the architecture"),
        ("handle.py", "one model: lock, trace, names"),
        ("memory.py, overlay.py, graft.py", "rows read, replaced, added"),
        ("kv.py, rotary.py", "caches as values"),
        ("train.py", "an Engram and its dense twin"),
    ]),
]  # fmt: skip
WIDTH, COLUMN, GAP, TOP, LINE = 1196, 262, 36, 64, 46


def text(x: int, y: int, words: str, size: int = 13, colour: str = PALETTE.ink, extra: str = "") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" {extra}>{words}</text>'


def box(x: int, y: int, width: int, height: int, colour: str, strength: float) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="7" fill="{translucent(colour, strength)}" '
        f'stroke="{colour}"/>'
    )


def drawing() -> str:
    """The whole picture as SVG."""
    tall = max(len(parts) for *_, parts in LAYERS) * LINE + 74
    height = TOP + tall + 126
    shapes = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" role="img">',
        "<title>The layers of the lab: pages, lab, probes, models; each imports only what is to its right</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 Z" fill="{PALETTE.quiet}"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" rx="10" fill="{PALETTE.page}"/>',
        text(20, 36, "An import may only point right, and a test keeps it so.", 17),
    ]
    for n, (name, about, colour, parts) in enumerate(LAYERS):
        x = 20 + n * (COLUMN + GAP)
        shapes += [
            box(x, TOP, COLUMN, tall, colour, 0.07),
            text(x + 14, TOP + 28, name, 19, extra='font-weight="bold"'),
        ]
        shapes.append(text(x + 14, TOP + 48, about, 13, PALETTE.quiet))
        for k, (files, what) in enumerate(parts):
            y = TOP + 62 + k * LINE
            shapes += [box(x + 10, y, COLUMN - 20, LINE - 7, colour, 0.12)]
            shapes += [text(x + 20, y + 16, files, 12, extra='font-family="monospace"')]
            shapes += [text(x + 20, y + 32, what, 12, PALETTE.quiet)]
        if n:
            shapes.append(arrow(f"M{x - GAP + 3} {TOP + 24} H{x - 4}"))
    below = TOP + tall + 22
    for x, width, head, tail in (
        (20, 262, "a browser", "engram-lab app"),
        (318, 262, "a shell, CI, a Dask cluster", "engram-lab probe, replay, sweep …"),
        (616, 262, "Python", "probes.NAME.run(handles, config)"),
        (914, 262, "assets/", "weights, texts, scenarios, sessions"),
    ):
        shapes += [box(x, below + 18, width, 52, PALETTE.quiet, 0.06)]
        shapes += [text(x + 14, below + 40, head, 14), text(x + 14, below + 59, tail, 12, PALETTE.quiet)]
        shapes.append(arrow(f"M{x + width // 2} {below + 18} V{TOP + tall + 5}"))
    shapes.append(
        text(20, height - 12, "Who uses which layer. A report is the same value in all of them.", 13, PALETTE.quiet)
    )
    return "\n".join([*shapes, "</svg>\n"])


def arrow(course: str) -> str:
    return f'<path d="{course}" fill="none" stroke="{PALETTE.quiet}" stroke-width="1.8" marker-end="url(#tip)"/>'


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(drawing(), encoding="utf-8")
