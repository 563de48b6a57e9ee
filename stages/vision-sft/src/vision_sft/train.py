"""`train`: from clips and a recipe to checkpoints."""

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flywheel_shared.cosmos.build import build_sharded
from flywheel_shared.cosmos.export import (
    LINEAR_FILE,
    ClipSettings,
    VideoTokenizerSettings,
    keep_assets,
    open_video_tokenizer,
    tokenizer_of_the_start,
)
from flywheel_shared.cosmos.objective import flow_matching_loss
from flywheel_shared.cosmos.sequence import Sample
from flywheel_shared.cosmos.text import PromptTokenizer
from flywheel_shared.errors import UserError
from flywheel_shared.launch import World
from flywheel_shared.mesh import ParallelDims
from flywheel_shared.trainer import train as run_loop
from flywheel_shared.video import LinearVideoTokenizer
from flywheel_shared.warm_start import write_report
from vision_sft.batches import TrainingBatches, Windows
from vision_sft.clips import Faulty, Window, read_windows
from vision_sft.frames import decode
from vision_sft.recipe import Recipe

_CLIPS_TO_FIT = 128  # that a linear tokenizer is fitted on


def train(recipe: Recipe, root: Path, world: World) -> int:
    """Train, or continue, ``<root>/checkpoints/<run>``; the steps done.

    Raises:
        UserError: if clips are missing or faulty beyond the allowed share, or the run is another recipe's.
    """
    folder = root / "checkpoints" / recipe.run
    prompts = PromptTokenizer(recipe.text)
    if prompts.vocabulary > recipe.model.vocab_size:
        raise UserError(
            f"model.vocab_size = {recipe.model.vocab_size}: the tokenizer has {prompts.vocabulary} ids"
        )
    found = read_windows(recipe.clip_folders(root), recipe.data)
    linear = folder / LINEAR_FILE
    if world.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        if recipe.tokenizer.kind == "linear" and not linear.exists():
            if (kept := tokenizer_of_the_start(recipe.start, root)) is not None:
                kept.save(linear)
            else:
                fit_tokenizer(recipe.tokenizer, found.windows, linear)
    dist.barrier(group=world.checkpoint_group)
    tokenizer = open_video_tokenizer(recipe.tokenizer, linear, world.device)
    windows = Windows(found, recipe, prompts, tokenizer.patch)

    mesh = ParallelDims(recipe.parallel.replicate, recipe.parallel.shard).build(world)
    resumes = any(folder.glob("iter_*"))
    model, report = build_sharded(
        recipe.model, recipe.trainer, mesh, world, None if resumes else recipe.start, root, recipe.trained
    )
    assert isinstance(model, nn.Module)
    if world.rank == 0:
        files = {LINEAR_FILE: linear} if recipe.tokenizer.kind == "linear" else {}
        keep_assets(folder, recipe.export_config(usual_clip(windows.windows)), prompts, files)
        if report is not None:
            write_report(report, folder)
            print(f"{recipe.run}: started from {report.line()}", flush=True)
        _say(recipe, windows, model, world)

    def loss(model: nn.Module, samples: Sequence[Sample]) -> dict[str, Tensor]:
        side = min(samples[0].latents.shape[-2:]) * tokenizer.patch
        terms = flow_matching_loss(model, samples, recipe.objective, side)
        tokens = sum(len(s.text_ids) + _product(s.grid(recipe.model.latent_patch_size)) for s in samples)
        counts = {"samples": len(samples), "tokens": tokens}
        return terms | {name: terms["loss"].new_tensor(float(count)) for name, count in counts.items()}

    batches = TrainingBatches(
        windows, recipe, prompts, tokenizer, world.device, mesh.data_rank, mesh.data_degree
    )
    return run_loop(recipe.trainer, world, mesh, model, loss, batches, folder, folder / ".assets")


def usual_clip(windows: Sequence[Window]) -> ClipSettings:
    """The most frequent shape and rate: what the model makes best."""
    height, width, frames, fps = statistics.mode(
        (window.height, window.width, len(window.frames), window.fps) for window in windows
    )
    return ClipSettings(height=height, width=width, num_frames=frames, fps=fps)


def fit_tokenizer(settings: VideoTokenizerSettings, windows: Sequence[Window], path: Path) -> None:
    """Fit the linear tokenizer on windows drawn from all of them, and write it."""
    generator = torch.Generator().manual_seed(settings.seed)
    chosen = torch.randperm(len(windows), generator=generator)[:_CLIPS_TO_FIT].sort().values.tolist()

    def clips() -> Iterator[Tensor]:
        for number in chosen:
            with contextlib.suppress(Faulty):  # said where it is trained on
                yield decode(windows[number]).transpose(0, 1)

    LinearVideoTokenizer.fit(
        clips(), patch=settings.patch, channels=settings.channels, seed=settings.seed
    ).save(path)


def _product(sizes: tuple[int, int, int]) -> int:
    return sizes[0] * sizes[1] * sizes[2]


def _say(recipe: Recipe, windows: Windows, model: nn.Module, world: World) -> None:
    for fault in windows.faults:
        print(f"skipped: {fault}", flush=True)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(
        f"{recipe.run}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, "
        f"{trained / 1e6:.2f} M trained, on {world.world_size} ranks; {len(windows.windows)} windows of "
        f"{min(windows.costs)} to {max(windows.costs)} tokens, {len(windows.faults)} skipped, "
        f"{recipe.data.token_budget} tokens a micro-batch",
        flush=True,
    )
