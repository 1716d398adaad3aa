"""When memory runs out: told as one sentence with what would fit, what was held is freed, and the app goes on."""

from __future__ import annotations

import ctypes
import gc
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import psutil

from engram_lab.lab.app import imports
from engram_lab.models.errors import LabError, OutOfMemoryError

if TYPE_CHECKING:
    import torch

    from engram_lab.models.handle import Handle

_WORDS = ("can't allocate memory", "DefaultCPUAllocator", "not enough memory", "Unable to allocate", "out of memory")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_ASKED = re.compile(r"(?:allocate|allocating)\D{0,20}?([\d.]+) (bytes|[KMGTP]iB)")
_M_ARENA_MAX, ARENAS = -8, 2  # of glibc's malloc.h
MARGIN = 0.8  # of what is free, as not all of it goes into the one tensor that did not fit


def free_memory() -> None:
    """Hand back to the system what nothing refers to any more: cycles, CUDA's cache, free pages of the C library."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and not imports.are_running() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim()


def trim() -> None:
    """Let the C library hand back the pages it keeps for later; glibc does not by itself, others need no such call."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def few_arenas() -> None:
    """Let the threads of this process share a few heaps: every run of a page is a thread, and glibc has up to eight
    for each core, each with holes of its own."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, ARENAS)


def shortage(error: BaseException) -> BaseException | None:
    """The lack of memory that an error is or was caused by; None for any other."""
    import torch

    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        if isinstance(at, MemoryError | torch.OutOfMemoryError):
            return at
        if isinstance(at, RuntimeError) and any(word in str(at) for word in _WORDS):
            return at
        at = at.__cause__ or at.__context__
    return None


@contextmanager
def told(doing: str, handles: Sequence[Handle] = (), config: Any = None) -> Iterator[None]:
    """Raise OutOfMemoryError, one sentence, where memory runs out within; `doing` is what ran, for the sentence.

    What the failed run held is freed before that. `config` is the request, whose texts say what fewer means.
    """
    found = None
    try:
        yield
    except OutOfMemoryError:
        raise
    except Exception as error:
        lack = shortage(error)
        if lack is None:
            raise
        found = str(lack)
        _let_go(error)
    if found is not None:  # outside the handler, which keeps the failed frames with their tensors
        free_memory()
        raise OutOfMemoryError(_sentence(found, doing, handles, config))


def _let_go(error: BaseException) -> None:
    """Clear the frames that failed: their variables are what fills the memory."""
    at: BaseException | None = error
    seen: set[int] = set()
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        traceback.clear_frames(at.__traceback__)
        at = at.__cause__ or at.__context__


def asked(message: str) -> int | None:
    """The bytes that could not be had, as torch and numpy write them."""
    match = _ASKED.search(message)
    return None if match is None else int(float(match[1]) * _UNITS[match[2]])


def free(device: torch.device) -> int:
    """Bytes that a process could still have on a device."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    left = int(psutil.virtual_memory().available)
    with suppress(ImportError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            left = min(left, max(limit - psutil.Process().memory_info().vms, 0))
    return left


def _sentence(message: str, doing: str, handles: Sequence[Handle], config: Any) -> str:
    import torch

    device = handles[0].device if handles else torch.device("cuda" if "CUDA" in message else "cpu")
    tried, left = asked(message), free(device)
    where = "the memory of this computer" if device.type == "cpu" else f"the memory of {device}"
    amounts = "" if tried is None else f" (one more piece of {size(tried)} was asked for, {size(left)} are free)"
    # Of a run that needs a tensor of `tried` bytes, a part this large would have had its tensor.
    share = 0.5 if not tried else min(0.5, MARGIN * left / tried)
    ways = []
    if config is not None and handles:
        ways.append(_fewer(share, handles[0], config))
    if not handles or any(handle.dtype == torch.float32 for handle in handles):
        ways.append("a smaller number format, which `engram-lab app --dtype bfloat16` runs in")
    if not handles:
        ways.append("fewer models kept open, with `--models 1`")
    if device.type != "cpu":
        ways.append("the CPU, with `engram-lab app --device cpu`")
    if not ways:
        ways.append("a smaller model")
    return f"{doing} ran out of {where}{amounts}: what would fit is {', or '.join(ways)}."


def _fewer(share: float, handle: Handle, config: Any) -> str:
    """About how many tokens, and texts, of this request would fit."""
    texts = list(_strings(config))
    tokens = 0
    with suppress(LabError):
        tokens = len(handle.encode(max(texts, key=len)))
    parts = []
    if tokens > 1:
        parts.append(f"a text of about {max(1, int(tokens * share)):,} instead of {tokens:,} tokens")
    if len(texts) > 1:
        parts.append(f"about {max(1, int(len(texts) * share)):,} of the {len(texts):,} texts")
    return " and ".join(parts) or f"about {share:.0%} of what was asked for"


def _strings(config: Any) -> Iterator[str]:
    """The texts of a request: what stands in it at any depth in a list, without the names of models."""

    def walk(value: Any, listed: bool) -> Iterator[str]:
        if isinstance(value, dict):
            for key, item in value.items():
                if key != "models":
                    yield from walk(item, listed)
        elif isinstance(value, list):
            for item in value:
                yield from walk(item, True)
        elif isinstance(value, str) and listed and value:
            yield value

    yield from walk(config.to_dict(), False)


def size(n: int) -> str:
    """Bytes as MB or GB."""
    return f"{n / 1e9:,.1f} GB" if n >= 1e9 else f"{n / 1e6:,.0f} MB"
