"""The reference of every probe: what it asks, its formula, symbols, sources, controls and limits, and its command.

One source for the Reference page and for what stands under a chart of any page: `shown` gives a page its formula and
text. A probe without a text of its own there is explained by its DEFINITIONS.
"""

from __future__ import annotations

import argparse
from functools import partial

from engram_lab.lab.ask import flags
from engram_lab.lab.draw import labels
from engram_lab.lab.fronts import FRONTS, front
from engram_lab.lab.fronts.entry import Entry


def entry(probe: str) -> Entry:
    """What the front of a probe says of it."""
    made: Entry = front(probe).ENTRY
    return made


def definitions(probe: str) -> dict[str, str]:
    """What each figure of a result is: name -> text."""
    names: dict[str, str] = front(probe).DEFINITIONS
    return names


def defined(probe: str) -> str:
    """`definitions` as a Markdown list."""
    return "\n".join(f"- **{name}**: {labels.markdown(text)}" for name, text in definitions(probe).items())


def shown(probe: str) -> tuple[str, str]:
    """(formula in LaTeX, Markdown) for the expander under a chart of this probe."""
    of = entry(probe)
    meaning = of.meaning.strip() or defined(probe)
    return (
        of.formula,
        f"{meaning}\n\n**It does not show** {of.not_shown}\n\n**Source**: {'; '.join(of.sources)}.",
    )


def usage(probe: str) -> str:
    """What `engram-lab probe NAME --help` says."""
    parser = argparse.ArgumentParser(
        prog=f"engram-lab probe {probe}",
        description=FRONTS[probe],
        formatter_class=partial(argparse.HelpFormatter, width=110, max_help_position=32),
        add_help=False,
    )
    front(probe).ASK.add_arguments(parser)
    flags.add_outputs(parser)
    return parser.format_help()


def command(probe: str) -> str:
    """The command of `Entry.example`."""
    return f"engram-lab probe {probe} {entry(probe).example}"
