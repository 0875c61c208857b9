"""Bundles as read from a disk: what is refused, and what they say of themselves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from bundle_helpers import VERSION, edit_manifest, shared_bundle

from msrl_accel.errors import BundleError, ExportError
from msrl_accel.export.bundle import MANIFEST, REFERENCE, Bundle, staged


@pytest.fixture
def folder(graph_mode, tmp_path):
    copy = tmp_path / "bundle"
    shutil.copytree(shared_bundle(), copy)
    return copy


def refuse(folder, *words):
    with pytest.raises(BundleError) as caught:
        Bundle.open(folder)
    for word in words:
        assert word in str(caught.value)


def test_a_copied_bundle_opens_and_names_its_files(folder):
    bundle = Bundle.open(folder)
    assert bundle.passed and bundle.complete
    assert bundle.version == VERSION
    assert bundle.file("onnx") == folder / "policy.onnx"
    assert bundle.file("mindir") == folder / "policy.mindir"
    assert bundle.file("om") is None
    assert bundle.output_names == ("action", "log_prob", "value", "raw_action", "logits")
    assert bundle.spec.action.starts == (2,)


def test_the_manifest_describes_the_policy_and_how_to_call_it(folder):
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["schema"] == 1
    assert manifest["recurrent_state"] is None
    assert manifest["noise"]["law"] == "gumbel"
    assert "-log(-log(u))" in manifest["noise"]["how"]
    assert "zeros" in manifest["deterministic"]
    assert manifest["seed"] == 7
    assert manifest["config"]["policy"]["hidden_sizes"] == [16, 16]
    assert {"msrl_accel", "mindspore", "numpy", "python"} <= set(manifest["versions"])
    assert manifest["inputs"][0] == {
        "name": "observation",
        "shape": ["batch", 3],
        "dtype": "float32",
    }
    results = manifest["parity"]["results"]
    assert results["mindir"]["outputs"]["value"] == {"max_abs": 0.0, "bit_equal": True}
    for name, entry in manifest["files"].items():
        assert entry["size"] == (folder / name).stat().st_size


def test_normalisation_and_its_digest_are_in_the_manifest(graph_mode):
    plain, normalised = (
        Bundle.open(shared_bundle(kind)).manifest["normalization"]
        for kind in ("discrete", "normalized_box")
    )
    assert plain is None
    assert normalised["in_graph"] is True and normalised["clip"] == 10.0
    assert len(normalised["sha256"]) == 64


def test_the_reference_holds_the_bounds_zero_and_what_the_noise_rule_gives(folder):
    arrays = Bundle.open(folder).reference()
    assert len(arrays["noise"]) == 64
    assert (arrays["observation/observation"][0] == 0).all()
    for mode, noise in (("deterministic", 0.0), ("sampled", arrays["noise"])):
        choice = (arrays[f"{mode}/logits"] + noise).argmax(axis=1)
        np.testing.assert_array_equal(arrays[f"{mode}/action"], choice + 2)
    assert (arrays["deterministic/action"] != arrays["sampled/action"]).any()


@pytest.mark.parametrize("name", ["policy.onnx", "policy.mindir", REFERENCE])
def test_a_changed_byte_is_found(folder, name):
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).chmod(0o644)
    (folder / name).write_bytes(data)
    refuse(folder, name, "changed")


def test_a_truncated_model_is_found_even_without_digests(folder):
    file = folder / "policy.onnx"
    file.write_bytes(file.read_bytes()[:-100])
    refuse(folder, "policy.onnx", "instead of")
    with pytest.raises(BundleError, match="instead of"):
        Bundle.open(folder, verify=False)


def test_a_missing_file_is_named(folder):
    (folder / "policy.onnx").unlink()
    refuse(folder, "policy.onnx", "No such file")


def test_a_newer_schema_asks_for_an_upgrade(folder):
    edit_manifest(folder, lambda m: m.update(schema=2))
    refuse(folder, "schema 2", "upgrade")


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/hostname", "..", ".", "", "a/b", "a\\b", "C:policy"]
)
def test_no_path_leaves_the_folder(folder, name):
    (folder.parent / "secret").write_text("x")

    def edit(manifest):
        manifest["files"][name] = manifest["files"]["policy.onnx"]
        manifest["models"]["onnx"] = name

    edit_manifest(folder, edit)
    refuse(folder, "not inside the bundle")


def test_no_link_leaves_the_folder(folder):
    outside = folder.parent / "outside.onnx"
    os.rename(folder / "policy.onnx", outside)
    os.symlink(outside, folder / "policy.onnx")
    refuse(folder, "policy.onnx", "outside the bundle")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "NaN", "[" * 100_000, '{"kind": 1}'])
def test_a_damaged_manifest_is_one_error(folder, text):
    (folder / MANIFEST).write_text(text)
    refuse(folder, MANIFEST)


def test_every_field_is_needed(folder):
    manifest = json.loads((folder / MANIFEST).read_text())
    for field in set(manifest) - {"om"}:
        broken = {k: v for k, v in manifest.items() if k != field}
        (folder / MANIFEST).write_text(json.dumps(broken))
        refuse(folder, MANIFEST)
        (folder / MANIFEST).write_text(json.dumps({**manifest, field: 1.5}))
        refuse(folder, MANIFEST)


@pytest.mark.parametrize("field", ["observations", "action"])
def test_a_description_that_makes_no_sense_is_refused(folder, field):
    edit_manifest(folder, lambda m: m["spec"].update({field: []}))
    refuse(folder, "spec")


def test_a_model_has_to_be_a_listed_file(folder):
    edit_manifest(folder, lambda m: m["models"].update(onnx="other.onnx"))
    refuse(folder, "models.onnx")


def test_a_reference_of_other_arrays_is_refused(folder):
    edit_manifest(folder, lambda m: m["reference"]["arrays"].pop("noise"))
    with pytest.raises(BundleError, match="manifest lists"):
        Bundle.open(folder).reference()


def test_a_reference_with_pickled_objects_is_not_read(folder):
    np.savez(folder / REFERENCE, noise=np.array([{}], object))
    whole = Bundle.open(shared_bundle())
    with pytest.raises(BundleError, match=REFERENCE):
        Bundle(folder, whole.manifest, whole.spec).reference()


def test_a_folder_without_manifest_is_no_bundle(tmp_path):
    refuse(tmp_path, "no bundle", "msrl-export")
    refuse(tmp_path / "missing", "no bundle")


def test_an_unknown_format_is_refused(folder):
    with pytest.raises(BundleError, match="mindir, onnx, lite, om"):
        Bundle.open(folder).file("tflite")


def test_nothing_appears_under_the_name_before_the_end(tmp_path):
    target = tmp_path / "bundle"
    with staged(target, force=False) as staging:
        (staging / "a").write_text("x")
        assert not target.exists()
    assert (target / "a").read_text() == "x"
    assert os.listdir(tmp_path) == ["bundle"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_nothing(tmp_path, error):
    expected = ExportError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected), staged(tmp_path / "bundle", force=False) as staging:
        (staging / MANIFEST).write_text("{}")
        raise error
    assert os.listdir(tmp_path) == []


def test_a_failure_keeps_the_bundle_that_was_there(folder):
    before = (folder / MANIFEST).read_bytes()
    with pytest.raises(ExportError), staged(folder, force=True):
        raise OSError(28, "No space left on device")
    assert (folder / MANIFEST).read_bytes() == before
    assert Bundle.open(folder).passed


STAGE = """
import sys
from pathlib import Path
from msrl_accel.export.bundle import staged
with staged(Path(sys.argv[1]), force=True) as staging:
    (staging / 'policy.onnx').write_text('x')
    print('staged', flush=True)
    sys.stdin.read()
