"""What a run says about itself: a line on the console, a row in metrics.jsonl, TensorBoard."""

import json
import math
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FILE = "metrics.jsonl"
_SHOWN = (
    ("train/loss", "loss", ".4f"),
    ("train/grad_norm", "norm", ".3f"),
    ("train/lr", "lr", ".2e"),
    ("time/step_s", "s/step", ".3f"),
    ("time/data_s", "s data", ".3f"),
    ("perf/tokens_per_s", "tokens/s", ",.0f"),
    ("perf/mfu", "mfu", ".1%"),
)


class MetricLogger:
    """Writes on rank 0 alone; on other ranks every call is free.

    On a terminal a bar with rate and time left stays below the lines.
    """

    def __init__(self, run_folder: Path, rank: int, *, step: int = 0, max_steps: int | None = None) -> None:
        """Continue the files of `run_folder` after `step`: rows past it are dropped, as they come again."""
        self._active = rank == 0
        if not self._active:
            return
        run_folder.mkdir(parents=True, exist_ok=True)
        path = run_folder / FILE
        _drop_rows_after(path, step)
        self._file = path.open("a", encoding="utf-8")
        self._board = _tensorboard(run_folder / "tensorboard", step)
        self._max_steps = max_steps
        self._console = Console()
        self._progress: Progress | None = None
        self._task = TaskID(0)
        if self._console.is_terminal:
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=self._console)
            self._task = self._progress.add_task("train", total=max_steps, completed=step)
            self._progress.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a row: `{"step": step, "time": seconds since 1970, name: value, ...}`; not finite is null."""
        if not self._active:
            return
        row = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, "time": round(time.time(), 3), **row}) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, step)
        self.say(self._line(step, values))
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def say(self, line: str) -> None:
        """A line for the user on stdout."""
        if not self._active:
            return
        if self._progress is not None:
            self._progress.console.print(line, markup=False, highlight=False)
        else:
            print(line, flush=True)

    def warn(self, line: str) -> None:
        """A line for the user on stderr."""
        if not self._active:
            return
        if self._progress is not None:
            self._progress.console.print(line, markup=False, highlight=False, style="yellow")
        else:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Put everything on the disk and take the bar away."""
        if not self._active:
            return
        if self._progress is not None:
            self._progress.stop()
        self._file.close()
        self._board.close()

    def _line(self, step: int, values: Mapping[str, float]) -> str:
        of = f"/{self._max_steps}" if self._max_steps else ""
        terms = [(name, name.removeprefix("train/loss/"), ".4f") for name in values if "train/loss/" in name]
        shown = [_SHOWN[0], *terms, *_SHOWN[1:]]
        texts = [f"{label} {values[name]:{form}}" for name, label, form in shown if name in values]
        return f"step {step}{of}  " + "  ".join(texts)


def peak_memory_gib(device: torch.device) -> float:
    """Most memory this process ever held: on the GPU what PyTorch allocated, on a CPU what was resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    try:
        # ru_maxrss would begin with that of the process we were started from.
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 2**20
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _drop_rows_after(path: Path, step: int) -> None:
    """Rewrite the file without later rows, and without a last one cut short by a kill."""
    if not path.exists():
        return
    kept: list[str] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for line in lines:
        try:
            row: Any = json.loads(line)
        except ValueError:
            continue
        if row["step"] <= step:
            kept.append(line)
    if len(kept) < len(lines):
        beside = path.with_suffix(".tmp")
        beside.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        beside.replace(path)


def _tensorboard(folder: Path, step: int) -> "SummaryWriter":
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=step + 1 if step else None)
