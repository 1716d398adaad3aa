"""A session as one HTML page that opens from a file: figures that answer to the mouse, notes, protocols, requests.

The page trusts nothing that a session holds. Jinja escapes every text, Markdown may bring neither HTML nor pictures,
and the page's own policy lets only the scripts run that stand in it by their hash, and nothing reach a network.
"""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from engram_lab.lab.draw import durations
from engram_lab.lab.draw.theme import MONO, PALETTES, SANS
from engram_lab.lab.fronts import FRONTS, export, figures, front
from engram_lab.models.errors import LabError
from engram_lab.probes.base import Report, versions

if TYPE_CHECKING:
    from engram_lab.lab.sessions import RunInfo, SessionInfo, Store
    from engram_lab.models.handle import Handle

TEMPLATES = Path(__file__).with_name("templates")
MOST_ROWS, MOST_PROMPTS, MOST_IDS = 200, 20, 2000  # of each run, in the page
_LINK = re.compile(r"(https?|mailto):", re.IGNORECASE)


def html_report(store: Store, name_or_id: str, handles: Iterable[Handle] | None = None) -> str:
    """The page of a session.

    `handles` name the tokens and memory layers where the reports do not, if their weights are those of the run; those
    of the session's models that can be opened without a network are opened, and closed again, where None is given.
    """
    session = store.session(name_or_id)
    reports = [store.report(run.id) for run in session.runs]
    if handles is not None:
        return page_of(session, reports, tuple(handles))
    with opened(reports) as own:
        return page_of(session, reports, own)


@contextmanager
def opened(reports: Iterable[Report]) -> Iterator[tuple[Handle, ...]]:
    """The models of the reports that are here, opened for as long as the block runs; never asks a network.

    Only names that the lab lists itself: that of a session from elsewhere may be any path.
    """
    from engram_lab.models.handle import open_model
    from engram_lab.models.listing import list_models

    wanted = {model.name: None for report in reports for model in report.protocol.models}
    found: list[Handle] = []
    try:
        for name in wanted.keys() & {info.name for info in list_models()}:
            try:
                found.append(open_model(name, device="cpu"))
            except LabError:  # then its tokens are shown by their ids
                continue
        yield tuple(found)
    finally:
        for handle in found:
            handle.close()


def page_of(session: SessionInfo, reports: Sequence[Report], handles: Sequence[Handle]) -> str:
    """The page of a session and its reports, in the order of its runs."""
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined)
    script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    plotly = get_plotlyjs().replace("\r\n", "\n")
    runs = [_run(info, report, handles) for info, report in zip(session.runs, reports, strict=True)]
    policy = (
        f"default-src 'none'; script-src {_hash(plotly)} {_hash(script)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    return environment.get_template("report.html.jinja").render(
        session=session,
        note=Markup(markdown(session.note)),
        runs=runs,
        moment=moment,
        duration=durations.digits,
        palettes=PALETTES,
        sans=Markup(SANS),
        mono=Markup(MONO),
        policy=policy,
        plotly=Markup(plotly),
        script=Markup(script),
        lab=versions()["engram_lab"],
        most_rows=MOST_ROWS,
        most_ids=MOST_IDS,
    )


def markdown(text: str) -> str:
    """HTML of a note: no raw HTML, no pictures, links to the web and to mail alone."""
    parser = MarkdownIt("commonmark", {"html": False, "breaks": True}).enable(["table", "strikethrough"])
    parser.validateLink = lambda url: _LINK.match(url) is not None  # type: ignore[method-assign]
    parser.add_render_rule("image", _picture_as_link)
    return str(parser.render(text))


def _picture_as_link(self: Any, tokens: Any, index: int, options: Any, env: Any) -> str:
    source, shown = html.escape(tokens[index].attrs["src"]), html.escape(tokens[index].content)
    return f'<a href="{source}">{shown or source}</a>'


def moment(when: datetime) -> str:
    """A moment to the minute."""
    return f"{when:%Y-%m-%d %H:%M} UTC"


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _run(info: RunInfo, report: Report, handles: Sequence[Handle]) -> dict[str, Any]:
    """What the template shows of a run."""
    fingerprints = {model.name: model.fingerprint for model in report.protocol.models}
    same = [handle for handle in handles if handle.fingerprint == fingerprints.get(handle.name)]
    shown = front(report.probe)
    rows = list(itertools.islice(shown.rows(report), MOST_ROWS + 1))
    prompts = getattr(report.config, "prompts", ())
    each = zip(report.protocol.models, report.protocol.prompt_ids, strict=False)
    ids = [(model.name, prompt) for model, prompts_of in each for prompt in prompts_of]
    said = getattr(report.result, "said", ())
    return {
        "probe": report.probe,
        "about": FRONTS[report.probe],
        "info": info,
        "protocol": report.protocol,
        "said": [said] if isinstance(said, str) else [text for text in said if isinstance(text, str)],
        "figures": _figures(report, same),
        "prompts": prompts[:MOST_PROMPTS],
        "n_prompts": len(prompts),
        "prompt_ids": _first_ids(ids),
        "n_ids": sum(len(prompt) for _, prompt in ids),
        "definitions": front(report.probe).DEFINITIONS,
        "command": export.command_line(report.probe, report.config),
        "python": export.python(report.probe, report.config),
        "files": export.files(report.probe, report.config),
        "columns": list(rows[0]) if rows else [],
        "rows": [[_cell(value) for value in row.values()] for row in rows[:MOST_ROWS]],
        "more_rows": len(rows) > MOST_ROWS,
    }


def _first_ids(ids: Sequence[tuple[str, tuple[int, ...]]]) -> list[tuple[str, str]]:
    """(model, token ids) of each prompt, MOST_IDS at most of all."""
    found, left = [], MOST_IDS
    for name, prompt in ids:
        if not left:
            break
        found.append((name, " ".join(map(str, prompt[:left]))))
        left -= min(left, len(prompt))
    return found


def _figures(report: Report, handles: Sequence[Handle]) -> list[dict[str, Any]]:
    """The figures, each in both modes, as JSON that may stand in a script."""
    return [
        {
            "title": html.unescape(re.sub(r"<[^>]*>", " ", light.layout.title.text or "")),
            "height": int(light.layout.height),
            "light": _json(light),
            "dark": _json(dark),
        }
        for light, dark in zip(figures(report, "light", handles), figures(report, "dark", handles), strict=True)
    ]


def _json(figure: Any) -> Markup:
    """JSON in which nothing ends a script."""
    text: str = figure.to_json()
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
