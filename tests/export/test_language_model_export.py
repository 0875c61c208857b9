"""Export of language models: what a bundle holds, how it generates, what gate and check find."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from lm_bundle_helpers import (
    NEW_TOKENS,
    PROMPT_TOKENS,
    STEP,
    edit_manifest,
    error_line,
    make_run,
)

from msrl_accel.consistency import language_model
from msrl_accel.consistency.cli import main as check
from msrl_accel.errors import BundleError, ConfigError, ExportError, LMError
from msrl_accel.export import language_model as export_module
from msrl_accel.export.bundle import Bundle
from msrl_accel.export.cli import main as export
from msrl_accel.export.language_model import export_language_model
from msrl_accel.export.lm_bundle import LanguageModelBundle
from msrl_accel.lm.weights import load_model
from msrl_accel.networks import set_parameter
from msrl_accel.run import Run, policy_arrays
from msrl_accel.runtime.language_model import load_language_model

GRAPH = f"generate_2x{PROMPT_TOKENS}.mindir"
PROMPTS = ["12+3=", "7+8=", "1+1=", "90+4=", "5="]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    return make_run(tmp_path_factory.mktemp("exported") / "run")


@pytest.fixture(scope="module")
def bundle(run) -> Path:
    assert export([str(run.path), "--batch", "2"]) == 0
    return run.path / "bundle"


@pytest.fixture
def copied(bundle, tmp_path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "bundle"))


def test_the_folder_is_a_model_folder_and_says_how_to_generate(run, bundle):
    files = {path.name for path in bundle.iterdir()}
    model = {"config.json", "generation_config.json", "model.safetensors"}
    tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    assert files == {*model, *tokenizer, GRAPH, "reference.npz", "manifest.json"}
    _, arrays = load_model(bundle)
    trained = policy_arrays(run.checkpoints.load("last"))
    assert arrays.keys() == trained.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, trained[name])

    opened = LanguageModelBundle.open(bundle)
    manifest = opened.manifest
    assert opened.passed
    assert manifest["weights"]["version"] == STEP
    assert manifest["graphs"] == [{"file": GRAPH, "rows": 2, "prompt_tokens": PROMPT_TOKENS}]
    assert manifest["max_new_tokens"] == NEW_TOKENS
    assert manifest["stop_ids"] == [1]
    assert manifest["sampling"] == {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    assert manifest["prompt"] == {"style": "plain", "system_prompt": None}
    assert manifest["config"]["env"] == "text/addition"
    result = manifest["parity"]["results"][GRAPH]
    assert result["passed"] and result["different_tokens"] == 0
    assert result["training"]["max"] < 1e-4
    assert "argmax of logits / temperature + noise" in manifest["noise"]["how"]


def test_text_is_completed_as_the_trained_model_does(run, bundle):
    exported, trained = load_language_model(bundle), run.language_model()
    assert exported.complete(PROMPTS) == trained.complete(PROMPTS)
    # The noise of a batch belongs to its shape, which here is that of training.
    answers = exported.complete(PROMPTS[:1], samples=2, seed=5)
    assert answers == trained.complete(PROMPTS[:1], samples=2, seed=5)
    assert answers != exported.complete(PROMPTS[:1], samples=2, seed=6)
    assert exported.complete(PROMPTS[:1], samples=3, seed=1) == exported.complete(
        PROMPTS[:1], samples=3, seed=1
    )


def test_token_ids_are_completed_with_log_probs_and_stop_reasons(run, bundle):
    exported, trained = load_language_model(bundle), run.language_model()
    prompts = [exported.encoder.prompt(problem) for problem in _problems(PROMPTS)]
    for limit in (1, NEW_TOKENS):
        found, expected = (
            model.generator.generate(
                prompts[:2], rng=np.random.default_rng(4), max_new_tokens=limit, temperature=0.7
            )
            for model in (exported, trained)
        )
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-5)
        assert found.stop.tolist() == expected.stop.tolist()
        assert found.version == STEP
    with pytest.raises(LMError, match=r"prompt 0 has 13 tokens; it must have 1 to 12"):
        exported.complete(["1234567890123"])
    with pytest.raises(LMError, match=r"samples with top_k = 0 and top_p = 1"):
        exported.complete(PROMPTS, top_k=3, seed=0)


def _problems(texts):
    from msrl_accel.envs.text import Problem

    return [Problem(text, "") for text in texts]


def test_the_graph_alone_replays_the_reference(bundle):
    """As somebody would who has MindSpore, the manifest and the files, but not this package."""
    import mindspore as ms

    manifest = json.loads((bundle / "manifest.json").read_text())
    cell = ms.nn.GraphCell(ms.load(str(bundle / GRAPH)))
    with np.load(bundle / "reference.npz") as arrays:
        inputs = {entry["name"]: arrays[f"{GRAPH}/{entry['name']}"] for entry in manifest["inputs"]}
        expected = {call: arrays[f"{GRAPH}/{call}/tokens"] for call in ("sampled", "greedy")}
    for entry in manifest["inputs"]:
        assert inputs[entry["name"]].dtype == entry["dtype"]
        assert inputs[entry["name"]].ndim == len(entry["shape"])
    for call, tokens in expected.items():
        if call == "greedy":
            inputs["noise_table"] = np.zeros_like(inputs["noise_table"])
        found = dict(zip(("tokens", "log_probs", "kept"), cell(*map(ms.Tensor, inputs.values()))))
        np.testing.assert_array_equal(found["tokens"].asnumpy().T, tokens)
    assert tokens.shape == (2, NEW_TOKENS)


def test_the_check_agrees_and_catches_its_controls(run, bundle, capsys):
    assert check([str(bundle), "--run", str(run.path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert report["results"].keys() == {"reference.npz", GRAPH}
    for result in report["results"].values():
        assert result["passed"] and result["tokens"] > 0 and result["different_tokens"] == 0
    matrix = "model.layers.0.mlp.down_proj.weight + 0.0001"
    assert report["controls"].keys() == {"positions off by one", matrix}
    for control in report["controls"].values():
        assert control["caught"]
        # Not just another graph than the training Cell: another than training computes.
        assert control["training"]["max"] > 1e-4


def test_the_gate_refuses_a_graph_with_a_changed_matrix(run, tmp_path, monkeypatch, capsys):
    write, compare = export_module.export_cell, language_model.compare_graphs
    written, found = tmp_path / "written.mindir", {}

    def damaged(cell, inputs, target):
        weight = cell.model.weights[3]
        original = weight.asnumpy().copy()
        set_parameter(weight, original + 1e-4)
        write(cell, inputs, target)
        set_parameter(weight, original)
        shutil.copy(target, written)

    def compared(*args):
        found.update(compare(*args))
        return found

    monkeypatch.setattr(export_module, "export_cell", damaged)
    monkeypatch.setattr(language_model, "compare_graphs", compared)
    target = tmp_path / "bundle"
    command = [str(run.path), "--batch", "2", "--out", str(target)]
    assert export(command) == 1
    line = error_line(capsys)
    assert "does not generate as the trained model does" in line
    assert "the graph holds other weights than training: 1 differ, most model.layers.0" in line
    assert not target.exists()

    # The same graph and findings again, to be accepted.
    monkeypatch.setattr(export_module, "export_cell", lambda *args: shutil.copy(written, args[2]))
    monkeypatch.setattr(language_model, "compare_graphs", lambda *args: found)
    assert export([*command, "--no-gate"]) == 1
    assert not LanguageModelBundle.open(target).passed
    assert "differ" in capsys.readouterr().out
    with pytest.warns(UserWarning, match="did not pass its parity check"):
        load_language_model(target)


def damage_byte(folder):
    data = bytearray((folder / GRAPH).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / GRAPH).write_bytes(data)


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def outside(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    files = {**manifest["files"], "../x": manifest["files"][GRAPH]}
    edit_manifest(folder, files=files)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_byte, f"{GRAPH} was changed (its SHA-256 differs)"),
        (cut, "model.safetensors has "),
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json cannot be read"),
        (lambda f: (f / "manifest.json").write_text("{"), "manifest.json is damaged"),
        (lambda f: (f / "manifest.json").unlink(), "is no bundle"),
        (lambda f: edit_manifest(f, kind="model"), "is no manifest of a bundle"),
        (lambda f: edit_manifest(f, schema=9), "has schema 9"),
        (lambda f: edit_manifest(f, graphs=[]), "graphs = [] cannot be"),
        (lambda f: edit_manifest(f, graphs=[{"file": GRAPH, "rows": 0}]), "graphs = {'file'"),
        (lambda f: edit_manifest(f, stop_ids=["a"]), "stop_ids = ['a'] cannot be"),
        (lambda f: edit_manifest(f, stop_ids=[2]), "stop_ids = [2] in the manifest, [1] in"),
        (lambda f: edit_manifest(f, sampling={}), "sampling = {} cannot be"),
        (lambda f: edit_manifest(f, prompt={}), "prompt = {} cannot be"),
        (lambda f: edit_manifest(f, weights={}), "weights = {} cannot be"),
        (outside, "which is not inside the bundle"),
    ],
)
def test_a_damaged_bundle_is_one_clear_error(damage, message, copied):
    damage(copied)
    with pytest.raises(BundleError) as caught:
        load_language_model(copied)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_weights_replaced_together_with_their_digest_are_found(copied, capsys):
    from msrl_accel.export.manifest import file_entry
    from msrl_accel.lm.safetensors_io import write_safetensors

    _, arrays = load_model(copied)
    changed = {name: array + np.float32(0.01) for name, array in arrays.items()}
    (copied / "model.safetensors").unlink()
    write_safetensors(copied / "model.safetensors", changed, "float32")
    files = json.loads((copied / "manifest.json").read_text())["files"]
    files["model.safetensors"] = file_entry(copied / "model.safetensors")
    edit_manifest(copied, files=files)
    assert check([str(copied)]) == 2
    assert "has other weights than the manifest" in error_line(capsys)


def test_bundles_of_policies_and_language_models_are_told_apart(copied, capsys):
    with pytest.raises(BundleError, match=r"is the bundle of a language model: open it with"):
        Bundle.open(copied)
    edit_manifest(copied, kind="msrl_accel policy bundle")
    with pytest.raises(BundleError, match=r"is the bundle of a policy: open it with"):
        LanguageModelBundle.open(copied)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "already holds a bundle: replace it with --force"),
        (["--force", "--formats", "onnx"], "--formats: language models are exported as MindIR"),
        (["--force", "--precision", "fp16"], "--precision: language models are exported"),
        (["--force", "--batch", "0"], "rows = 0"),
        (["--force", "--batch", "x"], "--batch"),
        (["--force", "--prompt-tokens", "30"], "prompts have 1 to 26 tokens"),
        (["--force", "--max-new-tokens", "32"], "the model's 32 positions must hold a prompt"),
        (["--force", "--checkpoint", "5"], "5"),
    ],
)
def test_what_cannot_be_exported_is_refused(more, message, run, bundle, capsys):
    assert export([str(run.path), *more]) == 2
    assert message in error_line(capsys)
    assert LanguageModelBundle.open(bundle).passed


@pytest.mark.parametrize(
    "more", [["--episodes", "3"], ["--precision", "fp16"], ["--plot", "x.png"]]
)
def test_the_check_refuses_options_of_policies(more, bundle, capsys):
    assert check([str(bundle), *more]) == 2
    assert f"{more[0]}: {bundle} holds a language model" in error_line(capsys)


def test_a_model_too_large_for_a_file_is_refused(run, tmp_path, monkeypatch):
    monkeypatch.setattr(export_module, "LARGEST", 1000)
    with pytest.raises(ExportError, match="use fewer rows or shorter prompts"):
        export_language_model(run, tmp_path / "bundle", rows=[1])
    assert not (tmp_path / "bundle").exists()


def test_options_of_language_models_are_refused_for_policies(tmp_path, capsys):
    from msrl_accel.config import resolve_config

    overrides = {"run_dir": str(tmp_path / "run")}
    Run.create(resolve_config("ppo", "CartPole-v1", tuned=False, overrides=overrides))
    assert export([str(tmp_path / "run"), "--batch", "4"]) == 2
    assert "--batch: the run trained a policy" in error_line(capsys)
    with pytest.raises(ConfigError):
        export_language_model(tmp_path / "run", rows=[1])
