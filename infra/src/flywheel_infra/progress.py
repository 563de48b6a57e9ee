"""What a run shows: one live line a step on a terminal, plain lines now and then otherwise."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.status import Status

PLAIN_EVERY_S = 30.0


class Progress:
    """Lines for people; `begin`, any number of `update`, `end` for each step."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self.status: Status | None = None
        self.title, self.began, self.shown = "", 0.0, 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        self._stop_status()

    def say(self, line: str) -> None:
        """One plain line."""
        self.console.print(escape(line), soft_wrap=True)

    def begin(self, number: int, total: int, name: str) -> None:
        """A step starts."""
        self.title, self.began, self.shown = f"[{number}/{total}] {name}", time.monotonic(), time.monotonic()
        if self.console.is_terminal:
            self.status = self.console.status(escape(self.title))
            self.status.start()

    def update(self, last_line: str) -> None:
        """The step is running; `last_line` is the newest line of its log."""
        elapsed = time.monotonic() - self.began
        clock = f"{int(elapsed) // 60}:{int(elapsed) % 60:02d}"
        line = f"{self.title}  {clock}  {last_line}"
        if self.status is not None:
            self.status.update(escape(line[: self.console.width - 4]))
        elif time.monotonic() - self.shown >= PLAIN_EVERY_S:
            self.shown = time.monotonic()
            self.say(line)

    def end(self, outcome: str) -> None:
        """The step has ended well."""
        self._stop_status()
        self.say(f"{self.title}: {outcome}")

    def _stop_status(self) -> None:
        if self.status is not None:
            self.status.stop()
            self.status = None
