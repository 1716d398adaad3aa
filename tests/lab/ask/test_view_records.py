"""Views as records: they come back equal, and one from elsewhere holds nothing but widgets and small files."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engram_lab.lab.ask import view as views
from engram_lab.lab.ask.view import View
from engram_lab.models.errors import DataError

PLAIN = {"prompt": "a <b>", "pos": 3, "tuned": True, "again": [0, 2], "none": None, "x": 0.5}


def test_a_view_comes_back_through_json() -> None:
    view = View("lens", PLAIN, {"file": ("t.txt", b"\x00\xff line")})
    assert View.from_dict(json.loads(json.dumps(view.to_dict()))) == view


@pytest.mark.parametrize(
    "change",
    [
        {"page": "../x"},
        {"page": 3},
        {"widgets": []},
        {"widgets": {"a": {"b": 1}}},
        {"widgets": {"a": [[1]]}},
        {"widgets": {"a": float("nan")}},
        {"widgets": {"a": "x" * (views.LONGEST_TEXT + 1)}},
        {"widgets": {"_reopened": 1}},
        {"widgets": {"kept.file": "x"}},
        {"widgets": {"facts_users": "x"}},
        {"widgets": {f"a{n}": 1 for n in range(views.MOST_WIDGETS + 1)}},
        {"files": {"file": ["t.txt", "not base64!"]}},
        {"files": {"file": ["t.txt"]}},
        {"files": {"file": ["t.txt", "A" * (views.LARGEST_FILE * 4 // 3 + 8)]}},
        {"files": {f"f{n}": ["t", ""] for n in range(views.MOST_FILES + 1)}},
        {"more": 1},
    ],
)
def test_a_view_that_is_none_is_one_sentence(change: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"\.$") as error:
        View.from_dict(View("lens", PLAIN).to_dict() | change)
    assert "\n" not in str(error.value)
