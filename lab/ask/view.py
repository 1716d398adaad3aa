"""What a page needs to stand as it was: the values of its widgets, and the files that were brought to it.

A view is plain JSON, so that it goes into a saved run and comes back out of a file from somebody else: `from_dict`
trusts nothing.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engram_lab.models.errors import DataError

MOST_WIDGETS, MOST_ITEMS, LONGEST_TEXT = 200, 1000, 200_000
MOST_FILES, LARGEST_FILE = 8, 4 << 20  # bytes; what the uploaders of the pages take
# What the pages themselves keep beside their widgets: a view from elsewhere has no say in it.
_RESERVED = ("_", "kept.", "keep_", "facts_users", "facts_sets", "facts_apart", "cancelled")
_KEY = re.compile(r"[A-Za-z][\w.\- ]{0,119}")
_PAGE = re.compile(r"[a-z_]{1,40}")
_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class View:
    """A page by its path in the URL, the widgets by their keys, and files by the key of their uploader."""

    page: str
    widgets: Mapping[str, Any] = field(default_factory=dict)  # a JSON scalar, or a list of them
    files: Mapping[str, tuple[str, bytes]] = field(default_factory=dict)  # (file name, content)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON; files in base64."""
        files = {key: [name, base64.b64encode(data).decode()] for key, (name, data) in self.files.items()}
        return {"page": self.page, "widgets": dict(self.widgets), "files": files}

    @classmethod
    def from_dict(cls, stored: Any) -> View:
        """The view that `to_dict` gave; DataError for anything else."""
        if not isinstance(stored, dict) or set(stored) != {"page", "widgets", "files"}:
            raise DataError("A view of a page needs the keys page, widgets and files, and these alone.")
        page, widgets, files = stored["page"], stored["widgets"], stored["files"]
        if not isinstance(page, str) or not _PAGE.fullmatch(page):
            raise DataError("A view names a page that is none.")
        if not isinstance(widgets, dict) or len(widgets) > MOST_WIDGETS:
            raise DataError(f"A view of {page} holds no widgets, or more than {MOST_WIDGETS}.")
        for key, value in widgets.items():
            if not may_be_set(key, value):
                raise DataError(f"A view of {page} holds a widget whose value is none.")
        if not isinstance(files, dict) or len(files) > MOST_FILES:
            raise DataError(f"A view of {page} holds no files, or more than {MOST_FILES}.")
        return cls(page, dict(widgets), {key: _file(page, key, value) for key, value in files.items()})


def may_be_set(key: object, value: Any) -> bool:
    """Whether a view may hold this widget: its key is one of a page's widgets, its value plain."""
    return _is_key(key) and not str(key).startswith(_RESERVED) and is_plain(value)


def is_plain(value: Any) -> bool:
    """Whether a widget's value is a JSON scalar, or a list of them, of a sensible size."""
    if isinstance(value, list):
        return (
            len(value) <= MOST_ITEMS and not any(isinstance(item, list) for item in value) and all(map(is_plain, value))
        )
    if not isinstance(value, _PLAIN) or (isinstance(value, float) and not math.isfinite(value)):
        return False
    return not isinstance(value, str) or len(value) <= LONGEST_TEXT


def _is_key(key: object) -> bool:
    return isinstance(key, str) and _KEY.fullmatch(key) is not None


def _file(page: str, key: object, value: Any) -> tuple[str, bytes]:
    if not _is_key(key) or not isinstance(value, list) or len(value) != 2 or not all(isinstance(v, str) for v in value):
        raise DataError(f"A view of {page} holds a file that is none.")
    name, text = value
    if len(name) > 200 or len(text) > LARGEST_FILE * 4 // 3 + 4:
        raise DataError(f"A view of {page} holds a file of more than {LARGEST_FILE >> 20} MB.")
    try:
        return name, base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise DataError(f"A view of {page} holds a damaged file.") from None
