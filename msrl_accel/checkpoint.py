"""Checkpoints: safetensors for arrays, JSON for everything else, replaced atomically, no pickle.

A store is a folder with one folder a checkpoint, named by its step::

    checkpoints/000000040960/arrays.safetensors
    checkpoints/000000040960/state.json

`state.json` carries the size and SHA-256 of the arrays and a SHA-256 of itself, so any damage to
either file is found before anything is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import operator
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors

from msrl_accel.errors import CheckpointError
from msrl_accel.files import PathLike, sync_directory, write_bytes_synced
from msrl_accel.tensor_file import DTYPES, write_arrays

SCHEMA_VERSION = 1
ARRAYS_FILE = "arrays.safetensors"
STATE_FILE = "state.json"

_STEP_NAME = re.compile(r"\d{12}")
_MAX_STEP = 10**12 - 1
# Folders that a killed process may leave: `.tmp-*` is unfinished or being deleted, `.old-<step>`
# is the previous checkpoint of a step while its successor is moved into place.
_TEMPORARY = ".tmp-"
_REPLACED = ".old-"
_ARRAY = "$array"
_FLOAT = "$float"
_INT = "$int"

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Checkpoint:
    """One verified checkpoint, wholly in memory."""

    step: int
    arrays: Arrays
    meta: dict[str, Any]
    score: float | None
    path: Path


class CheckpointStore:
    """The checkpoints of one run, written by one process at a time.

    `directory` is created by the first save. Kept are the last `keep_last` (default 3) by step,
    the best by score, and always the one just saved.
    """

    def __init__(self, directory: PathLike, keep_last: int = 3) -> None:
        if keep_last < 1:
            raise CheckpointError(f"keep_last is {keep_last}: keep at least 1 checkpoint")
        self.directory = Path(directory)
        self.keep_last = keep_last

    def save(
        self,
        step: int,
        arrays: Mapping[str, np.ndarray],
        meta: Mapping[str, Any],
        score: float | None = None,
    ) -> Path:
        """Write the checkpoint of `step`, replacing one of the same step, then prune.

        `arrays` may hold any shape of float16/32/64, (u)int8-64, bool, complex64; `meta` any JSON
        value, integers of any size and non-finite floats included (tuples come back as lists).
        The higher `score` is the better; None or NaN is never the best. Raises CheckpointError
        for unusable values and when the disk refuses; older checkpoints are then as before.
        """
        step = operator.index(step)
        if not 0 <= step <= _MAX_STEP:
            raise CheckpointError(f"step is {step}: a checkpoint needs 0 <= step <= {_MAX_STEP}")
        arrays = _checked_arrays(arrays)
        content = {
            "step": step,
            "score": _encode(None if score is None else float(score), "score"),
            "meta": _encode(dict(meta), "meta"),
        }
        target = self.directory / f"{step:012d}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._recover()
            self._write(target, arrays, content)
            self._prune(step)
        except OSError as error:
            raise CheckpointError(
                f"cannot write checkpoint {target}: {error.strerror or error}; free disk space or "
                "permit writing there (older checkpoints are intact)"
            ) from error
        return target

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending, not verified."""
        return sorted(self._folders())

    def latest(self) -> Checkpoint | None:
        """The newest intact checkpoint; a damaged one is warned about and passed over.

        None when there is no checkpoint at all; CheckpointError when all of them are damaged or
        the newest was written by a newer version of the library.
        """
        folders = self._folders()
        return self._first_intact([folders[step] for step in sorted(folders, reverse=True)])

    def best(self) -> Checkpoint | None:
        """As `latest`, by score; among equal scores the newest. None when none has a score."""
        folders = self._folders()
        return self._first_intact([folders[step] for step in self._steps_by_score(folders)])

    def load(self, which: str | int = "last") -> Checkpoint:
        """The checkpoint "last", "best" or of one step; CheckpointError if there is none."""
        if which == "last" or which == "best":
            found = self.latest() if which == "last" else self.best()
            if found is not None:
                return found
            if which == "best" and self.steps():
                raise CheckpointError(
                    f"no checkpoint in {self.directory} has a score: load 'last' instead"
                )
            raise CheckpointError(
                f"no checkpoint in {self.directory}: check the run directory, or train first"
            )
        folders = self._folders()
        if isinstance(which, str) or which not in folders:
            present = ", ".join(map(str, sorted(folders))) or "none"
            raise CheckpointError(
                f"no checkpoint {which!r} in {self.directory}: "
                f"use 'last', 'best' or one of these steps: {present}"
            )
        try:
            return _read(folders[which])
        except _DamagedError as damage:
            raise CheckpointError(f"{damage}: load 'last' for the newest intact one") from damage

    def discard_after(self, step: int) -> None:
        """Delete checkpoints later than `step`, for a run that goes on from an earlier one."""
        for later, folder in self._folders().items():
            if later > step:
                self._delete(folder)

    def _folders(self) -> dict[int, Path]:
        """Step -> folder; a replaced folder counts while its successor is not in place."""
        if not self.directory.is_dir():
            return {}
        found: dict[int, Path] = {}
        for entry in sorted(self.directory.iterdir()):  # ".old-..." sorts before digits
            name = entry.name[len(_REPLACED) :] if entry.name.startswith(_REPLACED) else entry.name
            if _STEP_NAME.fullmatch(name) and entry.is_dir():
                found[int(name)] = entry
        return found

    def _steps_by_score(self, folders: Mapping[int, Path]) -> list[int]:
        scores: dict[int, float] = {}
        for step, folder in folders.items():
            with contextlib.suppress(_DamagedError, CheckpointError):
                score = _read_state(folder)["score"]
                if score is not None and not math.isnan(score):
                    scores[step] = score
        return sorted(scores, key=lambda step: (scores[step], step), reverse=True)

    def _first_intact(self, candidates: list[Path]) -> Checkpoint | None:
        for folder in candidates:
            try:
                return _read(folder)
            except _DamagedError as damage:
                warnings.warn(f"{damage}: using the one before it", stacklevel=3)
        if candidates:
            raise CheckpointError(
                f"no intact checkpoint in {self.directory} (tried {len(candidates)}): "
                "restore the folder from a copy, or start a new run"
            )
        return None

    def _write(self, target: Path, arrays: Arrays, content: Mapping[str, Any]) -> None:
        """Write a folder beside `target`, then move it into place."""
        temporary = self._temporary(target.name)
        try:
            temporary.mkdir()
            size, digest = write_arrays(temporary / ARRAYS_FILE, arrays)
            state = _seal({**content, "arrays": {"size": size, "sha256": digest}})
            write_bytes_synced(temporary / STATE_FILE, state)
            sync_directory(temporary)
            replaced = self.directory / (_REPLACED + target.name)
            if target.exists():
                os.rename(target, replaced)
            os.rename(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync_directory(self.directory)
        if replaced.exists():
            self._delete(replaced)

    def _recover(self) -> None:
        """Undo what a killed process left half done."""
        for entry in list(self.directory.iterdir()):
            if entry.name.startswith(_TEMPORARY):
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name.startswith(_REPLACED):
                target = self.directory / entry.name[len(_REPLACED) :]
                if target.exists():
                    self._delete(entry)
                else:
                    os.rename(entry, target)

    def _prune(self, just_saved: int) -> None:
        folders = self._folders()
        kept = {just_saved, *sorted(folders)[-self.keep_last :], *self._steps_by_score(folders)[:1]}
        for step in set(folders) - kept:
            self._delete(folders[step])

    def _delete(self, folder: Path) -> None:
        # Renamed first, so that a kill midway leaves no half-deleted checkpoint under its name.
        doomed = self._temporary(folder.name)
        os.rename(folder, doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def _temporary(self, name: str) -> Path:
        return self.directory / f"{_TEMPORARY}{name}-{secrets.token_hex(4)}"


def flatten_state(tree: Mapping[str, Any]) -> tuple[Arrays, dict[str, Any]]:
    """Split nested dicts and lists into named arrays and a JSON tree that refers to them.

    An array at tree["env"]["state"] gets the name "env/state"; dtype and shape stay exact, 0-d
    too. NumPy scalars become Python numbers, tuples lists. Inverse: `unflatten_state`.
    """
    arrays: Arrays = {}
    return arrays, _flattened(dict(tree), "", arrays)


# Not nested: a function that refers to itself would keep the arrays until garbage is collected.
def _flattened(node: Any, path: str, arrays: Arrays) -> Any:
    if isinstance(node, np.ndarray):
        arrays[path] = node
        return {_ARRAY: path}
    if isinstance(node, Mapping):
        if _ARRAY in node:
            raise CheckpointError(f"state key {_ARRAY!r} at {path!r} is reserved: rename it")
        return {k: _flattened(value, _join(path, k), arrays) for k, value in node.items()}
    if isinstance(node, (list, tuple)):
        return [_flattened(value, _join(path, str(i)), arrays) for i, value in enumerate(node)]
    return node.item() if isinstance(node, np.generic) else node


def _join(path: str, key: Any) -> str:
    if not isinstance(key, str) or not key:
        raise CheckpointError(f"state key {key!r} at {path!r}: use non-empty string keys")
    escaped = key.replace("~", "~0").replace("/", "~1")  # as in JSON pointers (RFC 6901)
    return f"{path}/{escaped}" if path else escaped


def unflatten_state(arrays: Mapping[str, np.ndarray], tree: Mapping[str, Any]) -> dict[str, Any]:
    """The nested state that `flatten_state` split; CheckpointError if an array is missing."""
    return {key: _unflattened(arrays, value) for key, value in tree.items()}


def _unflattened(arrays: Mapping[str, np.ndarray], node: Any) -> Any:
    if isinstance(node, Mapping):
        if set(node) != {_ARRAY}:
            return {key: _unflattened(arrays, value) for key, value in node.items()}
        name = node[_ARRAY]
        if name not in arrays:
            raise CheckpointError(
                f"array {name!r} of the saved state is missing: load another checkpoint"
            )
        return arrays[name]
    return [_unflattened(arrays, value) for value in node] if isinstance(node, list) else node


class _DamagedError(Exception):
    """A file of a checkpoint is missing, unreadable, or not what was written."""

    def __init__(self, file: Path, reason: str) -> None:
        super().__init__(f"checkpoint file {file} is damaged ({reason})")


def _read(folder: Path) -> Checkpoint:
    content = _read_state(folder)
    file = folder / ARRAYS_FILE
    data = _read_bytes(file)
    expected = content["arrays"]
    if len(data) != expected["size"]:
        raise _DamagedError(file, f"{len(data)} bytes instead of {expected['size']}")
    if hashlib.sha256(data).hexdigest() != expected["sha256"]:
        raise _DamagedError(file, "SHA-256 differs from the one recorded")
    try:
        arrays = load_safetensors(data)
    except SafetensorError as error:
        raise _DamagedError(file, str(error)) from error
    for name in arrays:
        _check_name(name)
    return Checkpoint(content["step"], arrays, content["meta"], content["score"], folder)


def _read_state(folder: Path) -> dict[str, Any]:
    """Verified and decoded content of state.json."""
    file = folder / STATE_FILE
    try:
        envelope = json.loads(_read_bytes(file).decode("utf-8"))
        version, content, digest = (
            envelope[key] for key in ("schema_version", "content", "sha256")
        )
        intact = _digest(version, content) == digest
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _DamagedError(file, f"not a checkpoint state: {error}") from error
    if not intact:
        raise _DamagedError(file, "SHA-256 differs from the one recorded")
    if version > SCHEMA_VERSION:
        raise CheckpointError(
            f"{file} has schema version {version}, this msrl_accel reads up to {SCHEMA_VERSION}: "
            "upgrade msrl_accel"
        )
    if content["step"] != int(folder.name[-12:]):
        raise _DamagedError(file, f"belongs to step {content['step']}")
    decoded: dict[str, Any] = _decode(content)
    return decoded


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise _DamagedError(file, error.strerror or str(error)) from error


def _seal(content: Mapping[str, Any]) -> bytes:
    envelope = {
        "schema_version": SCHEMA_VERSION,
        "sha256": _digest(SCHEMA_VERSION, content),
        "content": content,
    }
    return (json.dumps(envelope, indent=1, allow_nan=False) + "\n").encode("utf-8")


def _digest(version: Any, content: Any) -> str:
    """SHA-256 of the canonical JSON; its rule stays the same over all schema versions."""
    canonical = json.dumps([version, content], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8")).hexdigest()


def _checked_arrays(arrays: Mapping[str, np.ndarray]) -> Arrays:
    """The same arrays, none of them copied."""
    checked = {name: np.asarray(array) for name, array in arrays.items()}
    for name, array in checked.items():
        _check_name(name)
        if array.dtype.name not in DTYPES:
            raise CheckpointError(
                f"array {name!r} has dtype {array.dtype}, which a checkpoint cannot hold: "
                "convert it to a numeric or bool dtype of at most 64 bits"
            )
    return checked


def _check_name(name: str) -> None:
    """Names are keys, but exporters make file names of them: none may leave its folder."""
    parts = name.split("/") if isinstance(name, str) else []
    bad = not parts or name == "__metadata__" or ".." in parts or parts[0] == ""
    if bad or any(character in name for character in "\\\0"):
        raise CheckpointError(
            f"array name {name!r} cannot be used in a checkpoint: "
            "use a relative name such as 'policy/weight'"
        )


def _encode(value: Any, where: str) -> Any:
    """`value` in strict JSON: non-finite floats and integers beyond 64 bits become tagged text."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: repr(float(value))}
    if isinstance(value, int):
        return value if value.bit_length() < 64 else {_INT: hex(value)}
    if isinstance(value, np.generic) and isinstance(value.item(), (bool, int, float, str)):
        return _encode(value.item(), where)
    if isinstance(value, (list, tuple)):
        return [_encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        return dict(_encode_items(value, where))
    raise CheckpointError(
        f"{where} is of type {type(value).__name__}, which JSON cannot hold: "
        "split arrays off with flatten_state, or convert it"
    )


def _encode_items(mapping: Mapping[Any, Any], where: str) -> Iterator[tuple[str, Any]]:
    for key, value in mapping.items():
        if not isinstance(key, str) or key in (_FLOAT, _INT):
            raise CheckpointError(f"key {key!r} of {where} is reserved or no string: rename it")
        yield key, _encode(value, f"{where}.{key}")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {_FLOAT}:
        return float(value[_FLOAT])
    if set(value) == {_INT}:
        return int(value[_INT], 16)
    return {key: _decode(item) for key, item in value.items()}
