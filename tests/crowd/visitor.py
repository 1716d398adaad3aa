"""A visitor of a running lab, without a browser: Streamlit's own protocol over a real websocket.

It keeps the page as a browser would, by the paths that the server gives, and sends what a browser sends.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any
from urllib.parse import urlencode

from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.Element_pb2 import Element
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from streamlit.proto.WidgetStates_pb2 import WidgetState
from websockets.sync.client import connect
from websockets.typing import Subprotocol

PATIENCE = 240.0  # seconds: for a busy machine
# Ids drawn anew by each server, which a browser follows and nobody sees.
_DRAWN = {"download_button": ("url", "deferred_file_id")}


class Visitor:
    """One browser session."""

    def __init__(self, address: str) -> None:
        self._url = f"ws://{address}/_stcore/stream"
        self._open = ExitStack()
        self._connect()
        self._now: dict[tuple[int, ...], Element] = {}
        self._page_hash = ""
        self._query = ""
        self._values: dict[str, WidgetState] = {}  # of the page's widgets that were changed, as a browser keeps them
        self.running = False
        self.received = b""  # all that ever came, to look for what must not be in it
        self.waited: list[str] = []  # what the bars said, in order

    def _connect(self) -> None:
        protocols = [Subprotocol("streamlit")]
        self._socket = self._open.enter_context(
            connect(self._url, subprotocols=protocols, max_size=None, open_timeout=PATIENCE)
        )
        self._fresh = True

    def __enter__(self) -> Visitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the tab."""
        self._open.close()

    # --- What a person does ------------------------------------------------------------------------------------------

    def go(self, page: str, **query: Any) -> Visitor:
        """Open a page by a link, in place of the one that is there; as for a browser, that is a session of its own."""
        if not self._fresh:
            self._open.close()
            self._connect()
        self._fresh = False
        message = BackMsg()
        message.rerun_script.page_name = "" if page == "start" else page
        self._query, self._values = urlencode(query), {}
        self._send(message)
        return self

    def set(self, **values: Any) -> Visitor:
        """Change widgets by their keys, all at once."""
        for key, value in values.items():
            state = self._state(key, value)
            self._values[state.id] = state
        return self._rerun()

    def press(self, label: str) -> Visitor:
        """Press the button with this label, once it is there."""
        self.until(lambda: any(own.label == label for own in self.elements("button")), f"the button {label}")
        pressed = next(own.id for own in self.elements("button") if own.label == label)
        return self._rerun(WidgetState(id=pressed, trigger_value=True))

    def _rerun(self, *triggers: WidgetState) -> Visitor:
        message = BackMsg()
        message.rerun_script.widget_states.widgets.extend([*self._values.values(), *triggers])
        message.rerun_script.page_script_hash = self._page_hash
        self._send(message)
        return self

    def _send(self, message: BackMsg) -> None:
        message.rerun_script.query_string = self._query
        message.rerun_script.context_info.color_scheme = "light"
        self.running = True
        self._socket.send(message.SerializeToString())

    # --- What the server answers -------------------------------------------------------------------------------------

    def done(self) -> Visitor:
        """Wait until the script has ended."""
        return self.until(lambda: not self.running, "the end of the script")

    def until(self, true: Callable[[], bool], what: str) -> Visitor:
        """Read what comes until something is the case."""
        deadline = time.monotonic() + PATIENCE
        while not true():
            left = deadline - time.monotonic()
            assert left > 0, f"waited in vain for {what}; the page shows {self.text()}"
            try:
                data = self._socket.recv(timeout=left)
            except TimeoutError:
                continue
            assert isinstance(data, bytes)
            self.received += data
            message = ForwardMsg()
            message.ParseFromString(data)
            self._take(message)
        return self

    def _take(self, message: ForwardMsg) -> None:
        kind = message.WhichOneof("type")
        if kind == "new_session":
            self._now, self.running = {}, True
        elif kind == "navigation":
            self._page_hash = message.navigation.page_script_hash
        elif kind == "script_finished":
            # One that was ended for a rerun is followed by the next.
            self.running = message.script_finished == ForwardMsg.FINISHED_EARLY_FOR_RERUN
        elif kind == "delta":
            path = tuple(message.metadata.delta_path)
            what = message.delta.WhichOneof("type")
            if what == "new_element":
                element = message.delta.new_element
                own: Any = getattr(element, element.WhichOneof("type") or "", None)
                if getattr(own, "set_value", False):  # the server's value replaces the visitor's
                    self._values.pop(own.id, None)
                self._now = {at: own for at, own in self._now.items() if at[: len(path)] != path}
                if element.WhichOneof("type") != "empty":
                    self._now[path] = element
                if element.WhichOneof("type") == "progress":
                    self.waited.append(element.progress.text)
        assert kind != "ref_hash", "the server thinks that this visitor has kept a message"

    # --- What the page shows -----------------------------------------------------------------------------------------

    def elements(self, kind: str) -> list[Any]:
        """What stands on the page, of one kind, from top to bottom."""
        found = [self._now[path] for path in sorted(self._now)]
        return [getattr(own, kind) for own in found if own.WhichOneof("type") == kind]

    def charts(self) -> dict[str, str]:
        """What each Plotly chart draws, by its key."""
        return {own.id.rpartition("-")[2]: own.spec for own in self.elements("plotly_chart")}

    def text(self) -> str:
        """What is written on the page."""
        parts = [own.body for kind in ("markdown", "alert", "html") for own in self.elements(kind)]
        return "\n".join([*parts, *(own.code_text for own in self.elements("code"))])

    def errors(self) -> list[str]:
        """What went wrong, as the page says it."""
        bad = [own.body for own in self.elements("alert") if own.format == own.ERROR]
        bad += [own.code_text for own in self.elements("code") if "Traceback" in own.code_text]
        return bad + [own.message for own in self.elements("exception")]

    def page(self) -> list[bytes]:
        """Everything on the page, each element byte for byte but for ids that every server draws anew."""
        found = []
        for path in sorted(self._now):
            element = Element()
            element.CopyFrom(self._now[path])
            kind = element.WhichOneof("type")
            for field in _DRAWN.get(kind or "", ()):
                getattr(element, str(kind)).ClearField(field)
            styler = element.dataframe.arrow_data.styler if kind == "dataframe" else None
            if styler is not None and styler.uuid:  # the hash of a path, seeded anew in each process
                styler.styles, styler.uuid = styler.styles.replace(styler.uuid, "one"), "one"
            found.append(element.SerializeToString(deterministic=True))
        return found

    def _state(self, key: str, value: Any) -> WidgetState:
        """A widget's new value, of the type that its kind sends."""
        for element in self._now.values():
            kind = element.WhichOneof("type")
            own = getattr(element, str(kind))
            if str(getattr(own, "id", "")).endswith(f"-{key}"):
                state = WidgetState(id=own.id)
                if kind == "checkbox":
                    state.bool_value = bool(value)
                elif kind == "number_input":
                    state.double_value = float(value)
                elif kind in ("text_input", "text_area", "selectbox"):
                    state.string_value = str(value)
                else:
                    raise TypeError(f"{key} is a {kind}")
                return state
        raise KeyError(key)
