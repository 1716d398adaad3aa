"""The Engram architecture, its training, and the handle through which any causal LM is run.

The package itself imports nothing: what names a model or an error need not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engram_lab.models.engram import EngramConfig, EngramForCausalLM, EngramModel

__all__ = ["EngramConfig", "EngramForCausalLM", "EngramModel"]


def __getattr__(name: str) -> Any:
    """The classes of the Engram, when they are asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from engram_lab.models import engram

    return getattr(engram, name)
