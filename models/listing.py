"""Which models are here, by their folders alone: nothing of torch or transformers is imported for it.

A shipped model has a folder in assets, one that was got a folder in the user's cache, any other is in the hub's cache.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engram_lab.models.errors import CheckpointError, first_line
from engram_lab.models.files import load_json

SHIPPED = Path(__file__).resolve().parent.parent / "assets" / "models"
FETCHABLE = ("smollm2-135m",)  # what models.download can bring
_CAUSAL = ("ForCausalLM", "LMHeadModel")  # how the classes of causal language models end in transformers


@dataclass(frozen=True)
class ModelInfo:
    """A model that can be opened offline. `where` is "shipped" or "cache"; weight_bytes as stored."""

    name: str
    where: str
    folder: Path
    model_type: str
    weight_bytes: int


def list_models() -> list[ModelInfo]:
    """The shipped models, those that were got, then the causal LMs in the local Hugging Face cache, each by name."""
    found = [(folder.name, "shipped", folder) for folder in shipped()]
    found += [(name, "cache", fetched(name)) for name in FETCHABLE]
    found += [(name, "cache", folder) for name, folder in cached()]
    models = []
    for name, where, folder in found:
        try:
            config = read_config(folder)
            size = sum(file.stat().st_size for file in weight_files(folder))
        except CheckpointError:
            continue
        # transformers' own table of them cannot be had without torch.
        if any(str(kind).endswith(_CAUSAL) for kind in config.get("architectures") or ()):
            models.append(ModelInfo(name, where, folder, str(config.get("model_type")), size))
    return models


def cache_folder() -> Path:
    """Where the lab keeps what it downloaded: ENGRAM_LAB_CACHE, else engram-lab in the user's cache folder."""
    if chosen := os.environ.get("ENGRAM_LAB_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "")
        if not base.is_absolute():  # the standard says to pass over a relative one
            base = Path.home() / ".cache"
    return base / "engram-lab"


def fetched(name: str) -> Path:
    """The folder of a model of FETCHABLE; it is there, and then whole, once models.download has brought it."""
    return cache_folder() / "models" / name


def shipped() -> list[Path]:
    """The folders of the models that ship, by name."""
    return sorted(path.parent for path in SHIPPED.glob("*/config.json"))


def cached() -> list[tuple[str, Path]]:
    """(id, folder) of what lies in the local Hugging Face cache, whole or not."""
    from huggingface_hub import constants

    out = []
    for repository in sorted(Path(constants.HF_HUB_CACHE).glob("models--*")):
        try:
            commit = (repository / "refs" / "main").read_text(encoding="utf-8").strip()
        except OSError:
            continue
        name = repository.name.removeprefix("models--").replace("--", "/")
        out.append((name, repository / "snapshots" / commit))
    return out


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder; CheckpointError where there is none that can be read."""
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(_other_weights(folder) or f"{folder} is not a checkpoint: config.json is missing.")
    try:
        config = load_json(file.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON ({first_line(error)}).") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} is not a configuration: it holds no JSON object.")
    return config


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder; CheckpointError if there are none or one is missing."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if index.is_file():
        try:
            names = sorted(set(load_json(index.read_bytes())["weight_map"].values()))
            if not names or not all(isinstance(name, str) and Path(name).name for name in names):
                raise ValueError("it names no file")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is not a valid index of weight files ({first_line(error)}).") from error
        files = [folder / Path(name).name for name in names]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise CheckpointError(f"{folder} lacks the weight file {missing[0]} that its index names: copy it too.")
        return files
    pickles = sorted(file.name for kind in ("bin", "pt", "pth", "ckpt") for file in folder.glob(f"*.{kind}"))
    if pickles:
        raise CheckpointError(
            f"{folder} has its weights only as a pickle ({pickles[0]}), which can run code when it is read: "
            "convert them to model.safetensors."
        )
    raise CheckpointError(_other_weights(folder) or f"{folder} has no weights: model.safetensors is missing.")


def _other_weights(folder: Path) -> str:
    """What a folder holds in place of a whole checkpoint, in one sentence; "" if there is nothing of that kind."""
    files = sorted(folder.glob("*.[gG][gG][uU][fF]"))
    return f"{folder} holds GGUF files and no checkpoint: give the file itself, {files[0]}." if files else ""


# Weights that go on top of a base, by the programs that write them: peft, then engram-peft.
_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "engram_adapters.safetensors")


def check_adapter(folder: Path) -> None:
    """CheckpointError for a folder with an adapter, which would be passed over."""
    there = [name for name in _ADAPTERS if (folder / name).is_file()]
    if not there:
        return
    try:
        base = load_json((folder / _ADAPTERS[0]).read_bytes()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    of = f" of {base}" if isinstance(base, str) and base else ""
    model = any(file.name not in _ADAPTERS for kind in ("*.safetensors", "*.gguf") for file in folder.glob(kind))
    if "engram" in there[0]:
        way = "open its base alone, as this lab does not run the memories of engram-peft"
    else:
        way = "merge it into its base (peft: merge_and_unload), and save the whole"
    if model:
        raise CheckpointError(
            f"{folder} holds an adapter{of} ({there[0]}) beside the model, which this lab would leave out: {way}, or "
            "move it away."
        )
    raise CheckpointError(f"{folder} holds an adapter{of} ({there[0]}) and no model: {way}.")
