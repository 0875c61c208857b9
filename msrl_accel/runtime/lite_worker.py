"""A MindSpore Lite engine in a child process, for parents that have MindSpore loaded.

Parent and child exchange frames over two pipes: eight bytes of length, one byte that says what it
is, and the content. Numbers are little-endian; nothing is pickled.

    parent  M  threads u32, model                   child  M  JSON of the inputs
            R  rows u64, inputs one after another          R  of each output dtype, rank, dims, data
                                                           E  error message
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, Union

import numpy as np

from msrl_accel.runtime.lite_engine import Engine, TensorType, engine_message, open_engine
from msrl_accel.runtime.lite_setup import LiteError

Block = Union[bytes, bytearray, memoryview]

_MODEL, _RUN, _ERROR = b"M", b"R", b"E"
_HEADER = struct.Struct("<Qc")
_THREADS = struct.Struct("<I")
_ROWS = struct.Struct("<Q")
_TENSOR = struct.Struct("<3sB")
_ORPHAN_CHECK_MS = 1000


class ChildEngine:
    """An engine in a process of its own; the process ends when its parent does."""

    inputs: Sequence[TensorType]

    def __init__(self, model: bytes, threads: int = 1) -> None:
        self._threads = threads
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        command = [sys.executable, "-m", __name__]
        # The child finds this package wherever the parent did.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            bufsize=0,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        try:
            self.load(model)
        except BaseException:
            self.close()
            raise

    def load(self, model: bytes) -> None:
        answer = self._ask(_MODEL, [_THREADS.pack(self._threads), model])
        self.inputs = [(tuple(s), np.dtype(dtype)) for s, dtype in json.loads(bytes(answer))]

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        blocks = [x.reshape(-1).view(np.uint8).data for x in inputs]
        answer = self._ask(_RUN, [_ROWS.pack(len(inputs[0])), *blocks])
        return list(_unpack_tensors(answer))

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._process.stdout is not None:
            self._process.stdout.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _ask(self, kind: bytes, blocks: Sequence[Block]) -> memoryview:
        try:
            _send(self._stdin, kind, blocks)
            answer_kind, answer = _receive(self._stdout)
        except (EOFError, BrokenPipeError) as error:
            raise LiteError(self._obituary()) from error
        except BaseException:
            self._process.kill()  # interrupted half-way: the next answer would be this one's
            raise
        if answer_kind == _ERROR:
            raise LiteError(bytes(answer).decode())
        return answer

    def _obituary(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        code = self._process.returncode
        how = f"exit status {code}"
        if code is not None and code < 0:
            how = f"signal {signal.Signals(-code).name}"
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").splitlines()
        last = f"; its last words: {lines[-1]}" if lines else ""
        reason = engine_message(lines)
        return f"the MindSpore Lite process ended unexpectedly ({how}): {reason}{last}"


def main() -> int:
    """The child: serve requests from standard input until it closes or the parent is gone."""
    requests, answers = 0, os.dup(1)
    os.dup2(2, 1)  # what the engine prints must not mix with the answers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    parent = os.getppid()
    engine: Engine | None = None
    try:
        while _wait(requests, parent):
            kind, content = _receive(requests)
            try:
                if kind == _MODEL:
                    (threads,) = _THREADS.unpack_from(content)
                    model = bytes(content[_THREADS.size :])
                    if engine is None:
                        engine = open_engine(model, threads)
                    else:
                        engine.load(model)
                    types = [(shape, dtype.str) for shape, dtype in engine.inputs]
                    _send(answers, kind, [json.dumps(types).encode()])
                else:
                    assert engine is not None
                    outputs = engine.run(_unpack_inputs(content, engine.inputs))
                    _send(answers, kind, list(_pack_tensors(outputs)))
            except LiteError as error:
                _send(answers, _ERROR, [str(error).encode()])
    except (EOFError, BrokenPipeError):
        pass
    return 0


def _wait(descriptor: int, parent: int) -> bool:
    """Wait for a request; False when the parent is gone.

    The end of the pipe usually says so, but not while another child of the parent holds it open.
    """
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    while not poller.poll(_ORPHAN_CHECK_MS):
        if os.getppid() != parent:
            return False
    return True


def _send(descriptor: int, kind: bytes, blocks: Sequence[Block]) -> None:
    length = sum(len(b) for b in blocks)
    frame = memoryview(b"".join([_HEADER.pack(length, kind), *blocks]))
    while frame:
        frame = frame[os.write(descriptor, frame) :]


def _receive(descriptor: int) -> tuple[bytes, memoryview]:
    length, kind = _HEADER.unpack(_read(descriptor, _HEADER.size))
    return kind, _read(descriptor, length)


def _read(descriptor: int, length: int) -> memoryview:
    data = memoryview(bytearray(length))
    done = 0
    while done < length:
        count = os.readv(descriptor, [data[done:]])
        if count == 0:
            raise EOFError("the pipe was closed")
        done += count
    return data


def _unpack_inputs(content: memoryview, types: Sequence[TensorType]) -> list[np.ndarray]:
    (rows,) = _ROWS.unpack_from(content)
    offset, arrays = _ROWS.size, []
    for shape, dtype in types:
        count = rows * int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(content, dtype, count, offset)
        arrays.append(array.reshape((rows, *shape)))
        offset += array.nbytes
    return arrays


def _pack_tensors(arrays: Sequence[np.ndarray]) -> Iterator[Block]:
    for array in arrays:
        yield _TENSOR.pack(array.dtype.str.encode(), array.ndim)
        yield struct.pack(f"<{array.ndim}Q", *array.shape)
        yield array.tobytes()


def _unpack_tensors(content: memoryview) -> Iterator[np.ndarray[Any, Any]]:
    offset = 0
    while offset < len(content):
        dtype, rank = _TENSOR.unpack_from(content, offset)
        offset += _TENSOR.size
        shape = struct.unpack_from(f"<{rank}Q", content, offset)
        offset += 8 * rank
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(content, np.dtype(dtype.decode()), count, offset)
        offset += array.nbytes
        yield array.reshape(shape).copy()


if __name__ == "__main__":
    sys.exit(main())
