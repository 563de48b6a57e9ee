"""An export behind the policy protocol: one observation in, one chunk of actions out."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dreamzero_sft.conditioning import Conditioner, ConditioningSettings
from dreamzero_sft.model import ModelSettings, build_on_meta, parameter_count
from dreamzero_sft.recipe import DataSettings, SamplerSettings, TokenizerSettings
from dreamzero_sft.sampler import sample_block
from dreamzero_sft.samples import first_frame_condition
from dreamzero_sft.statistics import read_metadata
from dreamzero_sft.transforms import Transform, ViewSettings
from flywheel_shared.errors import UserError
from flywheel_shared.export_folder import read_json, read_weights
from flywheel_shared.video import LinearVideoTokenizer
from flywheel_shared.views import side_by_side, view_of_request


class DreamZeroPolicy:
    """Answers each request from its one observation alone (the published LIBERO evaluation is stateless too)."""

    def __init__(self, export: Path, device: torch.device, sampler: SamplerSettings | None = None) -> None:
        """Load an export.

        Raises:
            UserError: if a file of the export is missing or does not fit the model.
        """
        config = read_json(export / "config.json")
        if config.get("format") != "dreamzero-sft/1":
            raise UserError(
                f"{export}/config.json: format is {config.get('format')!r}, not 'dreamzero-sft/1'"
            )
        self.device = device
        self.data = DataSettings.model_validate_json(json.dumps(config["data"]))
        self.views = ViewSettings.model_validate_json(json.dumps(config["views"]))
        self.sampler = sampler or SamplerSettings.model_validate_json(json.dumps(config["sampler"]))
        conditioning = ConditioningSettings.model_validate_json(json.dumps(config["conditioning"]))
        tokenizer = TokenizerSettings.model_validate_json(json.dumps(config["tokenizer"]))
        settings = ModelSettings.model_validate_json(json.dumps(config["model"]))
        self.model = build_on_meta(settings).eval()
        self.model.load_state_dict(read_weights(export, set(self.model.state_dict())), assign=True)
        self.model.to(device=device, dtype=torch.float32).requires_grad_(False)
        metadata = read_metadata(export / "stats.json", self.data.embodiment)
        self.transform = Transform(metadata, self.views, settings.action_dim, settings.max_state_dim)
        self.tokenizer = LinearVideoTokenizer.load(export / "video_tokenizer.safetensors").to(device)
        self.conditioner = Conditioner.load(export, conditioning.text_len).to(device)
        self.metadata: dict[str, Any] = {
            "model": f"dreamzero-sft {config['run']}",
            "parameters": parameter_count(self.model),
            "action_horizon": settings.num_action_per_block,
            "action_dim": self.transform.action.dim,
            "state_dim": self.transform.state.dim,
            "rate_hz": config["rate_hz"],
            "image_keys": list(self.views.request_keys),
            "image_resolution": [self.views.height, self.views.width],
            "frame_step": settings.num_action_per_block
            // (settings.num_frame_per_block * tokenizer.temporal),
            "versions": {"torch": torch.__version__},
        }

    def infer(self, observation: dict[str, Any]) -> dict[str, Any]:
        """Actions ``float32 [chunk, action_dim]`` for one observation.

        Raises:
            UserError: if the observation lacks a field or has one of the wrong shape; the reason names it.
        """
        started = time.perf_counter()
        video = side_by_side(
            [
                view_of_request(observation, key, self.views.height, self.views.width)
                for key in self.views.request_keys
            ]
        )
        state = self._state(observation)
        prompt = observation.get("prompt")
        if not isinstance(prompt, str) or not prompt.strip():
            raise UserError("prompt: a non-empty string is needed")
        actions = self.act(video, state, prompt)
        return {
            "actions": actions.numpy(),
            "server_timing": {"infer_ms": 1000 * (time.perf_counter() - started)},
        }

    @torch.no_grad()
    def act(self, video: Tensor, state: Tensor, prompt: str) -> Tensor:
        """Actions ``[chunk, action_dim]`` for a picture ``[1, 3, 1, H, W]`` in [-1, 1] and a state ``[1, 1, D]``."""
        video = video.to(self.device)
        latent = self.tokenizer.encode(video)
        settings = self.model.settings
        y = None
        if settings.concat_first_frame_latent:
            blank = latent.new_zeros(*latent.shape[:2], settings.num_frame_per_block, *latent.shape[3:])
            y = first_frame_condition(torch.cat((latent, blank), dim=2))
        text = self.data.prompt_template.format(instruction=prompt)
        _, actions = sample_block(
            self.model,
            latent,
            self.transform.state.normalise(state).to(self.device),
            self.conditioner.encode_prompts([text]),
            self.conditioner.encode_image(video[:, :, 0]),
            self.sampler,
            None if self.sampler.guidance == 1 else self.conditioner.encode_prompts([""]),
            y,
        )
        return self.transform.action.restore(actions.float().cpu())[0]

    def warm_up(self) -> None:
        """Answer one made-up request, so that the first real one is not the slow one."""
        self.infer(self.example())

    def example(self) -> dict[str, Any]:
        """A well-formed request of black pictures."""
        picture = np.zeros((self.views.height, self.views.width, 3), dtype=np.uint8)
        return dict.fromkeys(self.views.request_keys, picture) | {
            "observation/state": np.zeros(self.transform.state.dim, dtype=np.float32),
            "prompt": "do nothing",
        }

    def _state(self, observation: dict[str, Any]) -> Tensor:
        """The state as float32 ``[1, 1, D]``."""
        state = np.asarray(observation.get("observation/state"))
        wanted = (self.transform.state.dim,)
        if state.dtype.kind not in "fiu" or state.shape != wanted or not np.isfinite(state).all():
            found = f"{state.dtype} {list(state.shape)}"
            raise UserError(f"observation/state: {list(wanted)} finite numbers are needed, found {found}")
        return torch.from_numpy(state.astype(np.float32))[None, None]
