"""What this app uses of other packages that they do not offer: all of it is here, and tested with the pinned releases.

- Streamlit says no key's kind of widget: `settable_values` asks the session state behind st.session_state.
- The browser's part of Streamlit asks for what draws charts when the first one comes: `chart_script` is its address.
- nnsight gives every object of the process a `save`: `import_nnsight` takes it off again.
- Python takes seconds to take everything apart: `end_process` leaves at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NoReturn

# Widgets whose value may be set beforehand; buttons, uploads and tables may not.
_SETTABLE = {
    "string_value", "bool_value", "int_value", "double_value", "string_array_value", "int_array_value",
    "double_array_value",
}  # fmt: skip


def settable_values() -> dict[str, Any]:
    """key -> value of the widgets of this run of the script whose value may be set; none outside of a script."""
    import streamlit as st
    from streamlit.runtime.scriptrunner import get_script_run_ctx

    context = get_script_run_ctx()
    if context is None:
        return {}
    state = context.session_state._state
    values: dict[str, Any] = {}
    for key in list(st.session_state):
        number = state.get_widget_id_from_key(str(key))
        metadata = None if number is None else state.get_widget_metadata(number)
        if metadata is not None and metadata.value_type in _SETTABLE:
            values[str(key)] = st.session_state[key]
    return values


def chart_script() -> str | None:
    """The path on the server of the script that draws charts, 4.7 MB; None where it cannot be told."""
    import streamlit

    scripts = list((Path(streamlit.__file__).parent / "static" / "static" / "js").glob("PlotlyChart.*.js"))
    return f"/static/js/{scripts[0].name}" if len(scripts) == 1 else None


def import_nnsight() -> None:
    """Import it, without the `save` that it gives to every object: anyio refuses to define classes that have one."""
    if "nnsight" not in sys.modules:
        import anyio._backends._asyncio  # noqa: F401 - its classes are defined before

    import nnsight  # noqa: F401
    from nnsight._c import unmount

    if unmount is not None and hasattr(object, "save"):
        unmount("save")


def end_process() -> NoReturn:
    """End this process at once, with exit code 0; nothing of it may still wait to be written."""
    sys.stdout.flush()
    os._exit(0)
