"""`train`: from a corpus and a recipe to checkpoints."""

import json
import shutil
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dreamzero_sft.conditioning import Conditioner
from dreamzero_sft.layout import Layout
from dreamzero_sft.model import WorldActionModel, build_on_meta, parameter_count
from dreamzero_sft.objective import Batch, Schedule, flow_matching_loss
from dreamzero_sft.recipe import Recipe
from dreamzero_sft.samples import Collator, TrainingBatches, open_windows
from dreamzero_sft.statistics import read_metadata
from dreamzero_sft.transforms import Transform
from flywheel_shared.errors import UserError
from flywheel_shared.fsdp import shard_model
from flywheel_shared.launch import World
from flywheel_shared.lerobot_windows import ShuffledBatches
from flywheel_shared.mesh import Mesh, ParallelDims
from flywheel_shared.trainer import train as run_loop
from flywheel_shared.video import LinearVideoTokenizer


def train(recipe: Recipe, root: Path, world: World) -> int:
    """Train, or continue, ``<root>/checkpoints/<run>``; the steps done.

    Raises:
        UserError: if corpus or metadata are missing, or the run was started with another model.
    """
    folder = root / "checkpoints" / recipe.run
    metadata_folder = recipe.metadata_folder(root)
    metadata = read_metadata(metadata_folder / "metadata.json", recipe.data.embodiment)
    transform = Transform(metadata, recipe.views, recipe.model.action_dim, recipe.model.max_state_dim)
    windows = open_windows(recipe, recipe.corpus_folder(root), transform)
    tokenizer = LinearVideoTokenizer.load(metadata_folder / "video_tokenizer.safetensors").to(world.device)
    conditioner = Conditioner.from_settings(recipe.conditioning).to(world.device)

    mesh = ParallelDims(recipe.parallel.replicate, recipe.parallel.shard).build(world)
    model = sharded_model(recipe, mesh, world)
    layout = window_layout(recipe)
    if world.rank == 0:
        _write_assets(recipe, folder, metadata_folder, conditioner, windows.fps)
        print(
            f"{recipe.run}: {parameter_count(build_on_meta(recipe.model)) / 1e6:.2f} M parameters "
            f"on {world.world_size} ranks, "
            f"{layout.tokens} tokens a window, {len(windows)} windows, "
            f"batch {recipe.data.batch_size * recipe.trainer.grad_accumulation * world.world_size}",
            flush=True,
        )

    schedule = Schedule(recipe.objective.shift, world.device)

    def loss(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return flow_matching_loss(model, batch, schedule, recipe.objective, layout)

    shuffled = ShuffledBatches(
        windows,
        recipe.data.batch_size,
        seed=recipe.trainer.seed,
        rank=mesh.data_rank,
        world_size=mesh.data_degree,
    )
    batches = TrainingBatches(shuffled, Collator(recipe, transform, tokenizer, conditioner), world.device)
    tokens = recipe.data.batch_size * layout.tokens
    return run_loop(
        recipe.trainer, world, mesh, model, loss, batches, folder, folder / ".assets", tokens_per_batch=tokens
    )


def sharded_model(recipe: Recipe, mesh: Mesh, world: World) -> FSDPModule:
    """The model with random weights, sharded. Every rank draws the same weights from the recipe's seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.trainer.seed)
        model = WorldActionModel(recipe.model)
        model.init_weights()
    model.to(world.device)
    return shard_model(
        model,
        mesh,
        list(model.blocks),
        precision=recipe.trainer.precision,
        activation_checkpointing=recipe.trainer.activation_checkpointing,
        compile=recipe.trainer.compile,
        cast_inputs=False,
    )


def window_layout(recipe: Recipe) -> Layout:
    """The token layout of a training window."""
    patch = recipe.tokenizer.patch
    shape = (recipe.views.height // patch, recipe.views.width * len(recipe.views.cameras) // patch)
    return build_on_meta(recipe.model).layout(torch.empty(shape, device="meta"), recipe.data.blocks)


def _write_assets(
    recipe: Recipe, folder: Path, metadata_folder: Path, conditioner: Conditioner, rate_hz: float
) -> None:
    """What exports need, kept beside the run; a run that was started otherwise is not continued."""
    config = json.dumps(recipe.export_config(rate_hz), indent=2)
    assets = folder / ".assets"
    if (assets / "config.json").is_file() and (assets / "config.json").read_text() != config:
        if any(folder.glob("iter_*")):
            raise UserError(
                f"{folder}: was started with another recipe: choose another `run`, or remove the folder"
            )
        shutil.rmtree(assets)
    if assets.is_dir():
        return
    scratch = folder / ".assets.tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    (scratch / "config.json").write_text(config)
    shutil.copyfile(metadata_folder / "metadata.json", scratch / "stats.json")
    shutil.copyfile(metadata_folder / "video_tokenizer.safetensors", scratch / "video_tokenizer.safetensors")
    conditioner.save(scratch)
    scratch.rename(assets)
