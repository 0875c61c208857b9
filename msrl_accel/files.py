"""Writing files so that a kill at any moment leaves whole content: the old, or the new."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Union

from msrl_accel.errors import MsrlError

PathLike = Union[str, "os.PathLike[str]"]


def write_text_atomic(path: PathLike, text: str) -> None:
    """Replace `path` by UTF-8 `text`, newlines as given; OSError leaves the old file as it was."""
    write_bytes_atomic(path, text.encode("utf-8"))


def write_bytes_atomic(path: PathLike, data: bytes) -> None:
    """Replace `path` by `data`; OSError leaves the old file as it was and no temporary behind."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        write_bytes_synced(temporary, data)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_directory(target.parent)


def write_bytes_synced(path: PathLike, data: bytes) -> None:
    """Write a new file and wait until its content is on the disk."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """A hidden folder beside `target` to write in, moved to its place when the block ends well.

    Until then `target` is as it was, absent or with its old content: a failure, a full disk or a
    kill leaves nothing half-written under its name. What is in an existing `target` is removed.

    Raises:
        OSError: a folder or file cannot be written or moved.
    """
    clear_stale_folders(target)
    staging = target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp"
    lock = None
    try:
        staging.mkdir(parents=True)
        lock = os.open(staging, os.O_RDONLY)
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield staging
        for file in staging.iterdir():
            _sync_file(file)
        sync_directory(staging)
        _replace_folder(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def clear_stale_folders(target: Path) -> None:
    """Remove what killed writers of `target` left; put back the folder that one had moved aside.

    The folders of writers that are still at work, here or on another host, are locked.

    Raises:
        OSError: a folder cannot be moved.
    """
    ours = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.(tmp|old)")
    for folder in sorted(target.parent.glob(f".{glob.escape(target.name)}.*")):  # .old before .tmp
        if not ours.fullmatch(folder.name) or folder.is_symlink() or not folder.is_dir():
            continue
        if _is_locked(folder.with_suffix(".tmp")):
            continue
        if folder.suffix == ".old" and not target.exists():
            os.rename(folder, target)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _is_locked(folder: Path) -> bool:
    """Whether a process holds the lock of a folder, or that cannot be told."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _replace_folder(staging: Path, target: Path) -> None:
    old = staging.with_suffix(".old")
    if target.exists():
        os.rename(target, old)
    try:
        os.rename(staging, target)
    except OSError:
        if old.exists():
            os.rename(old, target)
        raise
    sync_directory(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync_file(file: Path) -> None:
    with open(file, "rb") as opened:
        os.fsync(opened.fileno())


def sync_directory(directory: PathLike) -> None:
    """Make renames inside `directory` durable, where the file system can do that."""
    # Some network and FUSE file systems refuse fsync on folders; the rename itself still holds.
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def append_line(file: FileIO, line: str) -> None:
    """One system call a line, unbuffered, so that a kill tears at most the last line."""
    data = line.encode("utf-8")
    if file.write(data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)


def whole_lines(path: Path) -> list[str]:
    """Lines that end in a newline: a kill may have torn the last one."""
    text = path.read_bytes().decode("utf-8", errors="replace")
    return text.split("\n")[:-1]


@contextlib.contextmanager
def disk_errors(what: str, run_dir: Path) -> Iterator[None]:
    """Turn an OSError of writing `what` into an MsrlError that says where and what to do."""
    try:
        yield
    except OSError as error:
        where = os.fspath(error.filename or run_dir)
        raise MsrlError(
            f"cannot write {what} to {where}: {error.strerror or error}; "
            "free disk space or choose a writable run directory"
        ) from error
