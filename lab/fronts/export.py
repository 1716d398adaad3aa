"""Any report as files, and its request as a command line or as Python that gives the same report."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engram_lab.lab.fronts import front
from engram_lab.models.errors import LabError
from engram_lab.probes import module_of
from engram_lab.probes.base import Record, Report

if TYPE_CHECKING:
    import plotly.graph_objects as go

REQUEST_FILE = "request.json"  # what an exported program reads where the request is too long to stand in it
LONG = 2000  # characters


def csv_text(report: Report) -> str:
    """The rows of a report as CSV with a header.

    A text that a spreadsheet would take for a formula has a ' before it.
    """
    rows = map(_inert, front(report.probe).rows(report))
    first = next(rows)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(first), lineterminator="\n")
    writer.writeheader()
    writer.writerow(first)
    writer.writerows(rows)
    return out.getvalue()


def _inert(row: Mapping[str, Any]) -> dict[str, Any]:
    formula = ("=", "+", "-", "@", "\t", "\r")
    return {key: f"'{v}" if isinstance(v, str) and v.startswith(formula) else v for key, v in row.items()}


def no_png() -> str | None:
    """Why no PNG can be drawn here, or None if one can."""
    from choreographer.browsers.chromium import Chromium

    return None if Chromium.find_browser(skip_local=False) else "A PNG needs Chrome or Chromium on this machine."


def png(figure: go.Figure, scale: float = 2.0) -> bytes:
    """The figure as a PNG, drawn by Chrome or Chromium; LabError where there is none."""
    try:
        image: bytes = figure.to_image(format="png", scale=scale, width=figure.layout.width or 1000)
    except Exception as error:  # kaleido's own classes, or whatever the browser's start raises
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise LabError(
            f"The PNG could not be drawn ({reason}): it needs Chrome or Chromium on this machine; "
            "use CSV or JSON without it."
        ) from error
    return image


def command_line(probe: str, config: Record) -> str:
    """The shell command of a request; it reads the files of `files`."""
    return " \\\n  ".join([f"engram-lab probe {probe}", *front(probe).ASK.options(config), "--json=-"])


def python(probe: str, config: Record) -> str:
    """A Python program of a request; one that is long, or holds records of its own, is read from REQUEST_FILE."""
    package, _, module = module_of(probe).__name__.rpartition(".")
    kind = type(config).__name__
    head, made = "", _constructor(config)
    if len(made) > LONG or any(_holds_records(getattr(config, item.name)) for item in dataclasses.fields(config)):
        head = "import json\nfrom pathlib import Path\n\n"
        made = f'{kind}.from_dict(json.loads(Path("{REQUEST_FILE}").read_text(encoding="utf-8")))'
    return (
        f"{head}from engram_lab.models.handle import open_model\n"
        f"from {package} import {module}\n"
        f"from {package}.{module} import {kind}\n\n"
        f"config = {made}\n"
        f"report = {module}.run([open_model(name) for name in config.models], config)\n"
        "print(report.to_json())\n"
    )


def _holds_records(value: object) -> bool:
    """Whether a field is made of records of its own, which a program would have to import one by one."""
    return isinstance(value, Record) or (isinstance(value, tuple) and any(map(_holds_records, value)))


def _constructor(config: Record) -> str:
    """The call that makes a request, without what is as by default."""
    lines = [
        f"    {item.name}={getattr(config, item.name)!r},\n"
        for item in dataclasses.fields(config)
        if item.default is dataclasses.MISSING or getattr(config, item.name) != item.default
    ]
    return f"{type(config).__name__}(\n{''.join(lines)})"


def files(probe: str, config: Record) -> dict[str, str]:
    """The files that the command and the program of a request read: name -> text."""
    found: dict[str, str] = dict(front(probe).ASK.files(config))
    if REQUEST_FILE in python(probe, config):
        found[REQUEST_FILE] = json.dumps(config.to_dict(), ensure_ascii=False, indent=1) + "\n"
    return found
