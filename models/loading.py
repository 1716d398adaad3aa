"""From a name to a module and its tokenizer: shipped names, local folders, hub ids (cache first), GGUF files.

Everything is read from safetensors, JSON and GGUF, never a pickle; every failure is one LabError sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from engram_lab.models import architectures, gguf_file, graft, listing, weightfiles
from engram_lab.models.canonical import canonical_map, check_map, map_sha256
from engram_lab.models.engram import EngramForCausalLM  # registers the Engram with transformers' auto classes
from engram_lab.models.errors import CheckpointError, LabError, TokenizerMismatchError, UnknownModelError, first_line

HUB_TIMEOUT = 5.0  # seconds to wait for the hub's answer
# What a checkpoint needs; subfolders hold other formats of the same weights.
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_HUB_SKIP = ["*/*", "consolidated*.safetensors", "*.fp16.safetensors", "*.bf16.safetensors"]
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "spiece.model",
    "tekken.json",
    "vocab.txt",
)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint holds, ready to be wrapped."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    fingerprint: str


def resolve(name: str, trust_remote_code: bool = False) -> Path:
    """The checkpoint folder or GGUF file of a name, downloaded if it has to be; else UnknownModelError."""
    name = name.strip()
    if not name:
        raise UnknownModelError(f"No model was named; {_shipped_sentence()}")
    if (listing.SHIPPED / name / "config.json").is_file():
        return listing.SHIPPED / name
    if name in listing.FETCHABLE and (listing.fetched(name) / "config.json").is_file():
        return listing.fetched(name)
    path = Path(name).expanduser()
    if path.is_file() and path.suffix.lower() != ".gguf":
        raise UnknownModelError(f'"{name}" is a file, but not .gguf: give the folder that holds config.json.')
    if path.exists():
        return path
    if name in listing.FETCHABLE:
        raise UnknownModelError(f'"{name}" is not here yet; get it with: engram-lab models get {name}')
    if name[0] in "./~\\" or name.count("/") > 1 or name.lower().endswith(".gguf"):
        raise UnknownModelError(f'There is no file or folder "{name}"; {_shipped_sentence()}')
    return _from_hub(name, trust_remote_code)


def _shipped_sentence() -> str:
    names = ", ".join(folder.name for folder in listing.shipped())
    return f"shipped models: {names or 'none in this installation'}."


def _from_hub(name: str, trust_remote_code: bool) -> Path:
    """The snapshot folder of a hub id: from the cache if it is complete there, else downloaded."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    for cached, folder in listing.cached():
        if cached == name and folder.joinpath("config.json").is_file():
            try:
                listing.weight_files(folder)
            except CheckpointError:
                continue
            return folder
    nowhere = f'"{name}" is neither a shipped model, nor a local folder, nor in the local Hugging Face cache'
    if constants.HF_HUB_OFFLINE:
        raise UnknownModelError(f"{nowhere}, and the hub is switched off (HF_HUB_OFFLINE); {_shipped_sentence()}")
    try:
        # Asked first by itself, because a download has no limit on how long it waits for an answer.
        HfApi().model_info(name, timeout=HUB_TIMEOUT)
        patterns = [*_HUB_FILES, "*.py"] if trust_remote_code else _HUB_FILES
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=_HUB_SKIP))
    except GatedRepoError as error:
        raise UnknownModelError(f'"{name}" is gated on the hub: accept its terms there and log in.') from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UnknownModelError(f"{nowhere}, nor on the hub; {_shipped_sentence()}") from error
    except Exception as error:  # every kind of network failure, whose classes differ between versions
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UnknownModelError(
            f"{nowhere}, and the hub cannot be reached ({reason}); {_shipped_sentence()}"
        ) from error


