"""The YAML file of a sweep: the requests of its grid, and its one sentence for a bad one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engram_lab.lab.command import sweep as sweep_command
from engram_lab.lab.command.main import build_parser
from engram_lab.lab.fronts import FRONTS, front
from engram_lab.lab.sweep import grid
from engram_lab.probes.gates import GatesConfig
from engram_lab.probes.lens import LensConfig
from tests.lab.sweep.test_sweep import Capture, run, written


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/store.db"


def test_a_list_is_an_axis_and_the_last_varies_fastest(tmp_path: Path) -> None:
    text = """
        probe: lens
        name: of two
        note: "*why*"
        tags: [a, b]
        out: table.csv
        options:
          model: [one, two]
          prompt: ["a", "b"]
          target: [null, " the"]
          top-k: 3
          tuned: true
          trust-remote-code: false
    """
    found = grid.read(written(tmp_path, text))
    assert (found.probe, found.name, found.note, found.tags) == ("lens", "of two", "*why*", ("a", "b"))
    assert found.out == tmp_path / "table.csv" and found.axes == ("model", "prompt", "target")
    assert [cell.config for cell in found.cells] == [
        LensConfig((model,), (prompt,), target, 3, tuned=True)
        for model in ("one", "two")
        for prompt in ("a", "b")
        for target in (None, " the")
    ]
    assert found.cells[5].values["model"] == "two" and found.cells[5].values["target"] == " the"
    assert {own for cell in found.cells for own in cell.models} == {
        grid.ModelKey(name, None, None, False) for name in ("one", "two")
    }
    plain = grid.read(written(tmp_path, "{probe: lens, options: {model: [one], prompt: a}}"))
    assert plain.name == "grid" and plain.axes == () and plain.note is plain.tags is plain.out is None
    assert [cell.config for cell in plain.cells] == [LensConfig(("one",), ("a",))]


def test_a_list_inside_the_list_is_one_value_of_several(tmp_path: Path) -> None:
    text = """
        probe: gates
        options: {model: m, prompt: [["a", "b"], "c"], control: [["off"], ["off", "zeroed"]], knock-out: [false, true]}
    """
    found = grid.read(written(tmp_path, text))
    assert [cell.config for cell in found.cells] == [
        GatesConfig(models=("m",), prompts=prompts, controls=controls, knock_out=knock_out)
        for prompts in (("a", "b"), ("c",))
        for controls in (("off",), ("off", "zeroed"))
        for knock_out in (False, True)
    ]
    found = grid.read(written(tmp_path, "{probe: kv swap, options: {model: m, layers: [[0, 2], 1], last: [[], 4]}}"))
    got = [(cell.config.layers, cell.config.last) for cell in found.cells]
    assert got == [((0, 2), ()), ((0, 2), (4,)), ((1,), ()), ((1,), (4,))]


def test_the_short_keys_are_the_axes_of_models_and_prompts(tmp_path: Path) -> None:
    short = grid.read(written(tmp_path, "{probe: lens, prompts: [a, b], models: [one, two], options: {top-k: 2}}"))
    long = grid.read(written(tmp_path, "{probe: lens, options: {model: [one, two], prompt: [a, b], top-k: 2}}"))
    assert short == long


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "there"
    (folder / "models" / "mine").mkdir(parents=True)
    (folder / "set.txt").write_text("one\ntwo\n", encoding="utf-8")
    file = written(folder, "{probe: lens, options: {model: [models/mine, a/hub-id, engram-mini], prompts: set.txt}}")
    for place in (tmp_path, folder):
        monkeypatch.chdir(place)
        found = grid.read(file.relative_to(place))
        assert [cell.config.models[0] for cell in found.cells] == [
            str(folder / "models" / "mine"), "a/hub-id", "engram-mini",
        ]  # fmt: skip
        assert found.cells[0].config.prompts == ("one", "two") and not found.cells[0].config.detail
    file = written(folder, "{probe: sensitivity, options: {model: m, set: mine=set.txt}}")
    assert [item.text for item in grid.read(file).cells[0].config.sets[0].items] == ["one", "two"]


LEAST: dict[str, dict[str, Any]] = {
    "lens": {"prompt": "a"},
    "cka": {"against": "n", "max-sentences": 3},
    "gates": {"prompt": "a", "target": " the"},
    "rows": {"prompt": "a", "position": -1},
    "kv compose": {"answers": [[" yes", " no"]], "time": True},
    "facts check": {"fact": [["The key is => red", "The door is => blue"]]},
    "facts alternatives": {"rank": [[4, 8]], "lora-rate": 0.001},
}


@pytest.mark.parametrize("probe", FRONTS)
def test_every_probe_is_asked_as_on_the_command_line(probe: str, tmp_path: Path) -> None:
    given = {"model": "m", "device": "cpu", "dtype": "bfloat16"} | LEAST.get(probe, {})
    words = ["probe", *probe.split()]
    for name, value in given.items():
        several = value[0] if isinstance(value, list) else [value]
        if name == "answers":
            words += [f"--{name}", *several]
        elif value is True:
            words.append(f"--{name}")
        else:
            words += [f"--{name}={item}" for item in several]
    (cell,) = grid.read(written(tmp_path, {"probe": probe, "options": given})).cells
    args = build_parser().parse_args(words)
    assert cell.config == front(probe).ASK.config(args)
    assert cell.models == tuple(grid.ModelKey(name, "cpu", "bfloat16", False) for name in cell.config.models)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "needs the keys probe and options"),
        ("[1]", "needs the keys probe and options"),
        ("probe: [", "no YAML in line 1"),
        ("probe: lens\nprobe: cka", "no YAML in line 2 (probe is given twice)"),
        ("{probe: lens, probs: 1}", 'the key "probs"'),
        ("{options: {}}", "names no probe"),
        ("{probe: lense}", 'the probe "lense"'),
        ("{probe: lens, name: 3}", "a name that is no text"),
        ("{probe: lens, tags: one}", "tags: [one, two]"),
        ("{probe: lens, options: [1]}", "no mapping"),
        ("{probe: lens, models: one}", "models that are no list"),
        ("{probe: lens, models: [one], options: {model: two}}", "both models and the option model"),
        ("{probe: lens, options: {model: m, promt: a}}", "did you mean prompt"),
        ("{probe: lens, options: {model: m, json: a}}", 'the option "json"'),
        ("{probe: lens, options: {model: m, help: true}}", 'the option "help"'),
        ("{probe: lens, options: {model: m, prompt: []}}", "the empty list prompt"),
        ("{probe: lens, options: {model: m, prompt: [a, b, a]}}", '"a" twice in the list prompt'),
        ("{probe: lens, options: {model: m}}", "--prompt"),
        ("{probe: lens, options: {prompt: a}}", "--model"),
        ("{probe: lens, options: {model: [m, n], prompt: a, top-k: [2, many]}}", "cell 2 of 4 (model m, top-k many)"),
        ("{probe: lens, options: {model: m, prompt: a, top-k: [2, 0]}}", "cell 2 of 2 (top-k 0): top_k is 0"),
        ("{probe: lens, options: {model: m, prompt: a, prompts: b}}", "not allowed with"),
        ("{probe: lens, options: {model: m, prompts: [nowhere.txt]}}", "nowhere.txt"),
        ("{probe: lens, options: {model: m, prompt: 1.50}}", 'prompt is 1.5, which YAML does not read as text'),
        ("{probe: gates, options: {model: m, prompt: a, control: off}}", "control is False"),
        ("{probe: lens, options: {model: m, prompt: a, tuned: 1}}", "tuned is a switch"),
        ("{probe: lens, options: {model: m, prompt: a, top-k: true}}", "top-k is True"),
        ("{probe: lens, options: {model: m, prompt: a, top-k: [[1, 2]]}}", "top-k takes one value"),
        ("{probe: lens, options: {model: m, prompt: a, top-k: {a: 1}}}", "no single value"),
        ("{probe: kv swap, options: {model: m, part: q}}", "--part"),
        (f"{{probe: lens, options: {{model: m, prompt: a, seed: {[*range(101)]}, top-k: {[*range(100)]}}}}}",
         "10100 cells, more than 10000"),
    ],
)  # fmt: skip
def test_a_bad_file_is_one_sentence_and_costs_nothing(
    text: str, words: str, tmp_path: Path, store: str, capsys: Capture
) -> None:
    file = written(tmp_path, text)
    assert run(file, store) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and err.startswith(str(file)) and err.count("\n") == 1 and err.endswith(".\n"), (
        err
    )
    assert not (tmp_path / "store.db").exists()


def test_what_the_help_shows_is_a_sweep(tmp_path: Path) -> None:
    lines = sweep_command.EXAMPLE.splitlines()
    example = "\n".join(line for line in lines if line.startswith("  "))
    assert len(grid.read(written(tmp_path, example)).cells) == 8
