"""All figures that a report has without asking the reader anything: that of its front, then these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from engram_lab.lab.draw import labels
from engram_lab.lab.draw.figure import narrow
from engram_lab.lab.draw.theme import Mode
from engram_lab.lab.fronts import front
from engram_lab.probes.base import Report

if TYPE_CHECKING:
    from engram_lab.models.handle import Handle

LEAST_WIDTH, CHARACTERS = 740, 105  # pixels of a figure, and the letters of a subtitle that they hold


def figures_of(report: Report, mode: Mode, handles: Sequence[Handle]) -> list[go.Figure]:
    """The figures of a report; `handles` name tokens and memory layers where the report does not, and may be none."""
    more = _MORE.get(report.probe)
    drawn = [front(report.probe).figure(report, mode, handles), *(more(report, mode, handles) if more else [])]
    return [_fitted(figure) for figure in drawn if figure is not None]


def _fitted(figure: go.Figure) -> go.Figure:
    """The figure with a subtitle that a narrow window holds, and no narrower than its title."""
    if figure.layout.width is not None:
        figure.update_layout(width=max(figure.layout.width, LEAST_WIDTH))
    before = figure.layout.margin.t or figure.layout.template.layout.margin.t
    narrow(figure, CHARACTERS)
    return figure.update_layout(height=figure.layout.height + figure.layout.margin.t - before)


def _namer(name: str, handles: Sequence[Handle]) -> Callable[[int], str]:
    """Token id -> label by the handle of that name, or "id N" where there is none."""
    handle = next((handle for handle in handles if handle.name == name), None)
    if handle is None:
        return lambda token_id: f"id {token_id}"
    return lambda token_id: labels.label(handle.pieces([token_id], whole=False)[0])


def _lens(report: Report, mode: Mode, handles: Sequence[Handle]) -> list[go.Figure]:
    from engram_lab.lab.fronts.lens_figures import difference_curve, lens_map, readings
    from engram_lab.lab.fronts.lens_summaries import settle_histogram

    models, difference, drawn = report.result.models, report.result.difference, []
    if difference is not None and difference.mean_kl is not None:
        drawn.append(difference_curve(report, mode))
    if report.config.detail and len(report.config.prompts) == 1:
        for n, lens in enumerate(models):
            for _, tuned in readings(lens):
                drawn.append(lens_map(report, n, _namer(lens.name, handles), mode, tuned=tuned))
    return [*drawn, settle_histogram(report, mode)]


def _gates(report: Report, mode: Mode, handles: Sequence[Handle]) -> list[go.Figure]:
    from engram_lab.lab.fronts.gates_figures import GATE, gate_map, offered

    if not (report.config.detail and len(report.config.prompts) == 1):
        return []
    maps = [gate_map(report, mode, what) for what in offered(report) if what != GATE]
    for drawn in maps:  # beside two rows there is no room for it, and the subtitle names the unit
        drawn.update_traces(colorbar_title_text="", selector={"type": "heatmap"})
    return maps


def _rows(report: Report, mode: Mode, handles: Sequence[Handle]) -> list[go.Figure]:
    from engram_lab.lab.fronts.rows_figures import MEASURES, usage_bars

    counted = [name for name in ("text", "training") if getattr(report.result, name) is not None]
    return [usage_bars(report, name, MEASURES[0], mode) for name in counted]


def _cka(report: Report, mode: Mode, handles: Sequence[Handle]) -> list[go.Figure]:
    from engram_lab.lab.fronts.cka_figures import alignment_curve, lead_curve

    curves = [alignment_curve(report, mode)]
    return [*curves, lead_curve(report, mode)] if report.result.lead is not None else curves


def _kv_swap(report: Report, mode: Mode, handles: Sequence[Handle]) -> list[go.Figure]:
    from engram_lab.lab.fronts.kv_figures import answers

    return [answers(report, mode)]


def _kv_erratum(report: Report, mode: Mode, handles: Sequence[Handle]) -> list[go.Figure | None]:
    from engram_lab.lab.fronts.kv_run_figures import timeline

    return [timeline(report, mode)]


def _kv_compose(report: Report, mode: Mode, handles: Sequence[Handle]) -> list[go.Figure | None]:
    from engram_lab.lab.fronts.kv_run_figures import compose_times

    return [compose_times(report, mode)]


def _facts_check(report: Report, mode: Mode, handles: Sequence[Handle]) -> list[go.Figure]:
    from engram_lab.lab.fronts.facts_figures import locality

    return [locality(report, mode)]


_MORE: dict[str, Callable[[Report, Mode, Sequence[Handle]], Sequence[go.Figure | None]]] = {
    "lens": _lens,
    "gates": _gates,
    "rows": _rows,
    "cka": _cka,
    "kv swap": _kv_swap,
    "kv erratum": _kv_erratum,
    "kv compose": _kv_compose,
    "facts check": _facts_check,
}
