"""The drawing on the start page: how a block with a memory looks it up."""

from __future__ import annotations

from engram_lab.lab.draw.theme import PALETTES, Mode, translucent


def engram(mode: Mode) -> str:
    """An SVG of one read: tokens, hash, rows, gate, residual stream."""
    palette = PALETTES[mode]
    memory, gate = palette.series[:2]

    def box(x: int, y: int, width: int, height: int, colour: str | None = None) -> str:
        fill, line = (translucent(colour, 0.16), colour) if colour else (palette.panel, palette.line)
        return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{fill}" stroke="{line}"/>'

    def text(x: int, y: int, words: str, quiet: bool = False, anchor: str = "middle", font: str = "sans-serif") -> str:
        colour, size = (palette.quiet, 13) if quiet else (palette.ink, 15)
        return (
            f'<text x="{x}" y="{y}" fill="{colour}" font-size="{size}" font-family="{font}" '
            f'text-anchor="{anchor}">{words}</text>'
        )

    def path(course: str, arrow: bool = True, dashed: bool = False) -> str:
        end = ' marker-end="url(#tip)"' if arrow else ""
        dash = ' stroke-dasharray="4 4"' if dashed else ""
        return f'<path d="{course}" fill="none" stroke="{palette.quiet}" stroke-width="1.6"{end}{dash}/>'

    tokens = [(20, 52, "the", False), (78, 88, "·capital", False)]
    tokens += [(172, 46, "·of", True), (224, 56, "·the", True), (286, 80, "·United", True)]
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 262">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 Z" fill="{palette.quiet}"/></marker></defs>',
        *(box(x, 22, width, 30, memory if used else None) for x, width, _, used in tokens),
        *(text(x + width // 2, 42, word, font="monospace") for x, width, word, _ in tokens),
        path("M224 60 V68 H366 V60", arrow=False),
        text(295, 85, "last two tokens", quiet=True),
        path("M172 94 V102 H366 V94", arrow=False),
        text(269, 119, "last three tokens", quiet=True),
        path("M374 68 C430 68 430 75 470 75"),
        path("M374 102 C430 102 430 119 470 119"),
        text(422, 60, "hashed", quiet=True),
        box(478, 20, 112, 132),
        box(478, 64, 112, 22, memory),
        box(478, 108, 112, 22, memory),
        path("M478 42 H590 M478 64 H590 M478 86 H590 M478 108 H590 M478 130 H590", arrow=False),
        text(534, 170, "tables of rows", quiet=True),
        path("M598 75 C630 75 640 88 666 88"),
        path("M598 119 C630 119 640 88 666 88", arrow=False),
        f'<circle cx="700" cy="88" r="26" fill="{translucent(gate, 0.18)}" stroke="{gate}"/>',
        text(700, 93, "gate"),
        text(740, 84, "0: shut", quiet=True, anchor="start"),
        text(740, 102, "1: open", quiet=True, anchor="start"),
        path("M640 218 C640 180 664 150 684 118", dashed=True),
        path("M702 114 V206"),
        path("M20 220 H682"),
        f'<circle cx="702" cy="220" r="11" fill="{translucent(gate, 0.18)}" stroke="{gate}"/>',
        text(702, 225, "+"),
        path("M714 220 H756"),
        box(762, 202, 102, 36),
        text(813, 225, "attention …"),
        text(20, 210, "residual stream at “·United”, entering a block with a memory", quiet=True, anchor="start"),
        text(20, 244, "the dense twin has the same blocks, and only this line", quiet=True, anchor="start"),
        "</svg>",
    ]
    return "".join(parts)
