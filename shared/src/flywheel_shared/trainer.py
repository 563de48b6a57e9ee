"""The training loop, for every model: it reads from top to bottom.

A stage brings a sharded model, a loss and batches; this brings accumulation, clipping, the learning rate, the skip of
non-finite steps, the average, metrics, checkpoints, resume and a clean end on SIGTERM.
"""

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from flywheel_shared.checkpoint import CheckpointManager, State
from flywheel_shared.average import Average
from flywheel_shared.fsdp import ActivationCheckpointing, Precision, clip_grad_norm
from flywheel_shared.launch import World
from flywheel_shared.mesh import Mesh
from flywheel_shared.metrics import MetricLogger
from flywheel_shared.recipe import Section


class TrainerSettings(Section):
    """How long, how fast, how safely.

    Attributes:
        max_steps: optimiser steps of the whole run.
        learning_rate: peak; reached after ``warmup_steps``, then a cosine to ``min_learning_rate_ratio`` of it.
        weight_decay: of parameters with two dims or more.
        grad_accumulation: micro-batches of a step on each rank.
        ema_decay: of the parameters' average; 0 keeps none.
        checkpoint_every: steps between saves (the last step is always saved).
        max_skipped: non-finite steps in a row that end the run.
    """

    max_steps: int = Field(ge=1)
    learning_rate: float = Field(gt=0)
    min_learning_rate_ratio: float = Field(default=0.0, ge=0, le=1)
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=1e-5, ge=0)
    betas: tuple[float, float] = (0.95, 0.999)
    eps: float = 1e-8
    clip_norm: float = Field(default=1.0, gt=0)
    grad_accumulation: int = Field(default=1, ge=1)
    precision: Precision = "fp32"
    activation_checkpointing: ActivationCheckpointing = "none"
    compile: bool = False
    ema_decay: float = Field(default=0.0, ge=0, lt=1)
    checkpoint_every: int = Field(default=500, ge=1)
    keep_last: int = Field(default=2, ge=1)
    log_every: int = Field(default=10, ge=1)
    max_skipped: int = Field(default=10, ge=1)
    seed: int = 0


class Batches(Protocol):
    """Endless micro-batches of one rank, with a position that can be saved."""

    def __next__(self) -> Any: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


LossFunction = Callable[[nn.Module, Any], dict[str, Tensor]]


def learning_rate(settings: TrainerSettings, step: int) -> float:
    """The rate of step 1, 2, ...: linear warm-up, then a cosine that ends at the last step."""
    if step <= settings.warmup_steps:
        return settings.learning_rate * step / settings.warmup_steps
    whole = max(1, settings.max_steps - settings.warmup_steps)
    done = min(1.0, (step - settings.warmup_steps) / whole)
    floor = settings.min_learning_rate_ratio
    return settings.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))


