"""Progress of work measured in bytes: a bar with rate and time left on a terminal, else plain lines."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LINE_EVERY_S = 5.0


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of `what` on stderr; the yielded function takes bytes done since its last call."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = TextColumn("{task.description:8}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
            task = bar.add_task(what, total=max(total, 1))
            yield lambda count: bar.advance(task, count)
            bar.update(task, completed=max(total, 1))
    else:
        lines = _Lines(what, total)
        yield lines.advance
        lines.show()


class _Lines:
    """Plain progress, for logs. Counts from several threads."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._start = self._shown = time.monotonic()
        self._lock = threading.Lock()

    def advance(self, count: int) -> None:
        """Add `count` bytes; print when a line is due."""
        with self._lock:
            self._done += count
            due = time.monotonic() - self._shown >= _LINE_EVERY_S and self._done < self._total
            if due:
                self._shown = time.monotonic()
        if due:
            self.show()

    def show(self) -> None:
        """Print one line."""
        spent = max(time.monotonic() - self._start, 1e-6)
        rate = self._done / spent
        left = f", {(self._total - self._done) / rate:.0f} s left" if 0 < self._done < self._total else ""
        share = 100 * self._done / self._total if self._total else 100.0
        line = f"{share:3.0f}% of {size(self._total)}, {size(rate)}/s, {spent:.1f} s{left}"
        print(f"{self._what:8} {line}", file=sys.stderr, flush=True)


def size(count: float) -> str:
    """Bytes for people: "1.50 GB", decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
