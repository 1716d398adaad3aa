"""The look of the lab: colours, fonts, one Plotly template for light and dark, the options and CSS of the app."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import plotly.graph_objects as go

Mode = Literal["light", "dark"]

SANS = '"Source Sans", "Source Sans 3", "Segoe UI", system-ui, sans-serif'
MONO = '"Source Code Pro", "Cascadia Code", Menlo, Consolas, monospace'
# From 0 (settled, the page recedes) upwards; Cividis reads the same with and without colour vision.
SEQUENTIAL = "Cividis"


@dataclass(frozen=True)
class Palette:
    """Colours of one mode. `series` are Okabe and Ito's, which stay apart for colour-blind eyes."""

    page: str
    panel: str
    ink: str
    quiet: str
    line: str
    accent: str
    series: tuple[str, ...]


PALETTES: dict[str, Palette] = {
    "light": Palette(
        page="#FBFAF7",
        panel="#F2F0EA",
        ink="#20242B",
        quiet="#646B75",
        line="#DEDAD0",
        accent="#0B6377",
        series=("#0072B2", "#D55E00", "#009E73", "#B65F93", "#8A6D00"),
    ),
    "dark": Palette(
        page="#15181D",
        panel="#1E2229",
        ink="#E6E4DF",
        quiet="#9AA1AB",
        line="#333943",
        accent="#6CC5D6",
        series=("#56B4E9", "#E69F00", "#2FC79A", "#E59CC4", "#F0E442"),
    ),
}


def _channels(colour: str) -> list[int]:
    return [int(colour[n : n + 2], 16) for n in (1, 3, 5)]


def translucent(colour: str, alpha: float) -> str:
    """A #RRGGBB colour as rgba()."""
    red, green, blue = _channels(colour)
    return f"rgba({red},{green},{blue},{alpha})"


def diverging(mode: Mode, below: int = 0, above: int = 1) -> list[list[Any]]:
    """A colour scale with no difference in the middle; the series at its ends stay apart for colour-blind eyes."""
    palette = PALETTES[mode]
    ends = (palette.series[below], palette.panel, palette.series[above])
    return [
        [n / 2, f"rgb({', '.join(map(str, _channels(colour)))})"] for n, colour in enumerate(ends)
    ]  # as lists Plotly samples it


def ink_on(colour: str) -> str:
    """Black or white, whichever stands out more on an rgb() colour (WCAG's relative luminance)."""
    channels = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "#FFF"


@cache
def template(mode: Mode) -> go.layout.Template:
    """The Plotly template of a mode; the paper is the page's colour, so that a PNG looks like the page."""
    import plotly.graph_objects as go

    palette = PALETTES[mode]
    axis = {
        "gridcolor": palette.line,
        "linecolor": palette.line,
        "tickcolor": palette.line,
        "zeroline": False,
        "ticks": "outside",
        "ticklen": 4,
        "title": {"font": {"size": 13, "color": palette.quiet}, "standoff": 10},
        "tickfont": {"size": 12, "color": palette.quiet},
        "automargin": True,
    }
    return go.layout.Template(
        layout={
            "font": {"family": SANS, "size": 13, "color": palette.ink},
            "title": {
                "font": {"size": 16},
                "x": 0,
                "xref": "container",
                "xanchor": "left",
                "y": 1,
                "yref": "container",
                "yanchor": "top",
                "pad": {"l": 12, "t": 12},
            },
            "paper_bgcolor": palette.page,
            "plot_bgcolor": palette.page,
            "colorway": palette.series,
            "xaxis": axis,
            "yaxis": axis,
            "legend": {
                "orientation": "h",
                "x": 0,
                "y": 1.0,
                "yanchor": "bottom",
                "bgcolor": "rgba(0,0,0,0)",
                "font": {"size": 13},
            },
            "hoverlabel": {
                "bgcolor": palette.panel,
                "bordercolor": palette.line,
                "font": {"family": MONO, "size": 12, "color": palette.ink},
                "align": "left",
            },
            "margin": {"l": 56, "r": 16, "t": 100, "b": 52},
        }
    )


def streamlit_options() -> dict[str, Any]:
    """Streamlit's theme options: both modes, so that the user's own choice between them is kept."""
    options: dict[str, Any] = {
        "theme.font": "sans-serif",
        "theme.headingFont": "serif",
        "theme.codeFont": "monospace",
        "theme.baseRadius": "6px",
        "theme.baseFontSize": 15,
        "theme.showWidgetBorder": True,
        "theme.showSidebarBorder": True,
        "theme.paddingTop": "3rem",
    }
    for mode, palette in PALETTES.items():
        options |= {
            f"theme.{mode}.primaryColor": palette.accent,
            f"theme.{mode}.backgroundColor": palette.page,
            f"theme.{mode}.secondaryBackgroundColor": palette.panel,
            f"theme.{mode}.textColor": palette.ink,
            f"theme.{mode}.borderColor": palette.line,
            f"theme.{mode}.linkColor": palette.accent,
            f"theme.{mode}.sidebar.backgroundColor": palette.panel,
            f"theme.{mode}.sidebar.secondaryBackgroundColor": palette.page,
        }
    return options


def css(mode: Mode) -> str:
    """The style sheet of the app's own HTML, and the little that Streamlit's options do not reach."""
    palette = PALETTES[mode]
    return f"""<style>
.chips {{ display: flex; flex-wrap: wrap; gap: 3px; font-family: {MONO}; font-size: 13px;
  max-height: 168px; overflow-y: auto; }}
.chip {{ background: {palette.panel}; border: 1px solid {palette.line}; border-radius: 4px; padding: 1px 5px;
  white-space: pre; cursor: default; color: {palette.ink}; }}
.chip sub {{ color: {palette.quiet}; font-size: 9px; margin-left: 4px; vertical-align: baseline; }}
.chip.special {{ border-style: dashed; color: {palette.quiet}; }}
/* The map keeps the width of its columns and scrolls in its own box. */
.st-key-map_scroll {{ overflow-x: auto; }}
.st-key-map_scroll > div, .st-key-map_scroll [data-testid="stPlotlyChart"],
.st-key-map_scroll [data-testid="stFullScreenFrame"] {{ max-width: none !important; flex-shrink: 0; }}
[data-testid="stMainBlockContainer"] {{ max-width: 1240px; }}
</style>"""
