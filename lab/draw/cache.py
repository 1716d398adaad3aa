"""What the figures of caches have in common: their subtitles, the prompt of a pair in place, the field framed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engram_lab.lab.draw import labels
from engram_lab.lab.draw.theme import PALETTES, Mode, translucent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engram_lab.probes.base import Report
    from engram_lab.probes.kv.scenario import Pair


def subtitle(report: Report, shown: str, more: str = "") -> str:
    """What is shown, of which change of a prompt, by which model; first that no claim can be made, where none can."""
    oracle = "" if report.result.oracle.both else "the model is not right about both clean prompts: no claim; "
    scenario = f"{report.config.scenario.old} → {report.config.scenario.new}, {report.result.name}"
    return labels.plotly(f"{oracle}{shown}; {scenario}{more and '; '}{more}")


def tokens_of(pair: Pair, new: bool = False) -> list[labels.Token]:
    """The tokens [pos] of the old or the new prompt."""
    which = "new" if new else "old"
    text, ids, start, end, texts = (
        getattr(pair, f"{name}_{which}") for name in ("text", "token_ids", "char_start", "char_end", "token_texts")
    )
    return labels.tokens_of(text, ids.tolist(), start.tolist(), end.tolist(), texts)


def prompt_chips(
    pair: Pair, recovery: Mapping[int, float] | None = None, mode: Mode = "light", new: bool = False
) -> str:
    """The prompt in place, a chip for each token: the field framed, positions shaded by what each recovers alone."""
    palette = PALETTES[mode]

    def look(position: int) -> labels.Look:
        value = (recovery or {}).get(position)
        field = position in pair.field
        hint = "field" if field else ""
        style: list[str] = []
        if value is not None and value == value:
            hint += f"{' · ' if hint else ''}recovers {value:.1%} alone"
            colour = palette.series[1 if value >= 0 else 0]
            style.append(f"background: {translucent(colour, round(min(abs(value), 1.0) * 0.85, 3))}")
        elif position == pair.n_tokens - 1:
            hint += f"{' · ' if hint else ''}runs again on every cache"
        if field:
            style.append(f"border: 2px solid {palette.accent}; font-weight: 600")
        return labels.Look(hint, "; ".join(style), "field" if field else "")

    return labels.chips(tokens_of(pair, new), look)