"""


def hidden(folder):
    return sorted(name for name in os.listdir(folder) if name.startswith("."))


def test_what_a_killed_export_leaves_is_removed_by_the_next_one(tmp_path):
    target, others = tmp_path / "bundle", [".bundle.notes.tmp", ".other.0123abcd.tmp"]
    for name in others:
        (tmp_path / name).mkdir()
    command = [sys.executable, "-c", STAGE, str(target)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as export:
        assert export.stdout.readline() == "staged\n"
        with staged(target, force=True) as staging:
            (staging / "first").write_text("x")
        assert len(hidden(tmp_path)) == 3  # one that is at work is left alone
        export.kill()
    assert export.returncode == -signal.SIGKILL
    assert os.listdir(target) == ["first"]
    shutil.rmtree(target)
    with staged(target, force=False) as staging:
        (staging / "second").write_text("x")
    assert os.listdir(target) == ["second"]
    assert hidden(tmp_path) == others


def test_a_bundle_that_a_killed_export_had_moved_aside_is_put_back(folder):
    aside = folder.with_name(f".{folder.name}.0123abcd.old")
    os.rename(folder, aside)
    aside.with_suffix(".tmp").mkdir()
    with pytest.raises(ExportError, match="--force"), staged(folder, force=False):
        pass
    assert Bundle.open(folder).passed
    assert hidden(folder.parent) == []


def test_only_a_bundle_is_replaced_and_only_by_force(folder, tmp_path):
    other = tmp_path / "home"
    other.mkdir()
    (other / "thesis.txt").write_text("x")
    with pytest.raises(ExportError, match="no bundle"), staged(other, force=True):
        pass
    with pytest.raises(ExportError, match="--force"), staged(folder, force=False):
        pass
    with staged(folder, force=True) as staging:
        (staging / "new").write_text("x")
    assert os.listdir(folder) == ["new"]
    assert (other / "thesis.txt").read_text() == "x"
