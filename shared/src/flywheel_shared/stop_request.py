"""SIGTERM and Ctrl-C as a request to stop after the step at hand."""

import signal
import threading
from types import FrameType
from typing import Any, Self


class StopRequest:
    """Within the block the first SIGTERM or Ctrl-C sets `requested`; a second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python gives signals to no other
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self.requested:
            raise KeyboardInterrupt
        self.requested = True
