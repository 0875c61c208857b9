"""MindIR -> `.ms`, the file that MindSpore Lite reads on phones, boards and servers.

The converter is part of MindSpore Lite and so cannot share a process with MindSpore: it runs in a
child process, `python -m msrl_accel.runtime.lite_converter SOURCE TARGET`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from msrl_accel.files import write_bytes_atomic
from msrl_accel.runtime import lite_setup
from msrl_accel.runtime.lite_engine import engine_message, load_library
from msrl_accel.runtime.lite_setup import LiteError

TIMEOUT = 120.0
"""Seconds for a conversion, of which most take one."""


def convert_to_ms(source: Path, target: Path) -> None:
    """Convert a MindIR file that `write_lite_mindir` wrote.

    Args:
        source: the MindIR file.
        target: the .ms file, replaced atomically; it takes any batch size, as its source does.

    Raises:
        LiteError: Lite is missing (the message says how to add it), or cannot convert the file.
    """
    lite_setup.installed_version()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "policy"
        command = [sys.executable, "-m", __name__, str(source), str(output)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        try:
            done = subprocess.run(
                command,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=environment,
                timeout=TIMEOUT,
            )
        except subprocess.TimeoutExpired as error:
            raise LiteError(
                f"MindSpore Lite took over {TIMEOUT:g} s to convert {source}"
            ) from error
        file = output.with_suffix(".ms")
        if done.returncode or not file.exists():
            lines = done.stderr.splitlines()
            last = f"; its last words: {lines[-1]}" if lines else ""
            raise LiteError(
                f"MindSpore Lite cannot convert {source} (exit status {done.returncode}): "
                f"{engine_message(lines)}{last}"
            )
        write_bytes_atomic(target, file.read_bytes())


def _convert(source: str, target: str) -> int:
    """In the child: write `target`.ms; returns the engine's status, 0 for success."""
    if lite_setup.package_version() is None:
        library = load_library(lite_setup.shim_path())
        return int(library.lite_convert(source.encode(), target.encode()))
    import mindspore_lite  # type: ignore[import-not-found]

    converter = mindspore_lite.Converter()
    converter.save_type = mindspore_lite.ModelType.MINDIR_LITE
    converter.input_format = mindspore_lite.Format.NCHW  # leaves images as the graph takes them
    converter.convert(mindspore_lite.FmkType.MINDIR, source, target)
    return 0


def main(arguments: Sequence[str]) -> int:
    return 1 if _convert(*arguments) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
