"""Where the time of a training run goes: steps, data, throughput, goodput."""

import contextlib
import time
from collections.abc import Iterator


class Pace:
    """Clocks of the loop. Rows average over the steps since the row before."""

    def __init__(self, began: float) -> None:
        """`began`: when the run did, by `time.monotonic()`; goodput counts from there."""
        self._began = began
        self._mark = time.monotonic()
        self._data_began = 0.0
        self._steps = 0
        self._step_s = self._data_s = 0.0
        self._all_steps_s = 0.0

    @contextlib.contextmanager
    def data(self) -> Iterator[None]:
        """Time spent waiting for a batch."""
        began = time.monotonic()
        yield
        self._data_s += time.monotonic() - began

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Time that is no step's: saving."""
        began = time.monotonic()
        yield
        self._mark += time.monotonic() - began

    def step_ends(self) -> None:
        """Count the time since the step before ended, waiting for data included."""
        now = time.monotonic()
        self._steps += 1
        self._step_s += now - self._mark
        self._all_steps_s += now - self._mark
        self._mark = now

    def row(
        self, tokens_per_step: float, flops_per_step: float | None, peak_flops: float | None
    ) -> dict[str, float]:
        """time/step_s, time/data_s (s a step), perf/goodput (share of the run spent in steps).

        With tokens (not 0): perf/tokens_per_s. With FLOPs of a step and peak FLOP/s, of all ranks: perf/mfu.
        """
        step_s, data_s = self._step_s / self._steps, self._data_s / self._steps
        self._steps, self._step_s, self._data_s = 0, 0.0, 0.0
        row = {
            "time/step_s": step_s,
            "time/data_s": data_s,
            "perf/goodput": self._all_steps_s / (time.monotonic() - self._began),
        }
        if tokens_per_step:
            row["perf/tokens_per_s"] = tokens_per_step / step_s
        if flops_per_step is not None and peak_flops is not None:
            row["perf/mfu"] = flops_per_step / step_s / peak_flops
        return row
