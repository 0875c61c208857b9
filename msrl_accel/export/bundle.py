"""A bundle: the folder that holds an exported policy in every form, and what proves it.

Opening one needs NumPy alone: no MindSpore, no Gymnasium.
"""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from msrl_accel import html
from msrl_accel.errors import BundleError, ExportError
from msrl_accel.export.manifest import MODELS, file_digest, parse, parse_header, parse_spec
from msrl_accel.files import PathLike, clear_stale_folders, staged_folder
from msrl_accel.spaces import PolicySpec

MANIFEST = "manifest.json"
REFERENCE = "reference.npz"

_COPY_AGAIN = "copy or export the bundle again"


class Bundle:
    """A validated bundle folder; open one with `Bundle.open`.

    Attributes:
        path: the folder.
        manifest: what it says of itself, validated.
        spec: the policy's tensors.
        output_names: outputs of the graph, in order.
        version: of the weights; the environment step of the checkpoint they are from.
    """

    def __init__(self, path: Path, manifest: dict[str, Any], spec: PolicySpec) -> None:
        self.path = path
        self.manifest = manifest
        self.spec = spec
        self.output_names: tuple[str, ...] = tuple(manifest["outputs"])
        self.input_names: tuple[str, ...] = tuple(i["name"] for i in manifest["inputs"])
        self.version: int = manifest["weights"]["version"]

    @classmethod
    def open(cls, path: PathLike, *, verify: bool = True) -> Bundle:
        """Open a bundle.

        Args:
            path: the folder that `msrl-export` wrote, or a copy of it.
            verify: whether every file's SHA-256 is checked; sizes and places always are.

        Raises:
            BundleError: no bundle, a newer schema, or a file that is missing, truncated, changed
                or outside the folder; the message names it.
        """
        folder = Path(path)
        file = folder / MANIFEST
        manifest = parse(read_manifest(folder), file)
        bundle = cls(folder, manifest, parse_spec(manifest, file))
        check_files_on_disk(folder, manifest, verify)
        return bundle

    def file(self, format: str) -> Path | None:
        """The file that the backend of that name loads; None where the bundle has none."""
        if format not in MODELS:
            raise BundleError(f"format {format!r} is unknown: use one of {', '.join(MODELS)}")
        name = self.manifest["models"].get(format)
        return None if name is None else self.path / name

    def reference(self) -> dict[str, np.ndarray]:
        """Fixed observations and noises, and the training graph's outputs for them.

        Keys: `observation/NAME` [R, ...] and `noise` [R, noise_size] (one batch of R rows),
        `deterministic/OUTPUT` (zero noise) and `sampled/OUTPUT` (that noise).

        Raises:
            BundleError: the file is damaged or not what the manifest describes.
        """
        return read_reference(self.path, self.manifest)

    @property
    def passed(self) -> bool:
        """Whether every exported form acted as the training graph did when it was exported."""
        return bool(self.manifest["parity"]["passed"])

    @property
    def complete(self) -> bool:
        """Whether it passed, or its failure was accepted with --no-gate and is recorded."""
        return self.passed or not self.manifest["parity"]["gate"]

    def __repr__(self) -> str:
        models = ", ".join(self.manifest["models"])
        verdict = "" if self.passed else ", parity check FAILED"
        return f"Bundle({str(self.path)!r}: {models}, version {self.version}{verdict})"

    def _repr_html_(self) -> str:
        """What notebooks show: what it is of, whether it passed, and its files."""
        config = self.manifest["config"]
        state = "every form checked here acts as trained" if self.passed else "parity check FAILED"
        title = f"{config['algo'].upper()} on {config['env']}, step {self.version:,}: {state}"
        where = html.render(f"folder: {self.path}")
        rows = [
            (html.link(self.path / name), f"{entry['size'] / 1024:,.0f} KB", self._content(name))
            for name, entry in self.manifest["files"].items()
        ]
        notes = [f"{backend}: {note}" for backend, note in self.manifest["notes"].items()]
        return (
            f"<div>{html.verdict(title, self.passed)}<br><small>{where}</small>"
            f"{html.table(rows, ('file', 'size', 'what it is'))}{html.bullets(notes)}</div>"
        )

    def _content(self, name: str) -> str:
        """What a file is, and for a form of the policy how closely it agrees."""
        results = self.manifest["parity"]["results"]
        for backend, model in self.manifest["models"].items():
            if model == name:
                return f"{backend}: {describe_parity(results[backend])}"
        return "observations and the training graph's outputs" if name == REFERENCE else ""


