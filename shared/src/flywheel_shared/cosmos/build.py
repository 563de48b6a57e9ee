"""A sharded model to train: made on the meta device, so that no rank ever holds more than its shards."""

import functools
from pathlib import Path
from typing import Literal

from torch.distributed.fsdp import FSDPModule

from flywheel_shared.cosmos.model import CosmosModel, ModelSettings, freeze_text_tower, initial_value
from flywheel_shared.fsdp import fill_shards, shard_model
from flywheel_shared.launch import World
from flywheel_shared.mesh import Mesh
from flywheel_shared.trainer import TrainerSettings
from flywheel_shared.warm_start import WarmStart, WarmStartSettings, warm_start

Trained = Literal["all", "generation"]


def build_sharded(
    settings: ModelSettings,
    trainer: TrainerSettings,
    mesh: Mesh,
    world: World,
    start: WarmStartSettings | None = None,
    root: Path = Path(),
    trained: Trained = "all",
) -> tuple[FSDPModule, WarmStart | None]:
    """The model over the mesh, drawn from the trainer's seed and then started warm where that is asked for.

    The same seed gives the same weights on every mesh. Raises `UserError` as `warm_start` does.
    """
    model = CosmosModel.on_meta(settings)
    if trained == "generation":
        freeze_text_tower(model)
    sharded = shard_model(
        model,
        mesh,
        list(model.layers),  # type: ignore[arg-type]
        precision=trainer.precision,
        activation_checkpointing=trainer.activation_checkpointing,
        compile=trainer.compile,
        cast_inputs=False,
    )
    fill_shards(
        model,
        world.device,
        trainer.seed,
        functools.partial(initial_value, model),
    )
    report = None
    if start is not None:
        report = warm_start(model, start, root, world)
    return sharded, report
