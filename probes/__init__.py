"""One module for each probe: run(handles, config, progress) -> Report, with a Config and a Result of its own.

A probe's file is its name: "lens" is probes/lens.py, "kv swap" is probes/kv/swap.py. It has CONFIG, RESULT and run,
and depends where it reads more from disk than the models. The list of them all, in the order in which they are shown,
is lab.fronts.FRONTS: nothing here needs one. What each figure of a result is stands in the front, as DEFINITIONS,
which is read without what the probe imports.
"""

import importlib
import re
from types import ModuleType


def module_of(probe: str) -> ModuleType:
    """The module of a probe, imported now. LookupError, a sentence, for a name that is none, whatever it is."""
    path = f"{__name__}.{probe.replace(' ', '.')}"
    if re.fullmatch("[a-z]+( [a-z]+)?", probe):
        try:
            module = importlib.import_module(path)
        except ModuleNotFoundError as error:
            if not path.startswith(error.name or "?"):  # the probe is there, and something that it needs is not
                raise
        else:
            if hasattr(module, "RESULT"):  # it is no helper of the probes, like probes/stats.py
                return module
    raise LookupError(f'This version of the lab has no probe "{probe}".')
