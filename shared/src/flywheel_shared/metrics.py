"""Metrics of a run: a line on the console, a row of JSON a logged step, TensorBoard."""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

FILE = "metrics.jsonl"


class MetricLogger:
    """Writes on rank 0 only; on other ranks every call does nothing."""

    def __init__(self, folder: Path, is_first: bool, resumed_step: int = 0) -> None:
        """Open the run's files; rows past ``resumed_step`` are dropped, so that each step stands once."""
        self._active = is_first
        self._started = time.monotonic()
        if not is_first:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE
        _drop_after(path, resumed_step)
        self._rows = path.open("a", encoding="utf-8")
        from torch.utils.tensorboard.writer import SummaryWriter

        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed_step + 1)

    def log(self, step: int, values: Mapping[str, float], total_steps: int) -> None:
        """Record ``values`` of a step (names such as train/loss/video, time/step_s)."""
        if not self._active:
            return
        row: dict[str, Any] = {"step": step, "time": round(time.time(), 3)} | {k: float(v) for k, v in values.items()}
        self._rows.write(json.dumps(row) + "\n")
        self._rows.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, step)
        elapsed = time.monotonic() - self._started
        shown = "  ".join(f"{name.removeprefix('train/')} {_short(value)}" for name, value in values.items())
        self.say(f"step {step}/{total_steps}  {shown}  ({elapsed:.0f} s)")

    def say(self, message: str) -> None:
        """A line for people."""
        if self._active:
            print(message, file=sys.stdout, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._active:
            self._rows.close()
            self._board.close()


def _drop_after(path: Path, step: int) -> None:
    """Keep the rows up to ``step``; a torn last line goes too."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError):
            continue
    beside = path.with_suffix(".tmp")
    beside.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    beside.replace(path)


def _short(value: float) -> str:
    return f"{value:.4g}"