def choose_device(device: str | torch.device | None) -> torch.device:
    """The device asked for, or the best: CUDA, else CPU (MPS only if asked); LabError if it is not there."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise LabError(f'"{device}" is not a device: use cpu, cuda, cuda:1 or mps.') from error
    if chosen.type == "cuda":
        if (chosen.index or 0) >= torch.cuda.device_count():
            raise LabError(f'This machine has no device "{chosen}": it has {torch.cuda.device_count()} CUDA GPUs.')
    elif chosen.type == "mps":
        if not torch.backends.mps.is_available():
            raise LabError('This machine has no device "mps": use cpu.')
    elif chosen.type != "cpu":
        raise LabError(f'A model cannot run on the device "{chosen}": use cpu, cuda or mps.')
    return chosen


def choose_dtype(dtype: str | torch.dtype | None, device: torch.device, stored: torch.dtype | None) -> torch.dtype:
    """The dtype asked for; else float32, but bfloat16 on CUDA for a checkpoint stored in 16 bits."""
    if dtype is None:
        half = stored in (torch.bfloat16, torch.float16)
        return torch.bfloat16 if half and device.type == "cuda" else torch.float32
    chosen = _DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if chosen is None or chosen not in _DTYPES.values():
        raise LabError(f'"{dtype}" is not a dtype for a model: use {", ".join(_DTYPES)}.')
    return chosen


def load(path: Path, device: torch.device, dtype: str | torch.dtype | None, trust_remote_code: bool) -> Loaded:
    """Read the checkpoint at `path` (see resolve) onto `device`, in eval mode; else CheckpointError."""
    if (path / graft.FILE).is_file():
        return _load_grafted(path, device, dtype, trust_remote_code)
    with _quiet():
        if path.is_file():
            loaded = _load_gguf(path, device, dtype)
        else:
            loaded = _load_folder(path, device, dtype, trust_remote_code)
        try:
            loaded.model.eval().to(device)
        except torch.OutOfMemoryError as error:
            raise CheckpointError(
                f'{path.name} does not fit into the memory of {device}: use device="cpu" or dtype="bfloat16".'
            ) from error
    if getattr(loaded.model.config, "engram_layer_ids", None):
        check_memory(path, loaded.model, loaded.tokenizer)
    return loaded


def check_memory(path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse an Engram whose constants are not those of its configuration and tokenizer: it would read other rows.

    Raises CheckpointError or TokenizerMismatchError.
    """
    config: Any = model.config
    if not isinstance(model, EngramForCausalLM):
        raise CheckpointError(
            f'{path}/config.json has the keys of an Engram (engram_*) and the type "{config.model_type}", whose blocks '
            "this lab gives no memory: it opens engram_llama."
        )
    held = model.model.canonical_ids.cpu().numpy()
    mapped = held[: len(tokenizer)]
    size = int(held.max()) + 1
    if held.min() < 0 or size != config.engram_compressed_vocab_size:
        raise CheckpointError(
            f"{path}: its canonical_ids go from {held.min()} to {held.max()}, and config.json names "
            f"{config.engram_compressed_vocab_size} of them (engram_compressed_vocab_size)."
        )
    if config.engram_map_sha256:
        check_map(model, tokenizer)
    digest = str(config.engram_map_sha256 or map_sha256(canonical_map(tokenizer)))
    if map_sha256(mapped) != digest:
        raise TokenizerMismatchError(
            f"{path}: its canonical_ids are not the map of its tokenizer ({map_sha256(mapped)[:12]}, and it should be "
            f"{digest[:12]}), so the memory would read other rows than it was trained with."
        )


def _load_grafted(
    folder: Path, device: torch.device, dtype: str | torch.dtype | None, trust_remote_code: bool
) -> Loaded:
    """The base that graft.json of a folder names, with its memory; CheckpointError if it is not there or another."""
    spec = graft.load_graft(folder)
    beside = folder.resolve().parent / Path(spec.base).name
    try:
        base = resolve(spec.base, trust_remote_code)
    except UnknownModelError as error:
        if not beside.exists():
            raise CheckpointError(f"{folder} is a memory grafted onto a model that is not here. {error}") from error
        base = beside
    if (base / graft.FILE).is_file():
        raise CheckpointError(f"{folder / graft.FILE} names another graft, {base}, as its base: graft onto a model.")
    loaded = load(base, device, dtype, trust_remote_code)
    if loaded.fingerprint != spec.base_fingerprint:
        raise CheckpointError(
            f"{folder} was grafted onto {spec.base} with the fingerprint {spec.base_fingerprint}, but that model is "
            f"now {loaded.fingerprint}: graft the memory again."
        )
    graft.attach(loaded.model, loaded.tokenizer, spec)
    return Loaded(loaded.model, loaded.tokenizer, spec.fingerprint)


