"""The app through AppTest: opening a page, changing a widget, reading what is shown."""

from __future__ import annotations

import base64
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from streamlit.components.v2 import manifest_scanner
from streamlit.testing.v1 import AppTest

from engram_lab.lab.app import runner

APP = Path(runner.__file__).with_name("entry.py")
PAGES = APP.parents[2] / "pages"
# AppTest reads the metadata of every installed package at each run, which takes longer than a page; once is enough.
manifest_scanner.scan_component_manifests = functools.cache(manifest_scanner.scan_component_manifests)


def page_of(name: str, **query: str | list[str]) -> AppTest:
    """A page by a link with this query, before its first run."""
    at = AppTest.from_file(str(APP), default_timeout=200)
    at.query_params.update(query)
    return at.switch_page(str(PAGES / f"{name}.py"))


def open_page(name: str, **query: str | list[str]) -> AppTest:
    """A page as it opens, or by a link with this query."""
    return page_of(name, **query).run()


def clean(at: AppTest) -> AppTest:
    assert not at.exception, at.exception
    assert not at.error, [at.error[0].value, *(c.value[-700:] for c in at.code if "Traceback" in c.value)]
    return at


def sentence(at: AppTest) -> str:
    """The one error on the page."""
    assert not at.exception, at.exception
    assert len(at.error) == 1
    text = at.error[0].value.replace("\\", "")
    assert text.endswith(".") and "\n" not in text and "Traceback" not in text
    return str(text)


def put(at: AppTest, kind: str, key: str, value: Any) -> AppTest:
    """A widget's other value, whatever comes of it."""
    widget = at.get_by_key(key) if kind == "button_group" else getattr(at, kind)(key=key)
    widget.set_value(value)
    return at.run()


def change(at: AppTest, kind: str, key: str, value: Any) -> AppTest:
    """A widget's other value, which the page takes."""
    return clean(put(at, kind, key, value))


def command(at: AppTest) -> str:
    """The exported command line."""
    return str(at.code[0].value)


def chart(at: AppTest, key: str) -> dict[str, Any]:
    """What a Plotly chart of the page draws."""
    found: dict[str, Any] = json.loads(at.get_by_key(key).proto.spec)
    return found


def table(at: AppTest, column: str) -> pd.DataFrame:
    """The first table of the page that has this column."""
    found: pd.DataFrame = next(t.value for t in at.dataframe if column in t.value.columns)
    return found


def numbers(value: Any) -> np.ndarray:
    """An array as Plotly's JSON has it: a list, or base64 with its type."""
    if isinstance(value, dict):
        flat = np.frombuffer(base64.b64decode(value["bdata"]), dtype=value["dtype"])
        return flat.reshape([int(n) for n in str(value.get("shape", "-1")).split(",")])
    return np.array(value, dtype=float)
