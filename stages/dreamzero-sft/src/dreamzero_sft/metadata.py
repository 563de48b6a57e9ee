"""`metadata`: normalisation statistics of a corpus, and the video tokenizer fitted on its pictures."""

import json
import os
import shutil
from pathlib import Path

import torch

from dreamzero_sft.recipe import Recipe
from dreamzero_sft.samples import open_windows
from dreamzero_sft.statistics import build_metadata, read_metadata
from dreamzero_sft.transforms import Transform
from flywheel_shared.errors import UserError
from flywheel_shared.lerobot_corpus import action_state_arrays
from flywheel_shared.video import LinearVideoTokenizer
from flywheel_shared.views import side_by_side

CLIPS = 256  # pictures sequences the tokenizer is fitted on; its covariance has a few hundred columns


def make_metadata(recipe: Recipe, root: Path, overwrite: bool) -> Path:
    """Write ``<root>/metadata/<corpus>/{metadata.json, video_tokenizer.safetensors}``.

    Raises:
        UserError: if the corpus is missing or unsuitable, or the folder exists and ``overwrite`` is False.
    """
    corpus, folder = recipe.corpus_folder(root), recipe.metadata_folder(root)
    if folder.exists() and not overwrite:
        raise UserError(f"{folder}: exists already: pass --overwrite to make it again")
    actions, states, _ = action_state_arrays(
        corpus, action_key=recipe.data.action_key, state_key=recipe.data.state_key
    )
    for what, found, allowed in (
        ("action", actions.shape[1], recipe.model.action_dim),
        ("state", states.shape[1], recipe.model.max_state_dim),
    ):
        if found > allowed:
            raise UserError(f"{corpus}: {what} has {found} dims, the model takes at most {allowed}")
    scratch = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    document = build_metadata(recipe.data.embodiment, actions, states, _cameras(recipe, corpus))
    (scratch / "metadata.json").write_text(json.dumps(document, indent=2))

    metadata = read_metadata(scratch / "metadata.json", recipe.data.embodiment)
    transform = Transform(metadata, recipe.views, recipe.model.action_dim, recipe.model.max_state_dim)
    tokenizer = fit_tokenizer(recipe, corpus, transform)
    tokenizer.save(scratch / "video_tokenizer.safetensors")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(scratch, folder)  # noqa: PTH105 - the rename that makes it whole
    print(f"{folder}: statistics of {len(actions)} rows, a tokenizer fitted on {CLIPS} clips")
    return folder


def _cameras(recipe: Recipe, corpus: Path) -> dict[str, dict[str, object]]:
    """Resolution and rate of each view, from the dataset's own description."""
    info = json.loads((corpus / "meta" / "info.json").read_text())
    found = {}
    for camera in recipe.views.cameras:
        if camera not in info["features"]:
            images = [name for name, f in info["features"].items() if f["dtype"] in ("video", "image")]
            raise UserError(f"{corpus}: no camera {camera!r}; it has {', '.join(images) or 'none'}")
        shape = info["features"][camera]["shape"]
        height, width = (shape[0], shape[1]) if shape[-1] in (1, 3) else (shape[1], shape[2])
        found[camera.removeprefix("observation.images.")] = {
            "resolution": [width, height],
            "channels": 3,
            "fps": info["fps"],
        }
    return found


def fit_tokenizer(recipe: Recipe, corpus: Path, transform: Transform) -> LinearVideoTokenizer:
    """Fit the linear tokenizer on windows drawn from the whole corpus with the recipe's seed."""
    windows = open_windows(recipe, corpus, transform)
    generator = torch.Generator().manual_seed(recipe.tokenizer.seed)
    count = min(CLIPS, len(windows))
    chosen = torch.randperm(len(windows), generator=generator)[:count].sort().values.tolist()
    frames = windows.batch(chosen)["frames"]
    length = 1 + recipe.tokenizer.temporal  # a first frame and a group: all that the tokenizer has bases for
    clips = side_by_side([frames[camera][:, :length] for camera in recipe.views.cameras])
    return LinearVideoTokenizer.fit(
        clips,
        patch=recipe.tokenizer.patch,
        temporal=recipe.tokenizer.temporal,
        channels=recipe.tokenizer.channels,
        seed=recipe.tokenizer.seed,
    )
