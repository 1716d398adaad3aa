"""Names to models: each way in works, and each bad checkpoint ends in one sentence that says why."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from engram_lab.models import listing, loading
from engram_lab.models.engram import EngramConfig, EngramForCausalLM
from engram_lab.models.errors import CheckpointError, LabError, TokenizerMismatchError, UnknownModelError
from engram_lab.models.handle import Handle, open_model
from engram_lab.models.listing import list_models
from tests.models import tiny
from tests.models.gguf_file import write_llama

ROOT = Path(__file__).parents[2]
TEXT = "naïve 東京 👍🏽 the river"


@pytest.fixture(autouse=True)
def nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No hub, an empty cache, and no shipped models but those a test puts there."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(listing, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("ENGRAM_LAB_CACHE", str(tmp_path / "own"))
    yield


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def into_cache(folder: Path, cache: Path, name: str) -> None:
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("c0ffee")
    shutil.copytree(folder, repository / "snapshots" / "c0ffee")


@pytest.mark.parametrize("family", ["llama", "llama_tied", "gpt2", "gpt_neox", "gemma2", "qwen3"])
def test_a_folder_gives_what_was_saved(family: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny.make(family)
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    handle, original = open_model(str(tmp_path / "saved"), device="cpu"), Handle(model, tokenizer, "original")
    ids = handle.encode(TEXT)
    assert ids == original.encode(TEXT)
    assert torch.equal(handle.residuals([ids]).logits, original.residuals([ids]).logits)
    if family != "gpt_neox":  # saving renames its head
        assert handle.fingerprint == original.fingerprint
    assert not handle.model.training and handle.name == str(tmp_path / "saved")


def test_shards_and_16_bit_files(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny.make("llama").to(torch.bfloat16)
    for name, size in (("one", "1GB"), ("many", "40KB")):
        model.save_pretrained(tmp_path / name, max_shard_size=size)
        tokenizer.save_pretrained(tmp_path / name)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = (open_model(str(tmp_path / name), device="cpu") for name in ("one", "many"))
    assert one.fingerprint == many.fingerprint
    assert one.dtype == torch.float32  # whatever the file holds, on a CPU
    assert torch.equal(one.residuals([[1, 2]]).logits, many.residuals([[1, 2]]).logits)
    assert torch.equal(one.model.lm_head.weight, model.lm_head.weight.float())
    half = open_model(str(tmp_path / "one"), device="cpu", dtype="bfloat16")
    assert half.dtype == torch.bfloat16 and half.fingerprint == one.fingerprint
    assert loading.choose_dtype(None, torch.device("cuda"), torch.bfloat16) == torch.bfloat16
    assert loading.choose_dtype(None, torch.device("cuda"), torch.float32) == torch.float32
    next((tmp_path / "many").glob("*-00002-*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match="lacks the weight file model-00002"):
        open_model(str(tmp_path / "many"))


def test_shipped_cached_and_unknown_names(tmp_path: Path, checkpoint: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "shipped" / "tiny-mini")
    into_cache(checkpoint, tmp_path / "cache", "someone/tiny")
    into_cache(checkpoint, tmp_path / "cache", "someone/incomplete")
    next((tmp_path / "cache").glob("*incomplete/snapshots/*/model.safetensors")).unlink()
    listed = list_models()
    assert [(m.name, m.where, m.model_type) for m in listed] == [
        ("tiny-mini", "shipped", "llama"),
        ("someone/tiny", "cache", "llama"),
    ]
    assert listed[0].weight_bytes == (checkpoint / "model.safetensors").stat().st_size
    prints = {open_model(name).fingerprint for name in ("tiny-mini", "someone/tiny", str(checkpoint))}
    assert len(prints) == 1
    for name in ("engram-typo", "someone/else", "someone/incomplete"):
        with pytest.raises(UnknownModelError, match=r"HF_HUB_OFFLINE\); shipped models: tiny-mini\.") as error:
            open_model(name)
        assert f'"{name}" is neither' in str(error.value)
    for name in ("", "./nothing", str(tmp_path / "nothing"), "nothing.gguf"):
        with pytest.raises(UnknownModelError, match="shipped models: tiny-mini"):
            open_model(name)
    with pytest.raises(UnknownModelError, match=r"not \.gguf"):
        open_model(str(checkpoint / "config.json"))


def test_a_model_that_was_got_opens_by_name(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UnknownModelError, match=r"^\"smollm2-135m\" is not here yet; get it with: engram-lab models get sm"
    ):
        open_model("smollm2-135m")
    shutil.copytree(checkpoint, tmp_path / "own" / "models" / "smollm2-135m")
    assert [(m.name, m.where) for m in list_models()] == [("smollm2-135m", "cache")]
    assert open_model(" smollm2-135m ").name == "smollm2-135m"


@pytest.mark.parametrize(
    ("platform", "variables", "wanted"),
    [
        ("linux", {}, "~/.cache/engram-lab"),
        ("linux", {"XDG_CACHE_HOME": "/else"}, "/else/engram-lab"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "~/.cache/engram-lab"),
        ("darwin", {"XDG_CACHE_HOME": "/else"}, "~/Library/Caches/engram-lab"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/engram-lab"),
        ("win32", {}, "~/AppData/Local/engram-lab"),
        ("linux", {"ENGRAM_LAB_CACHE": "~/mine", "XDG_CACHE_HOME": "/else"}, "~/mine"),
    ],
)
def test_the_cache_folder_is_where_the_platform_keeps_such(
    platform: str, variables: dict[str, str], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ENGRAM_LAB_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("engram_lab.models.listing.sys.platform", platform)
    assert listing.cache_folder() == Path(wanted).expanduser()


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(loading, "HUB_TIMEOUT", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the connection and says nothing
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", endpoint)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
        start = time.monotonic()
        with pytest.raises(UnknownModelError, match="hub cannot be reached"):
            open_model("someone/else")
        assert time.monotonic() - start < 60, "it waits as long as the hub's own client does, for each of its tries"


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)


def empty_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x05\x00\x00")


def pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def add_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.memory.table.weight"] = torch.zeros(5, 4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def no_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


CODE = {"AutoConfig": "configuration_odd.OddConfig", "AutoModelForCausalLM": "modeling_odd.OddForCausalLM"}
SPOILED: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    (lambda folder: (folder / "config.json").write_text("{oops"), "config.json is not valid JSON"),
    (lambda folder: (folder / "config.json").write_text("[]"), "holds no JSON object"),
    (lambda folder: (folder / "model.safetensors").unlink(), "has no weights: model.safetensors is missing"),
    (no_tokenizer, "has no tokenizer: tokenizer.json is missing"),
    (lambda folder: (folder / "tokenizer.json").write_text("{}"), "The tokenizer of .* cannot be loaded"),
    (truncate, r"has \d+ bytes where its header says \d+"),
    (empty_header, "is not a safetensors file, or cut off in its header"),
    (lambda folder: (folder / "model.safetensors").write_bytes(b"no weights" * 99), "not a safetensors file"),
    (pickle_only, r"only as a pickle \(pytorch_model.bin\)"),
    (drop_tensor, r"lacks 1 of the model's tensors, model.layers.1.mlp.up_proj.weight"),
    (add_tensor, r"holds 1 weights that config.json has no place for, model.layers.1.memory.table.weight"),
    (
        lambda folder: edit_config(folder, model_type="nothing"),
        'the type "nothing", an architecture that this',
    ),
    (lambda folder: edit_config(folder, model_type="t5"), "not a causal language model"),
    (lambda folder: edit_config(folder, model_type="odd", auto_map=CODE), "trust_remote_code=True"),
    (
        lambda folder: edit_config(folder, intermediate_size=80),
        r"shape \[\d+, \d+\] in the file and \[\d+, \d",
    ),
    (lambda folder: edit_config(folder, num_hidden_layers=4), r"lacks 9 of the model's tensors"),
    (lambda folder: edit_config(folder, num_hidden_layers=2), r"no place for, model.layers.2"),
    (
        lambda folder: edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4}),
        "is quantised with gptq, which cannot be run here .*use the unquantised checkpoint",
    ),
    (
        lambda folder: edit_config(folder, quantization_config={"quant_method": "magic"}),
        "is quantised with magic",
    ),
]


@pytest.mark.parametrize(("spoil", "sentence"), SPOILED, ids=[sentence[:24] for _, sentence in SPOILED])
def test_a_spoiled_folder(spoil: Callable[[Path], object], sentence: str, checkpoint: Path, capfd: Any) -> None:
    spoil(checkpoint)
    with pytest.raises(CheckpointError, match=sentence) as error:
        open_model(str(checkpoint))
    said = str(error.value)
    assert "\n" not in said and str(checkpoint) in said and len(said) < 600
    assert capfd.readouterr().out == ""


def test_code_from_a_checkpoint_runs_only_when_asked(checkpoint: Path) -> None:
    (checkpoint / "configuration_odd.py").write_text(
        "from transformers import LlamaConfig\nclass OddConfig(LlamaConfig):\n    model_type = 'odd'\n"
    )
    (checkpoint / "modeling_odd.py").write_text(
        "from transformers import LlamaForCausalLM\nfrom .configuration_odd import OddConfig\n"
        "class OddForCausalLM(LlamaForCausalLM):\n    config_class = OddConfig\n"
    )
    plain = open_model(str(checkpoint)).residuals([[1, 2, 3]]).logits
    edit_config(checkpoint, model_type="odd", auto_map=CODE)
    handle = open_model(str(checkpoint), trust_remote_code=True)
    assert type(handle.model).__name__ == "OddForCausalLM"
    assert torch.equal(handle.residuals([[1, 2, 3]]).logits, plain)


def test_an_engram_needs_its_own_tokenizer(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    shape: dict[str, Any] = tiny.SMALL_LLAMA | {"vocab_size": len(tokenizer)}
    config = EngramConfig(**shape, engram_layer_ids=[1], engram_vocab_size=50, engram_n_heads=2)
    canonical = config.set_tokenizer(tokenizer)
    model = EngramForCausalLM(config).eval()
    model.model.canonical_ids.copy_(torch.from_numpy(canonical))
    model.save_pretrained(tmp_path / "engram")
    tokenizer.save_pretrained(tmp_path / "engram")
    handle, original = open_model(str(tmp_path / "engram")), Handle(model, tokenizer, "original")
    assert handle.engram_layers == (1,) and handle.fingerprint == original.fingerprint
    ids = [handle.encode(TEXT)]
    assert torch.equal(handle.residuals(ids).logits, original.residuals(ids).logits)
    tiny.sentencepiece(prefix=False).save_pretrained(tmp_path / "engram")
    with pytest.raises(TokenizerMismatchError):
        open_model(str(tmp_path / "engram"))


def test_gguf(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny.make("llama")
    file = tmp_path / "tiny.gguf"
    write_llama(file, model, tokenizer)
    handle, original = open_model(str(file)), Handle(model, tokenizer, "original")
    ids = handle.encode(TEXT)
    assert ids == original.encode(TEXT) and handle.lossless(TEXT, ids)
    got = handle.residuals([ids]).logits
    assert torch.allclose(got, original.residuals([ids]).logits, atol=1e-6)
    assert handle.fingerprint == open_model(str(file), dtype="bfloat16").fingerprint
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="cannot be read as a GGUF model"):
        open_model(str(file))
    file.write_bytes(b"ggml" + content)
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        open_model(str(file))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"device": "gpu"}, '"gpu" is not a device'),
        ({"device": "cuda:99"}, 'no device "cuda:99"'),
        ({"device": "meta"}, "cannot run on the device"),
        ({"dtype": "int8"}, '"int8" is not a dtype for a model: use float32, bfloat16, float16'),
        ({"dtype": torch.int64}, "is not a dtype"),
    ],
)
def test_nonsense_is_refused_before_anything_is_read(options: Any, sentence: str) -> None:
    with pytest.raises(LabError, match=sentence):
        open_model("not even looked for", **options)


def test_a_file_saved_over_a_loaded_one_does_not_change_the_model(checkpoint: Path) -> None:
    handle = open_model(str(checkpoint))
    before = handle.residuals([[1, 2, 3]]).logits
    content = (checkpoint / "model.safetensors").read_bytes()
    with (checkpoint / "model.safetensors").open("r+b") as stream:  # in place, as a trainer may
        stream.write(content[:2000] + bytes(len(content) - 2000))
    assert torch.equal(handle.residuals([[1, 2, 3]]).logits, before)


# Not ru_maxrss, which a child process inherits from its parent.
MEMORY = """
import sys
from engram_lab.models.handle import open_model
small, large = sys.argv[1:]
def peak():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["VmHWM"].split()[0]) * 1024
open_model(small, device="cpu").close()
before = peak()
handle = open_model(large, device="cpu")
weights = sum(p.numel() * p.element_size() for p in handle.model.parameters())
print((peak() - before) / weights, handle.dtype)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_little_more_than_the_weights(checkpoint: Path, tokenizer: Any, tmp_path: Path) -> None:
    config = LlamaConfig(vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=6)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "large")  # float32 in memory
    tokenizer.save_pretrained(tmp_path / "large")
    (tmp_path / "peak.py").write_text(MEMORY)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "peak.py"), str(checkpoint), str(tmp_path / "large")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    ratio, dtype = done.stdout.split()
    assert dtype == "torch.float32" and 0.8 < float(ratio) < 1.2, done