def make_optimizer(model: nn.Module, settings: TrainerSettings) -> torch.optim.AdamW:
    """AdamW; vectors (norms, biases) are not decayed."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        foreach=True,
    )


def train(
    settings: TrainerSettings,
    world: World,
    mesh: Mesh,
    model: FSDPModule,
    loss_function: LossFunction,
    batches: Batches,
    folder: Path,
    assets: Path | None = None,
    tokens_per_batch: int = 0,
) -> int:
    """Train, or continue, a run.

    Args:
        settings: see TrainerSettings.
        world: this rank.
        mesh: what the model is sharded over.
        model: sharded over the ranks, with weights to start from.
        loss_function: the scalar ``loss`` of a micro-batch and terms to log beside it.
        batches: this rank's micro-batches.
        folder: the run's folder.
        assets: files to go into every checkpoint.
        tokens_per_batch: tokens of a micro-batch, for the throughput.

    Returns:
        Steps done: ``max_steps``, or fewer after SIGTERM.

    Raises:
        RuntimeError: after ``max_skipped`` non-finite steps in a row.
    """
    optimizer = make_optimizer(model, settings)
    average = Average(model, settings.ema_decay) if settings.ema_decay else None
    state = State(model, optimizer, average)
    checkpoints = CheckpointManager(folder, world, settings.keep_last, assets, _say(world))

    step, skipped, skipped_in_row = 0, 0, 0
    torch.manual_seed(settings.seed + world.rank)
    if (newest := checkpoints.latest()) is not None:
        position = checkpoints.load(newest, state)
        step, skipped = position["step"], position["skipped"]
        batches.load_state_dict(_mine(position["batches"], world))
        _say(world)(f"continuing {folder.name} from {newest.name}")
    if settings.warmup_steps >= settings.max_steps:
        _say(world)(
            f"warning: warmup_steps = {settings.warmup_steps} is not below max_steps = {settings.max_steps}: "
            f"the peak learning rate {settings.learning_rate:g} is never held"
        )

    model.train()
    with MetricLogger(folder, world.rank == 0, step) as metrics, _stop_requests() as stop_requested:
        terms: list[dict[str, float]] = []
        window_started, window_first, data_s, busy_s = time.monotonic(), step, 0.0, 0.0
        run_started = time.monotonic()
        while step < settings.max_steps:
            step_started = time.monotonic()

            # Forward and backward over the micro-batches; gradients meet at the last.
            losses: dict[str, Tensor] = {}
            for micro in range(settings.grad_accumulation):
                data_started = time.monotonic()
                batch = next(batches)
                data_s += time.monotonic() - data_started
                model.set_requires_gradient_sync(micro == settings.grad_accumulation - 1)
                found = loss_function(model, batch)
                (found["loss"] / settings.grad_accumulation).backward()
                for name, value in found.items():
                    losses[name] = losses.get(name, 0.0) + value.detach() / settings.grad_accumulation

            # One collective and one wait for the device: the norm, the losses, and whether to stop.
            names = list(losses)
            sums = torch.stack([losses[name].float() for name in names] + [stop_flag(stop_requested(), world)])
            norm, totals = clip_grad_norm(model.parameters(), settings.clip_norm, mesh, sums)
            stop = totals.pop() > 0
            row = {name: total / world.world_size for name, total in zip(names, totals, strict=True)}
            bad = not (math.isfinite(norm) and math.isfinite(row["loss"]))
            if bad:
                skipped, skipped_in_row = skipped + 1, skipped_in_row + 1
                metrics.say(f"step {step + 1}: loss or gradient is not finite; skipped ({skipped_in_row} in a row)")
                if skipped_in_row >= settings.max_skipped:
                    raise RuntimeError(
                        f"{skipped_in_row} non-finite steps in a row: lower trainer.learning_rate or look at the data"
                    )
            else:
                skipped_in_row = 0
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(settings, step + 1)
                optimizer.step()
                if average is not None:
                    average.update(model, step + 1)
            optimizer.zero_grad(set_to_none=True)
            step += 1
            busy_s += time.monotonic() - step_started
            if not bad:
                terms.append(row | {"grad_norm": norm})

            # Metrics of the steps since the last row.
            if step % settings.log_every == 0 or step == settings.max_steps or stop:
                count, elapsed = step - window_first, time.monotonic() - window_started
                values = _means(terms)
                values |= {
                    "train/lr": learning_rate(settings, step),
                    "train/skipped": skipped,
                    "time/step_s": elapsed / count,
                    "time/data_s": data_s / count,
                    "perf/goodput": busy_s / (time.monotonic() - run_started),
                }
                if tokens_per_batch:
                    per_step = tokens_per_batch * settings.grad_accumulation * world.world_size
                    values["perf/tokens_per_s"] = per_step * count / elapsed
                if world.device.type == "cuda":
                    values["mem/peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
                if checkpoints.last_save_s:
                    values |= {"ckpt/save_s": checkpoints.last_save_s, "ckpt/stall_s": checkpoints.last_stall_s}
                metrics.log(step, values, settings.max_steps)
                terms, window_started, window_first, data_s = [], time.monotonic(), step, 0.0

            # Checkpoints.
            last = stop or step == settings.max_steps
            if last or step % settings.checkpoint_every == 0:
                checkpoints.wait()  # its messages and those of the next line share a group
                position = {"skipped": skipped, "batches": _all_positions(batches, world)}
                checkpoints.save(step, state, position, blocking=last)
            if stop:
                metrics.say(f"asked to stop: saved at step {step}")
                break
        checkpoints.wait()
    return step


def _say(world: World) -> Callable[[str], None]:
    return (lambda message: print(message, flush=True)) if world.rank == 0 else (lambda message: None)


@contextmanager
def _stop_requests() -> Iterator[Callable[[], bool]]:
    """Note SIGTERM instead of dying from it; gives a function that says whether it came."""
    asked = False

    def note(*_: object) -> None:
        nonlocal asked
        asked = True

    previous = signal.signal(signal.SIGTERM, note)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGTERM, previous)


def stop_flag(requested: bool, world: World) -> Tensor:
    """1 where this rank was asked to stop, as a summand."""
    return torch.tensor(float(requested), device=world.device)


def _means(terms: list[dict[str, float]]) -> dict[str, float]:
    """Means over steps of what is logged, as train/<name>."""
    if not terms:
        return {}
    return {f"train/{name}": sum(term[name] for term in terms) / len(terms) for name in terms[0]}


def _all_positions(batches: Batches, world: World) -> list[dict[str, Any]]:
    """Every rank's data position, in order."""
    positions: list[dict[str, Any]] = [{}] * world.world_size
    dist.all_gather_object(positions, batches.state_dict(), group=world.checkpoint_group)
    return positions


def _mine(positions: list[dict[str, Any]], world: World) -> dict[str, Any]:
    """This rank's data position; after a change of the world's size, the first rank's."""
    return positions[world.rank] if len(positions) == world.world_size else positions[0]