def describe_parity(result: Mapping[str, Any]) -> str:
    """How closely an exported form agreed with the training graph, in a few words."""
    if result["passed"] is None:
        return f"not checked ({result['reason']})"
    if not result["passed"]:
        return f"DIFFERS: {'; '.join(result['problems'])}"
    outputs = result["outputs"].values()
    if all(o["bit_equal"] for o in outputs):
        return "bit-equal with the training graph"
    return f"within {max(o['max_abs'] for o in outputs):.1e} of the training graph"


def describe_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Shape and dtype of each array, as the manifest has them."""
    return {k: {"shape": list(v.shape), "dtype": v.dtype.name} for k, v in arrays.items()}


def read_manifest(folder: Path) -> bytes:
    """What is in the manifest of a bundle of any kind.

    Raises:
        BundleError: there is none.
    """
    try:
        return (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise BundleError(
            f"{folder} is no bundle ({MANIFEST}: {error.strerror}): "
            "give the folder that msrl-export wrote"
        ) from error


def read_reference(folder: Path, manifest: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of the reference file, when they are those that the manifest lists."""
    file = folder / REFERENCE
    try:
        with np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise BundleError(f"{file} cannot be read ({error}): {_COPY_AGAIN}") from error
    if describe_arrays(arrays) != manifest["reference"].get("arrays"):
        raise BundleError(f"{file} does not hold what the manifest lists: {_COPY_AGAIN}")
    return arrays


def check_files_on_disk(folder: Path, manifest: Mapping[str, Any], verify: bool) -> None:
    """Refuse files that are missing, outside the folder, of another size or, on demand, digest."""
    for name, entry in manifest["files"].items():
        _check_file(folder, name, entry, verify)


def _check_file(folder: Path, name: str, entry: Mapping[str, Any], verify: bool) -> None:
    file = folder / name
    try:
        if file.resolve().parent != folder.resolve():
            raise BundleError(f"{file} leads outside the bundle: do not use it")
        size = file.stat().st_size
        if size != entry["size"]:
            raise BundleError(f"{file} has {size} bytes instead of {entry['size']}: {_COPY_AGAIN}")
        if verify and file_digest(file) != entry["sha256"]:
            raise BundleError(f"{file} was changed (its SHA-256 differs): {_COPY_AGAIN}")
    except OSError as error:
        raise BundleError(f"{file} cannot be read ({error.strerror}): {_COPY_AGAIN}") from error


@contextlib.contextmanager
def staged(target: Path, *, force: bool) -> Iterator[Path]:
    """A hidden folder beside `target` to write a bundle in, renamed to it when the block ends well.

    Until then nothing is at `target`, or the bundle that was there before: a failure, a full disk
    or a kill leaves no half-written bundle under its name. What a kill leaves under a hidden name
    is removed by the next export to the same place.

    Raises:
        ExportError: `target` exists and is not to be replaced, or cannot be written.
    """
    try:
        clear_stale_folders(target)
        _check_target(target, force)
        with staged_folder(target) as staging:
            yield staging
    except OSError as error:
        raise ExportError(
            f"cannot write {target}: {error.strerror or error}; free disk space, or choose "
            "another folder with --out"
        ) from error


def _check_target(target: Path, force: bool) -> None:
    if not target.exists() and not target.is_symlink():
        return
    if target.is_dir() and not any(target.iterdir()):
        return
    try:
        parse_header(read_manifest(target), target / MANIFEST)
    except BundleError as error:
        raise ExportError(
            f"{target} exists and is no bundle: choose another folder with --out"
        ) from error
    if not force:
        raise ExportError(f"{target} already holds a bundle: replace it with --force, or use --out")
