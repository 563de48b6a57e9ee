"""The DreamZero world-action model: a causal video diffusion transformer that also denoises robot actions.

Structure and parameter names follow the published checkpoints (under their ``action_head.model.`` prefix), so that
real weights load by stripping a prefix. Time runs from 0 (clean) to 1000 (noise).
"""

import math
from typing import Literal

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from dreamzero_sft.action_modules import ActionEncoder, EmbodimentLinear, EmbodimentMLP
from dreamzero_sft.attention import CrossAttention, KVCache, RMSNorm, Rotation, SelfAttention
from dreamzero_sft.layout import Layout
from dreamzero_sft.rope import line_angles, rotation, video_angles
from flywheel_shared.recipe import Section


class ModelSettings(Section):
    """Sizes of a world-action model; field names are the published constructor's where one exists.

    ``in_dim`` counts noisy latent channels plus, for ``i2v`` with ``concat_first_frame_latent``, the mask and
    first-frame channels of ``y``. ``clip_dim`` is the width of the image features (CLIP ViT-H: 1280).
    """

    model_type: Literal["i2v", "ti2v"] = "ti2v"
    dim: int
    ffn_dim: int
    num_heads: int
    num_layers: int
    in_dim: int
    out_dim: int
    patch_size: tuple[Literal[1], int, int] = (1, 2, 2)
    freq_dim: int = 256
    text_dim: int = 4096
    clip_dim: int = 1280
    action_dim: int = 32
    max_state_dim: int = 64
    hidden_size: int = 1024
    num_frame_per_block: int = 2
    num_action_per_block: int = 24
    num_state_per_block: int = 1
    concat_first_frame_latent: bool = False
    noisy_first_frame: bool = True
    eps: float = 1e-6

    @model_validator(mode="after")
    def _heads_divide_dim(self) -> "ModelSettings":
        if self.dim % self.num_heads or (self.dim // self.num_heads) % 2:
            raise ValueError(f"dim {self.dim} over num_heads {self.num_heads} must give an even head size")
        return self


def time_sinusoid(timestep: Tensor, dim: int) -> Tensor:
    """Cosine then sine of ``t * 1e4^(-i / (dim / 2))``: ``[...] -> [..., dim]`` float64 (Wan's time code)."""
    half = dim // 2
    rate = 10_000.0 ** -(torch.arange(half, dtype=torch.float64, device=timestep.device) / half)
    phase = timestep.double().unsqueeze(-1) * rate
    return torch.cat((phase.cos(), phase.sin()), dim=-1)


def modulation_parts(vectors: Tensor, runs: Tensor, parameter: Tensor) -> tuple[Tensor, ...]:
    """Shift, scale and gate of every token, twice, from vectors that runs of tokens share.

    Args:
        vectors: ``[B, R, 6, dim]``, one set a run.
        runs: run of every token, ``[L]`` int64.
        parameter: the block's own ``[1, 6, dim]``, added to every run's.

    Returns:
        Six tensors ``[B, L, dim]``.
    """
    parts = (vectors + parameter.unsqueeze(1)).unbind(2)
    return tuple(part.index_select(1, runs) for part in parts)


class Block(nn.Module):
    """A transformer block: self-attention over the blocks, cross-attention to the prompt, feed-forward."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        dim = settings.dim
        self.eps = settings.eps
        self.self_attn = SelfAttention(dim, settings.num_heads, settings.eps)
        self.norm3 = nn.LayerNorm(dim, eps=settings.eps)
        self.cross_attn = CrossAttention(dim, settings.num_heads, settings.eps)
        self.ffn = nn.Sequential(
            nn.Linear(dim, settings.ffn_dim), nn.GELU(approximate="tanh"), nn.Linear(settings.ffn_dim, dim)
        )
        self.modulation = nn.Parameter(torch.empty(1, 6, dim))

    def _norm(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return layer_norm(x, x.shape[-1:], eps=self.eps) * (1 + scale) + shift

    def forward(
        self,
        x: Tensor,
        vectors: Tensor,
        runs: Tensor,
        rotation: Rotation,
        text: Tensor,
        image: Tensor | None,
        layout: Layout | None = None,
        mode: Literal["train", "observe", "denoise"] = "train",
        cache: KVCache | None = None,
        isolate_state: bool = True,
    ) -> Tensor:
        """``x [B, L, dim] -> [B, L, dim]``; ``vectors [B, R, 6, dim]`` and ``runs [L]`` as in modulation_parts."""
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation_parts(vectors, runs, self.modulation)
        h = self._norm(x, shift1, scale1)
        if mode == "train":
            assert layout is not None
            h = self.self_attn(h, rotation, layout)
        elif mode == "observe":
            assert cache is not None
            h = self.self_attn.observe(h, rotation, cache)
        else:
            assert cache is not None
            assert layout is not None
            h = self.self_attn.denoise(h, rotation, cache, layout.states_per_block, isolate_state)
        x = x + h * gate1
        x = x + self.cross_attn(self.norm3(x), text, image)
        return x + self.ffn(self._norm(x, shift2, scale2)) * gate2


class Head(nn.Module):
    """Video tokens to the patches of the predicted velocity."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.eps = settings.eps
        self.head = nn.Linear(settings.dim, math.prod(settings.patch_size) * settings.out_dim)
        self.modulation = nn.Parameter(torch.empty(1, 2, settings.dim))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """``x [B, F, S, dim]``, ``time [B, F, dim]`` ``-> [B, F, S, patch * out_dim]``."""
        shift, scale = (self.modulation.unsqueeze(1) + time.unsqueeze(2)).unsqueeze(2).unbind(3)
        return self.head(layer_norm(x, x.shape[-1:], eps=self.eps) * (1 + scale) + shift)


class ImageProjection(nn.Module):
    """Image features to context tokens."""

    def __init__(self, clip_dim: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Sequential(
            nn.LayerNorm(clip_dim),
            nn.Linear(clip_dim, clip_dim),
            nn.GELU(),
            nn.Linear(clip_dim, dim),
            nn.LayerNorm(dim),
        )

    def forward(self, features: Tensor) -> Tensor:
        """``[B, I, clip_dim] -> [B, I, dim]``."""
        return self.proj(features)


class WorldActionModel(nn.Module):
    """Predicts the velocity (noise minus data) of future video latents and of actions."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.settings = s = settings
        self.state_encoder = EmbodimentMLP(s.max_state_dim, s.hidden_size, s.dim)
        self.action_encoder = ActionEncoder(s.action_dim, s.dim)
        self.action_decoder = EmbodimentMLP(s.dim, s.hidden_size, s.action_dim)
        self.patch_embedding = nn.Conv3d(s.in_dim, s.dim, kernel_size=s.patch_size, stride=s.patch_size)
        self.text_embedding = nn.Sequential(
            nn.Linear(s.text_dim, s.dim), nn.GELU(approximate="tanh"), nn.Linear(s.dim, s.dim)
        )
        self.time_embedding = nn.Sequential(nn.Linear(s.freq_dim, s.dim), nn.SiLU(), nn.Linear(s.dim, s.dim))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(s.dim, 6 * s.dim))
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.num_layers))
        self.head = Head(s)
        self.img_emb = ImageProjection(s.clip_dim, s.dim)

    def init_weights(self) -> None:
        """Random weights for training from scratch (Xavier linears; small embeddings; zero video head)."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
            elif isinstance(module, EmbodimentLinear | nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)
        nn.init.xavier_uniform_(self.patch_embedding.weight.view(self.settings.dim, -1))
        if self.patch_embedding.bias is not None:
            nn.init.zeros_(self.patch_embedding.bias)
        for embedding in (self.text_embedding, self.time_embedding):
            for module in embedding:
                if isinstance(module, nn.Linear):
                    nn.init.normal_(module.weight, std=0.02)
        for module in self.modules():
            if isinstance(module, Block | Head):
                nn.init.normal_(module.modulation, std=self.settings.dim**-0.5)
        nn.init.zeros_(self.head.head.weight)

    def layout(self, latent: Tensor, blocks: int) -> Layout:
        """The layout of windows whose latents have the height and width of ``latent [..., H, W]``."""
        s = self.settings
        return Layout(
            blocks=blocks,
            frames_per_block=s.num_frame_per_block,
            tokens_per_frame=math.prod(self._grid(latent)),
            actions_per_block=s.num_action_per_block,
            states_per_block=s.num_state_per_block,
            noisy_first_frame=s.noisy_first_frame,
        )

    def forward(
        self,
        noisy: Tensor,
        clean: Tensor,
        timestep: Tensor,
        action: Tensor,
        timestep_action: Tensor,
        state: Tensor,
        context: Tensor,
        clip_feature: Tensor | None = None,
        y: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Teacher forcing over N blocks of f latent frames.

        Args:
            noisy: noisy latents ``[B, C, 1 + N f, H, W]``.
            clean: the same latents without noise.
            timestep: time of each latent frame ``[B, 1 + N f]`` in [0, 1000].
            action: noisy actions ``[B, N A, action_dim]``.
            timestep_action: time of each action ``[B, N A]``.
            state: states ``[B, N S, max_state_dim]``.
            context: text features ``[B or 1, T, text_dim]``, rows past the prompt zeroed.
            clip_feature: image features ``[B, I, clip_dim]`` or None.
            y: mask and first-frame latents ``[B, Cy, 1 + N f, H, W]`` where the model concatenates them.

        Returns:
            Velocities of video ``[B, out_dim, 1 + N f, H, W]`` and actions ``[B, N A, action_dim]``. Where the
            model does not denoise frame 0 (``noisy_first_frame = false``), its video velocity is zero.
        """
        s = self.settings
        blocks = (noisy.shape[2] - 1) // s.num_frame_per_block
        layout = self.layout(noisy, blocks)
        first = layout.first_noisy_frame

        clean_video = self._patches(clean[:, :, : layout.clean_frames], _frames(y, 0, layout.clean_frames))
        noisy_video = self._patches(noisy[:, :, first:], _frames(y, first, layout.frames))
        dtype = clean_video.dtype
        actions = self.action_encoder(action.to(dtype), timestep_action).unflatten(1, (blocks, -1))
        states = self.state_encoder(state.to(dtype)).unflatten(1, (blocks, -1))
        tokens = [clean_video.flatten(1, 2), noisy_video[:, : 1 - first].flatten(1, 2)]
        video_blocks = noisy_video[:, 1 - first :].unflatten(1, (blocks, -1)).flatten(2, 3)
        tokens.append(torch.cat((video_blocks, actions, states), dim=2).flatten(1, 2))
        x = torch.cat(tokens, dim=1)

        times, runs = self._times(timestep, timestep_action, layout)
        time = self._embed_time(times, x.dtype)
        vectors = self.time_projection(time).unflatten(-1, (6, s.dim))
        grid = self._grid(noisy)
        rotary = self._training_rotation(layout, grid, x)
        text, image = self.encode_context(context, clip_feature)
        for block in self.blocks:
            x = block(x, vectors, runs, rotary, text, image, layout)

        groups = x[:, layout.noisy_first_range.stop :].unflatten(1, (blocks, -1))
        video_tokens = groups[:, :, : layout.video_tokens_per_block].flatten(1, 2)
        video_tokens = torch.cat((x[:, layout.noisy_first_range], video_tokens), dim=1)
        video = self._video(video_tokens, time[:, 1 : 1 + layout.frames - first], grid)
        if first:
            video = torch.cat((torch.zeros_like(video[:, :, :1]), video), dim=2)
        chunk = groups[:, :, layout.video_tokens_per_block : -layout.states_per_block].flatten(1, 2)
        return video, self.action_decoder(chunk)

    def new_cache(self) -> list[KVCache]:
        """An empty cache, one entry a layer."""
        return [KVCache() for _ in self.blocks]

    def observe(
        self,
        latent: Tensor,
        start_frame: int,
        cache: list[KVCache],
        context: tuple[Tensor, Tensor | None],
        y: Tensor | None = None,
    ) -> None:
        """Add observed latents ``[B, C, F, H, W]`` at frames ``start_frame...`` to the cache (time 0)."""
        s = self.settings
        x = self._patches(latent, y).flatten(1, 2)
        runs = torch.zeros(x.shape[1], dtype=torch.long, device=x.device)
        time = self._embed_time(torch.zeros(x.shape[0], 1, device=x.device), x.dtype)
        vectors = self.time_projection(time).unflatten(-1, (6, s.dim))
        grid = self._grid(latent)
        angle = video_angles(start_frame, latent.shape[2], *grid, s.dim // s.num_heads, x.device)
        for block, layer_cache in zip(self.blocks, cache, strict=True):
            x = block(
                x, vectors, runs, rotation(angle, _wide(x)), *context, mode="observe", cache=layer_cache
            )

    def denoise(
        self,
        noisy: Tensor,
        timestep: Tensor,
        action: Tensor,
        timestep_action: Tensor,
        state: Tensor,
        start_frame: int,
        cache: list[KVCache],
        context: tuple[Tensor, Tensor | None],
        y: Tensor | None = None,
        isolate_state: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Velocities of one block after the observed frames in the cache.

        Args:
            noisy: ``[B, C, f, H, W]``; timestep ``[B, f]``.
            action: ``[B, A, action_dim]``; timestep_action ``[B, A]``.
            state: ``[B, S, max_state_dim]``.
            start_frame: index of the block's first latent frame.
            cache: observed frames; not changed.
            context: what ``encode_context`` returned.
            y: mask and first-frame latents of these frames, where the model concatenates them.
            isolate_state: True as in training; False as the reference does at inference.

        Returns:
            Video ``[B, out_dim, f, H, W]`` and actions ``[B, A, action_dim]``.
        """
        s = self.settings
        layout = self.layout(noisy, 1)
        index = (start_frame - 1) // s.num_frame_per_block
        video_tokens = self._patches(noisy, y).flatten(1, 2)
        actions = self.action_encoder(action.to(video_tokens.dtype), timestep_action)
        states = self.state_encoder(state.to(video_tokens.dtype))
        x = torch.cat((video_tokens, actions, states), dim=1)
        frames, count = noisy.shape[2], actions.shape[1]
        state_times = timestep_action[:, :: count // s.num_state_per_block]
        times = torch.cat((timestep, timestep_action, state_times), dim=1)
        frame_runs = torch.arange(frames, device=x.device).repeat_interleave(layout.tokens_per_frame)
        runs = torch.cat((frame_runs, torch.arange(frames, times.shape[1], device=x.device)))
        time = self._embed_time(times, x.dtype)
        vectors = self.time_projection(time).unflatten(-1, (6, s.dim))
        grid = self._grid(noisy)
        angle = torch.cat(
            (
                video_angles(start_frame, frames, *grid, s.dim // s.num_heads, x.device),
                line_angles(index * count, count, s.dim // s.num_heads, x.device),
                line_angles(index * s.num_state_per_block, states.shape[1], s.dim // s.num_heads, x.device),
            )
        )
        rotary = rotation(angle, _wide(x))
        for block, layer_cache in zip(self.blocks, cache, strict=True):
            x = block(x, vectors, runs, rotary, *context, layout, "denoise", layer_cache, isolate_state)
        video = self._video(x[:, : video_tokens.shape[1]], time[:, :frames], grid)
        return video, self.action_decoder(x[:, video_tokens.shape[1] :][:, :count])

    def encode_context(self, context: Tensor, clip_feature: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Project text and image features; once a request for ``observe`` and ``denoise``."""
        dtype = self.patch_embedding.weight.dtype
        text = self.text_embedding(context.to(dtype))
        return text, None if clip_feature is None else self.img_emb(clip_feature.to(dtype))

    def _grid(self, latent: Tensor) -> tuple[int, int]:
        """Rows and columns of patches of latents ``[..., H, W]``."""
        _, rows, columns = self.settings.patch_size
        return latent.shape[-2] // rows, latent.shape[-1] // columns

    def _embed_time(self, times: Tensor, dtype: torch.dtype) -> Tensor:
        return self.time_embedding(time_sinusoid(times, self.settings.freq_dim).to(dtype))

    def _patches(self, latent: Tensor, y: Tensor | None) -> Tensor:
        """Latents ``[B, C, F, H, W]`` to tokens ``[B, F, S, dim]`` in the dtype that the model computes in.

        Times stay float32 up to their sinusoid: bfloat16 cannot tell 999 from 1000.
        """
        if self.settings.concat_first_frame_latent:
            if y is None:
                raise ValueError("this model concatenates the first frame's latents: y is needed")
            latent = torch.cat((latent, y.to(latent.dtype)), dim=1)
        return (
            self.patch_embedding(latent.to(self.patch_embedding.weight.dtype)).flatten(3).permute(0, 2, 3, 1)
        )

    def _video(self, tokens: Tensor, time: Tensor, grid: tuple[int, int]) -> Tensor:
        """Tokens ``[B, F S, dim]`` to velocities ``[B, out_dim, F, H, W]``."""
        _, rows, columns = self.settings.patch_size
        patches = self.head(tokens.unflatten(1, (time.shape[1], -1)), time)
        patches = patches.unflatten(-1, (rows, columns, -1)).unflatten(2, grid)  # [B, F, h, w, p, q, C]
        return patches.permute(0, 6, 1, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)

    def _times(self, timestep: Tensor, timestep_action: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Times ``[B, R]`` of the runs [clean | noisy frames | actions | states], and each token's run ``[L]``."""
        first, n = layout.first_noisy_frame, layout.blocks
        device = timestep.device
        state_times = timestep_action.unflatten(1, (n * layout.states_per_block, -1))[:, :, 0]
        clean = torch.zeros_like(timestep[:, :1])
        times = torch.cat((clean, timestep[:, first:], timestep_action, state_times), dim=1)
        frames = torch.arange(1, 1 + layout.frames - first, device=device)
        of_frame = frames.repeat_interleave(layout.tokens_per_frame)
        split = (1 - first) * layout.tokens_per_frame
        start = 1 + frames.numel()
        of_action = torch.arange(start, start + timestep_action.shape[1], device=device)
        of_state = torch.arange(start + timestep_action.shape[1], times.shape[1], device=device)
        groups = torch.cat(
            (of_frame[split:].view(n, -1), of_action.view(n, -1), of_state.view(n, -1)), dim=1
        ).flatten()
        of_clean = torch.zeros(layout.clean_frames * layout.tokens_per_frame, dtype=torch.long, device=device)
        return times, torch.cat((of_clean, of_frame[:split], groups))

    def _training_rotation(self, layout: Layout, grid: tuple[int, int], x: Tensor) -> Rotation:
        n, head_dim = layout.blocks, self.settings.dim // self.settings.num_heads
        video = video_angles(0, layout.frames, *grid, head_dim, x.device)
        actions = line_angles(0, n * layout.actions_per_block, head_dim, x.device)
        states = line_angles(0, n * layout.states_per_block, head_dim, x.device)
        per_frame = layout.tokens_per_frame
        groups = torch.cat(
            (
                video[per_frame:].view(n, layout.video_tokens_per_block, -1),
                actions.view(n, layout.actions_per_block, -1),
                states.view(n, layout.states_per_block, -1),
            ),
            dim=1,
        ).flatten(0, 1)
        first = video[: (1 - layout.first_noisy_frame) * per_frame]
        return rotation(torch.cat((video[: layout.clean_frames * per_frame], first, groups)), _wide(x))


def _frames(y: Tensor | None, start: int, stop: int) -> Tensor | None:
    return None if y is None else y[:, :, start:stop]


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def build_on_meta(settings: ModelSettings) -> WorldActionModel:
    """The model without memory, to count or to shard before weights exist."""
    with torch.device("meta"):
        return WorldActionModel(settings)


def parameter_count(model: nn.Module) -> int:
    """Number of trainable values."""
    return sum(p.numel() for p in model.parameters())
