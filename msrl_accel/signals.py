"""Ctrl-C and SIGTERM as a request: the loop finishes its iteration and saves."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class GracefulStop:
    """Context in which the first SIGINT or SIGTERM only sets `requested` to the signal's name.

    A second SIGINT raises KeyboardInterrupt. The handlers found on entry are put back on exit.
    Off the main thread, where Python cannot set handlers, it does nothing. ::

        with GracefulStop() as stop:
            while stop.requested is None:
                train_one_iteration()
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> GracefulStop:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                # None means a handler set outside Python: it could not be put back.
                if signal.getsignal(number) is not None:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is None:
            self.requested = signal.Signals(number).name
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
