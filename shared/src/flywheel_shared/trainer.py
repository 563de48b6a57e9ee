"""The training loop: one function, read from top to bottom.

with distributed() as world:
    mesh = ParallelDims().build(world)
    model = shard_model(build(), mesh, blocks, precision=settings.precision)
    steps = train(settings, world, mesh, model, loss_function, batches, folder)
"""

import contextlib
import hashlib
import math
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from flywheel_shared.average import Average
from flywheel_shared.checkpoint import CheckpointManager, Loaded
from flywheel_shared.fsdp import ActivationCheckpointing, Precision, clip_grad_norm
from flywheel_shared.launch import World
from flywheel_shared.mesh import Mesh
from flywheel_shared.metrics import MetricLogger, peak_memory_gib
from flywheel_shared.optimizer import learning_rate_at, make_adamw
from flywheel_shared.pace import Pace
from flywheel_shared.recipe import Section
from flywheel_shared.stop_request import StopRequest

_HISTORY = 1000


class TrainerSettings(Section):
    """How long, how fast, how safely.

    Attributes:
        max_steps: optimiser steps of the whole run, resumed parts included.
        learning_rate: peak; reached after `warmup_steps`, then a cosine to `min_learning_rate_ratio` of it.
        learning_rate_multipliers: of parameters whose names begin so.
        weight_decay: of parameters with two dims or more.
        clip_norm: gradients are scaled to this norm over all parameters at most.
        grad_accumulation: micro-batches of a step on each rank.
        precision: what blocks compute in; parameters, their average and the optimiser's state are float32.
        ema_decay: of the parameters' average; 0 keeps none.
        checkpoint_every: steps between saves (the last step is always saved).
        keep_last, keep_every: the newest so many checkpoints stay, and those of steps that are multiples.
        log_every: steps between rows of metrics, which average over the steps between.
        max_skipped: non-finite steps in a row that end the run.
    """

    max_steps: int = Field(ge=1)
    learning_rate: float = Field(gt=0)
    learning_rate_multipliers: dict[str, float] = Field(default_factory=dict)
    min_learning_rate_ratio: float = Field(default=0.0, ge=0, le=1)
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=1e-5, ge=0)
    betas: tuple[float, float] = (0.95, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    clip_norm: float = Field(default=1.0, gt=0)
    grad_accumulation: int = Field(default=1, ge=1)
    precision: Precision = "fp32"
    activation_checkpointing: ActivationCheckpointing = "none"
    compile: bool = False
    ema_decay: float = Field(default=0.0, ge=0, lt=1)
    checkpoint_every: int = Field(default=500, ge=1)
    keep_last: int = Field(default=2, ge=1)
    keep_every: int = Field(default=0, ge=0)
    log_every: int = Field(default=10, ge=1)
    max_skipped: int = Field(default=10, ge=1)
    seed: int = 0


class Batches(Protocol):
    """An endless source of micro-batches for this rank that knows where it stands."""

    def __next__(self) -> Any: ...

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, in JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        ...


LossFunction = Callable[[nn.Module, Any], dict[str, Tensor]]


class TrainingFailed(Exception):
    """The run cannot go on: the message says at which step and why."""


@dataclass
class _State:
    """What the loop carries from step to step, all of it saved."""

    step: int = 0
    updates: int = 0  # steps that were not skipped
    skipped: int = 0
    skipped_in_a_row: int = 0
    since_row: int = 0  # updates since the last row of metrics, and the sums of their losses
    sums: dict[str, float] = field(default_factory=dict)
    loss_history: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_HISTORY))

    def take_in(self, values: dict[str, float]) -> None:
        """Count an update and its losses."""
        self.updates += 1
        self.skipped_in_a_row = 0
        self.since_row += 1
        self.sums = {name: self.sums.get(name, 0.0) + value for name, value in values.items()}

    def row(self) -> dict[str, float]:
        """Means since the last row."""
        means = {name: total / self.since_row for name, total in self.sums.items()}
        if means:
            self.loss_history.append((self.step, means["train/loss"]))
        self.since_row, self.sums = 0, {}
        return means

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "loss_history": list(self.loss_history)}

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> Self:
        history = deque(((step, loss) for step, loss in state["loss_history"]), maxlen=_HISTORY)
        return cls(**{**state, "loss_history": history})


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
    flops_per_step: float | None = None,
    peak_flops: float | None = None,
) -> int:
    """Train, or continue, a run; returns the steps done: `max_steps`, or fewer after SIGTERM or Ctrl-C.

    Args:
        settings: see `TrainerSettings`.
        world: this rank.
        mesh: what the model is sharded over.
        model: from `shard_model`, with weights to start from.
        loss_function: takes the model and a micro-batch, gives scalars: "loss", whose gradient is taken, and
            terms to log beside it ("loss/video"). Means over the rank's micro-batch: their means over
            micro-batches and ranks are trained on and logged. It must call the model itself (hooks shard it)
            and may draw from PyTorch's global generator, which differs between data ranks and is saved.
        batches: this rank's micro-batches.
        folder: the run's folder.
        assets: folder whose files go into every checkpoint.
        tokens_per_batch: tokens of a micro-batch, for the throughput; where they vary, `loss_function` gives
            them as "tokens" beside the losses.
        flops_per_step, peak_flops: FLOPs of a step and peak FLOP/s, of all ranks together, for the MFU.

    A step whose losses or gradient norm are not finite is skipped on all ranks. A request to stop on any rank
    ends the run on all after the step at hand, with a checkpoint.

    Raises:
        TrainingFailed: after `max_skipped` skipped steps in a row, or if the last checkpoint was not saved.
        UserError: if another process trains into `folder`, or its checkpoints are another model's.
    """
    assert isinstance(model, nn.Module)
    began = time.monotonic()
    optimizer = make_adamw(
        model.named_parameters(),
        learning_rate=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        multipliers=settings.learning_rate_multipliers,
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    average = Average(model, settings.ema_decay) if settings.ema_decay else None

    checkpoints = CheckpointManager(
        folder, world, keep_last=settings.keep_last, keep_every=settings.keep_every
    )
    loaded = checkpoints.load(model, optimizer, None if average is None else average.state_dict())
    state = _State()
    if loaded is not None:
        state = _State.from_json(loaded.trainer_state["loop"])
        batches.load_state_dict((loaded.rank_state or loaded.trainer_state)["data"])
    if loaded is None or loaded.rank_state is None:
        _seed(settings.seed, state.step, mesh.data_rank)

    logger = MetricLogger(folder, world.rank, step=state.step, max_steps=settings.max_steps)
    checkpoints.say = logger.warn
    _say_how_it_begins(logger, settings, state, loaded)
    pace = Pace(began)

    def tokens_per_step(row: dict[str, float]) -> float:
        counted = row.get("train/tokens", tokens_per_batch)
        return counted * settings.grad_accumulation * mesh.data_degree

    model.train()

    def save(blocking: bool) -> bool:
        position = batches.state_dict()
        return checkpoints.save(
            state.step,
            model,
            optimizer,
            {"loop": state.to_json(), "data": position},
            rank_state={"data": position},
            ema=None if average is None else average.state_dict(),
            assets=assets,
            blocking=blocking,
        )

    with StopRequest() as stop, contextlib.closing(logger), contextlib.closing(checkpoints):
        first = state.step + 1
        stopping = False
        while state.step < settings.max_steps and not stopping:
            state.step += 1
            rate = learning_rate_at(
                state.step,
                peak=settings.learning_rate,
                warmup_steps=settings.warmup_steps,
                max_steps=settings.max_steps,
                min_ratio=settings.min_learning_rate_ratio,
            )
            for group in optimizer.param_groups:
                group["lr"] = rate * group["lr_multiplier"]

            totals: dict[str, Tensor] = {}
            for micro_batch in range(settings.grad_accumulation):
                with pace.data():
                    batch = next(batches)
                # Gradients travel once a step, with those of the last micro-batch.
                model.set_requires_gradient_sync(micro_batch == settings.grad_accumulation - 1)
                terms = loss_function(model, batch)
                (terms["loss"] / settings.grad_accumulation).backward()
                for name, term in terms.items():
                    term = term.detach().float()
                    totals[name] = totals[name] + term if name in totals else term

            # One collective and one look at its result settle the norm, the losses and whether to stop.
            shared = torch.stack([*totals.values(), torch.full_like(totals["loss"], stop.requested)])
            norm, (*sums, stop_votes) = clip_grad_norm(trained, settings.clip_norm, mesh, shared)
            stopping = stop_votes > 0
            means = [total / (world.world_size * settings.grad_accumulation) for total in sums]
            losses = {f"train/{name}": mean for name, mean in zip(totals, means, strict=True)}

            if math.isfinite(norm) and all(map(math.isfinite, means)):
                optimizer.step()
                if average is not None:
                    average.update(state.updates)
                state.take_in({**losses, "train/grad_norm": norm})
            else:
                _skip(state, settings, logger, losses, norm)
            optimizer.zero_grad(set_to_none=True)
            pace.step_ends()

            last = state.step == settings.max_steps or stopping
            if state.step % settings.log_every == 0 or last:
                row = state.row()
                row |= {"train/lr": rate, "train/skipped": state.skipped}
                row |= pace.row(tokens_per_step(row), flops_per_step, peak_flops)
                row["mem/peak_gib"] = peak_memory_gib(world.device)
                logger.log(state.step, row | checkpoints.row())
            if state.step % settings.checkpoint_every == 0 and not last:
                with pace.pause():
                    save(blocking=False)

        if stopping:
            logger.say(f"stop requested: saving step {state.step} of {settings.max_steps}")
        if state.step >= first and not save(blocking=True):
            raise TrainingFailed(
                f"step {state.step}: the last checkpoint could not be saved: {checkpoints.last_error}"
            )
    return state.step


def _say_how_it_begins(
    logger: MetricLogger, settings: TrainerSettings, state: _State, loaded: Loaded | None
) -> None:
    if settings.warmup_steps >= settings.max_steps:
        logger.warn(
            f"warmup_steps {settings.warmup_steps} is not below max_steps {settings.max_steps}: "
            "the learning rate never reaches its peak, or ends there"
        )
    if loaded is not None:
        logger.say(f"resumed from {loaded.folder} at step {state.step} of {settings.max_steps}")
        if loaded.rank_state is None:
            logger.warn(
                f"the checkpoint is that of {loaded.trainer_state['world_size']} ranks: "
                "random numbers start afresh, and data goes on at about the same place"
            )


def _skip(
    state: _State, settings: TrainerSettings, logger: MetricLogger, losses: dict[str, float], norm: float
) -> None:
    state.skipped += 1
    state.skipped_in_a_row += 1
    said = ", ".join(f"{name} {value:g}" for name, value in losses.items())
    logger.warn(f"step {state.step} skipped: {said}, gradient norm {norm:g}")
    if state.skipped_in_a_row >= settings.max_skipped:
        raise TrainingFailed(
            f"step {state.step}: loss or gradients were not finite for {state.skipped_in_a_row} steps in a "
            f"row ({said}, gradient norm {norm:g}); lower the learning rate or look at the data"
        )


def _seed(seed: int, step: int, data_rank: int) -> None:
    """Give each data rank random numbers of its own; ranks that share a sample share them."""
    digest = hashlib.sha256(f"{seed} {step} {data_rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:7]))
    random.seed(digest)
    np.random.seed(int.from_bytes(digest[7:11]))