def _load_folder(
    folder: Path, device: torch.device, dtype: str | torch.dtype | None, trust_remote_code: bool
) -> Loaded:
    listing.check_adapter(folder)
    raw = listing.read_config(folder)
    config = architectures.build_config(folder, raw, trust_remote_code)
    method = architectures.quantisation(folder, raw)
    entries = weightfiles.read_headers(listing.weight_files(folder))
    if (deep := getattr(config.get_text_config(), "num_hidden_layers", None) or 0) > len(entries):
        raise CheckpointError(f"{folder}/config.json names {deep} layers, and the file holds {len(entries)} tensors.")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise CheckpointError(f"{folder} has no tokenizer: tokenizer.json is missing.")
    chosen = choose_dtype(dtype, device, weightfiles.stored_dtype(entries))
    digest = weightfiles.config_digest(raw)
    remote = architectures.class_of(config) is None  # code from the checkpoint itself
    options = {"dtype": chosen, "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        if remote or method is not None:
            weightfiles.hash_tensors(entries, digest)
            model, info = _from_pretrained(folder, trust_remote_code=trust_remote_code, use_safetensors=True, **options)
        else:
            model_class = architectures.class_of(config)
            if model_class.config_class is config.sub_configs.get("text_config"):
                config = config.get_text_config()  # as AutoModelForCausalLM does
            kept = architectures.kept_in_float32(model_class, config, entries) if chosen != torch.float32 else None
            tensors = weightfiles.read_tensors(entries, chosen, digest, kept)
            _check_tied(folder, config, tensors)
            model, info = model_class.from_pretrained(None, config=config, state_dict=tensors, **options)
            del tensors
    except LabError:
        raise
    except Exception as error:  # transformers raises everything from ImportError to KeyError here
        if method is not None:
            raise CheckpointError(
                f"{folder} is quantised with {method}, which cannot be run here ({first_line(error)}); "
                "use the unquantised checkpoint."
            ) from error
        raise CheckpointError(f"{folder} cannot be loaded: {first_line(error)}") from error
    _check_complete(folder, info, {name: entry.shape for name, entry in entries.items()})
    return Loaded(model, _load_tokenizer(folder, trust_remote_code), weightfiles.short(digest))


def _check_tied(folder: Path, config: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """CheckpointError where config.json ties head and embedding and the file holds two that differ."""
    heads = [name for name in tensors if name.rpartition(".")[0].endswith(("lm_head", "embed_out"))]
    if not getattr(config.get_text_config(), "tie_word_embeddings", False) or len(heads) != 1:
        return
    head = tensors[heads[0]]
    embeddings = [tensor for name, tensor in tensors.items() if "embed_" in name or name.endswith("wte.weight")]
    if embeddings and not any(torch.equal(head, embedding) for embedding in embeddings):
        raise CheckpointError(
            f"{folder}/config.json ties the head to the embedding (tie_word_embeddings), and the file holds a head of "
            f"its own, {heads[0]}: one of the two is wrong."
        )


def _from_pretrained(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **options)


# What old checkpoints hold beside weights, and every model computes itself: masks, angles, numbers of positions.
_COMPUTED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|masked_bias|position_ids)$")
_MASK = re.compile(r"(^|\.)(attn|attention)\.bias$")


def _check_complete(path: Path, info: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse what transformers only warns about: tensors left at random, or such that nothing uses."""
    if mismatched := sorted(info["mismatched_keys"]):
        name, in_file, in_model = mismatched[0]
        raise CheckpointError(
            f"{path}: {name} has the shape {list(in_file)} in the file and {list(in_model)} in config.json."
        )
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(f"{path} lacks {len(missing)} of the model's tensors, {missing[0]} for one.")
    unused = [name for name in sorted(info["unexpected_keys"]) if not _COMPUTED.search(name)]
    unused = [name for name in unused if not (_MASK.search(name) and len(shapes.get(name, ())) == 4)]
    if unused:
        raise CheckpointError(
            f"{path} holds {len(unused)} weights that config.json has no place for, {unused[0]} for one, so it would "
            "run without them: is it the configuration of this checkpoint?"
        )


def _load_tokenizer(folder: Path, trust_remote_code: bool = False, **options: Any) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True, **options
        )
    except Exception as error:  # as with the weights, of any class
        raise CheckpointError(f"The tokenizer of {folder} cannot be loaded: {first_line(error)}") from error


def _load_gguf(file: Path, device: torch.device, dtype: str | torch.dtype | None) -> Loaded:
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise CheckpointError(f"{file} is not a GGUF file: it does not begin with GGUF.")
    listing.check_adapter(file.parent)
    chosen = choose_dtype(dtype, device, torch.float32)
    with gguf_file.alone(file) as folder:
        try:
            model, info = _from_pretrained(folder, gguf_file=file.name, dtype=chosen, output_loading_info=True)
        except ImportError as error:
            raise CheckpointError(f"{file} is a GGUF file, and reading one needs the package gguf.") from error
        except Exception as error:  # from the reader: anything
            reason = first_line(error).replace(str(folder / file.name), "it")
            raise CheckpointError(f"{file} cannot be read as a GGUF model: {reason}") from error
        _check_complete(file, info, {})
        gguf_file.check(file, model)
        tokenizer = _load_tokenizer(folder, gguf_file=file.name)
    gguf_file.set_cut(file, tokenizer)
    return Loaded(model, tokenizer, weightfiles.file_fingerprint(file))


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back transformers' progress bars and reports; what matters in them is raised as an error."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
