"""How this server opens models: the device, the number format, and how many it keeps."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from engram_lab.models.errors import LabError

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Settings:
    """The best device and the usual dtype if not given, at most `models` at once."""

    device: str | None = None
    dtype: str | None = None
    models: int = 3


def from_environment() -> Settings:
    """Settings with the number of models from ENGRAM_LAB_MODELS, where that is one."""
    given = os.environ.get("ENGRAM_LAB_MODELS", "")
    return Settings(models=int(given)) if given.isdecimal() and int(given) > 0 else Settings()


_settings = from_environment()


def settings() -> Settings:
    """The settings of this process."""
    return _settings


def configure(device: str | None = None, dtype: str | None = None, models: int | None = None) -> None:
    """Set what is given, before the first model is opened. LabError for a device or dtype that there is not."""
    global _settings
    if device not in (None, "cpu") or dtype not in (None, *DTYPES):
        from engram_lab.models import loading  # torch knows which there are: only who names one waits for it

        loading.choose_dtype(dtype, loading.choose_device(device), None)
    if models is not None and models < 1:
        raise LabError(f"--models is {models}; a server keeps at least 1 model in memory.")
    new = replace(_settings, device=device or _settings.device, dtype=dtype or _settings.dtype)
    _settings = new if models is None else replace(new, models=models)
