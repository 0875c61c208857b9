"""The worker's end of the inference server."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping

import numpy as np

from msrl_accel.errors import PipelineError, PolicyError
from msrl_accel.pipeline.inference import (
    ANSWER,
    ASK,
    HELLO,
    LONGEST_MESSAGE,
    MESSAGE,
    REFUSE,
    Output,
    client_layout,
    same_user,
)
from msrl_accel.runtime.base import ActResult, check_inputs
from msrl_accel.shared_memory import BlockHandle, SharedBlock, views
from msrl_accel.spaces import Observations, PolicySpec

PATIENCE_SECONDS = 60.0
"""For an answer, and for a server that has ended to be replaced."""
_RETRY_SECONDS = 0.05


class InferenceClient:
    """A policy that another process runs: see `InferenceServer`.

    A server that ended is waited for: requests have no effect but their answer, so the next server
    of that name is asked again.

    Args:
        spec: the policy's tensors.
        name: of the server.
        max_rows: of one call; more are asked for in several.
        patience: seconds to wait for an answer, reconnecting included.
        beat: called every moment of a wait.
    """

    def __init__(
        self,
        spec: PolicySpec,
        name: str,
        max_rows: int,
        *,
        patience: float = PATIENCE_SECONDS,
        beat: Callable[[], object] = lambda: None,
    ) -> None:
        self.spec = spec
        self.name = name
        self.max_rows = max_rows
        self.patience = patience
        self.beat = beat
        self.version = -1
        self._connection: socket.socket | None = None
        self._block: SharedBlock | None = None
        self._arrays: dict[str, np.ndarray] = {}
        self._outputs: list[Output] = []
        self._number = 0
        self._closed = False

    def load_weights(self, version: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Not for clients: the server takes the learner's weights by itself."""
        raise PolicyError("weights cannot be given to a client of the inference server")

    def act(self, observations: Observations, noise: np.ndarray) -> ActResult:
        """As of every runtime; `version` is then that of the weights which acted.

        Raises:
            PolicyError: a tensor does not fit, or the policy failed on it.
            PipelineError: no answer came, and no other server in the place of one that ended.
        """
        observations = check_inputs(self.spec, observations, noise)
        parts = []
        for start in range(0, len(noise), self.max_rows):
            rows = slice(start, start + self.max_rows)
            parts.append(self._act(tuple(x[rows] for x in observations), noise[rows]))
        if not parts:
            raise PolicyError("the batch is empty; give at least one observation")
        outputs = [
            np.concatenate(x) if output.per_row else x[0]
            for output, x in zip(self._outputs, zip(*parts))
        ]
        return ActResult.of(self.spec, outputs)

    def close(self) -> None:
        self._disconnect()
        self._closed = True

    def _act(self, observations: Observations, noise: np.ndarray) -> list[np.ndarray]:
        if self._closed:
            raise PolicyError("this client of the inference server is closed")
        deadline = time.monotonic() + self.patience
        while True:
            try:
                if self._connection is None:
                    self._connect(deadline)
                return self._ask(observations, noise, deadline)
            except OSError as error:  # it has ended
                self._disconnect()
                if time.monotonic() >= deadline:
                    raise PipelineError(
                        f"inference: the server has ended, and none came in its place within "
                        f"{self.patience:g} s"
                    ) from error
                self.beat()
                time.sleep(_RETRY_SECONDS)

    def _ask(
        self, observations: Observations, noise: np.ndarray, deadline: float
    ) -> list[np.ndarray]:
        n = len(noise)
        for i, x in enumerate(observations):
            self._arrays[f"observation/{i}"][:n] = x
        self._arrays["noise"][:n] = noise
        self._number += 1
        self._send(MESSAGE.pack(ASK, self._number, n))
        message = self._hear(deadline)
        kind, number, version = MESSAGE.unpack(message[: MESSAGE.size])
        if number != self._number or kind not in (ANSWER, REFUSE):
            raise PipelineError(f"inference: answer {number} came to request {self._number}")
        if kind == REFUSE:
            raise PolicyError(message[MESSAGE.size :].decode(errors="replace"))
        self.version = version
        arrays = [self._arrays[f"output/{i}"] for i in range(len(self._outputs))]
        return [(x[:n] if o.per_row else x).copy() for o, x in zip(self._outputs, arrays)]

    def _connect(self, deadline: float) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection = connection
        connection.settimeout(_RETRY_SECONDS)
        connection.connect(f"\0{self.name}")
        if not same_user(connection):
            raise PipelineError("inference: the server's name is taken by another user")
        self._send(MESSAGE.pack(HELLO, 0, self.max_rows))
        answer = json.loads(self._hear(deadline))
        self._outputs = [
            Output(tuple(o["shape"]), o["dtype"], o["per_row"]) for o in answer["outputs"]
        ]
        try:
            self._block = SharedBlock.attach(BlockHandle(**answer["block"]))
        except PipelineError as error:
            raise ConnectionError("the server ended while it was joined") from error
        layout = client_layout(self.spec, self._outputs, self.max_rows)
        self._arrays = views(self._block.memory, layout)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._block is not None:
            self._block.close()
        self._connection = self._block = None
        self._arrays = {}

    def _send(self, message: bytes) -> None:
        assert self._connection is not None
        self._connection.send(message)

    def _hear(self, deadline: float) -> bytes:
        """The next message; an OSError where the server has ended."""
        assert self._connection is not None
        while True:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                # A late answer would be taken for the next request's.
                self._disconnect()
                raise PipelineError(
                    f"inference: the server gave no answer for {self.patience:g} s; it hangs, or "
                    "is stopped"
                )
            self._connection.settimeout(min(remaining, 1.0))
            try:
                message = self._connection.recv(LONGEST_MESSAGE)
            except socket.timeout:
                self.beat()
                continue
            if not message:
                raise ConnectionError("the server has ended")
            return message
