"""Video tokenizers: between frames in [-1, 1] and latents of unit variance.

`LinearVideoTokenizer` stands in for the Wan VAE where no downloaded weights are to be had: the same causal
grouping of frames (the first alone, then `temporal` at a time), fitted on the corpus in seconds.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from flywheel_shared.errors import UserError

_KIND = "linear_video_tokenizer"
# A channel that hardly varies must not be blown up to unit variance: its content is 8-bit rounding noise.
_MIN_RELATIVE_STD = 0.01


class LinearVideoTokenizer(nn.Module):
    """Principal components of patches: the best linear code in the least-squares sense.

    A clip of 1 + temporal * k frames becomes 1 + k latent frames. Latent 0 codes the first frame by patches
    of `patch` x `patch` pixels; every later one codes `temporal` frames by patches of `temporal` x `patch` x
    `patch`. The two have bases of their own. Channels are divided by their standard deviation over the
    corpus, as the Wan VAE's latents are. With `temporal` 1 one basis serves all frames.
    """

    def __init__(self, patch: int = 8, temporal: int = 4, channels: int = 16):
        """Make an unfitted tokenizer (all zeros); use `fit` or `load`."""
        super().__init__()
        first_size, group_size = 3 * patch * patch, 3 * temporal * patch * patch
        if min(patch, temporal, channels) < 1 or channels > first_size:
            raise UserError(
                f"video tokenizer: patch {patch}, temporal {temporal}, channels {channels}: "
                f"all must be 1 or more and channels at most 3 * patch * patch = {first_size}"
            )
        self.patch = patch
        self.temporal = temporal
        self.channels = channels
        for name, size in (("first", first_size), ("group", group_size)):
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_basis", torch.zeros(channels, size))  # orthonormal rows
            self.register_buffer(f"{name}_std", torch.ones(channels))

    @classmethod
    def fit(
        cls,
        clips: Iterable[Tensor],
        *,
        patch: int = 8,
        temporal: int = 4,
        channels: int = 16,
        patches_per_clip: int = 512,
        seed: int = 0,
    ) -> Self:
        """Fit on clips, each uint8 or float in [-1, 1], `[3, T, H, W]`, of any length.

        From each clip `patches_per_clip` patches of either kind are drawn; memory does not grow with the
        number of clips. The same clips in the same order and the same seed give the same bytes.
        """
        tokenizer = cls(patch, temporal, channels)
        generator = torch.Generator().manual_seed(seed)
        first, group = _Moments(3 * patch * patch), _Moments(3 * temporal * patch * patch)
        for clip in clips:
            first.add(_sample_patches(clip, 1, patch, patches_per_clip, generator))
            if temporal > 1 and clip.shape[1] >= temporal:
                group.add(_sample_patches(clip, temporal, patch, patches_per_clip, generator))
        tokenizer._set_basis("first", first)
        tokenizer._set_basis("group", group if temporal > 1 else first)
        return tokenizer

    def encode(self, frames: Tensor) -> Tensor:
        """`[B, 3, 1 + temporal * k, H, W]`, uint8 or float in [-1, 1] -> `[B, C, 1 + k, H/p, W/p]`.

        Latents are float32. Raises `UserError` for other numbers of frames and for sides that are no
        multiples of the patch.
        """
        self._check_frames(frames)
        first, rest = _to_float(frames).split([1, frames.shape[2] - 1], dim=2)
        latents = [self._encode_groups(first, "first", 1)]
        if rest.shape[2]:
            latents.append(self._encode_groups(rest, "group", self.temporal))
        return torch.cat(latents, dim=2)

    def decode(self, latents: Tensor) -> Tensor:
        """`[B, C, 1 + k, h, w]` -> float32 `[B, 3, 1 + temporal * k, h*p, w*p]` in [-1, 1], least squares."""
        if latents.ndim != 5 or latents.shape[1] != self.channels:
            raise UserError(
                f"latents are {list(latents.shape)}, expected [B, {self.channels}, latent frames, h, w]"
            )
        first, rest = latents.float().split([1, latents.shape[2] - 1], dim=2)
        frames = [self._decode_groups(first, "first", 1)]
        if rest.shape[2]:
            frames.append(self._decode_groups(rest, "group", self.temporal))
        return torch.cat(frames, dim=2).clamp(-1, 1)

    @property
    def config(self) -> dict[str, int]:
        """The arguments of the constructor."""
        return {"patch": self.patch, "temporal": self.temporal, "channels": self.channels}

    def digest(self) -> str:
        """SHA-256 of configuration and contents: equal digests give equal latents."""
        sha = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for name, tensor in sorted(self.state_dict().items()):
            sha.update(name.encode())
            sha.update(tensor.float().cpu().contiguous().numpy().tobytes())
        return sha.hexdigest()

    def save(self, path: Path) -> None:
        """Write a safetensors file, whole or not at all."""
        metadata = {"kind": _KIND, "config": json.dumps(self.config), "digest": self.digest()}
        tensors = {name: tensor.float().cpu().contiguous() for name, tensor in self.state_dict().items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.tmp")
        save_file(tensors, beside, metadata)
        beside.replace(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote; raises `UserError` for a missing, foreign or damaged file."""
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("kind") != _KIND:
                    raise UserError(f"{path}: not a {_KIND} (kind is {metadata.get('kind')!r})")
                tokenizer = cls(**json.loads(metadata["config"]))
                tokenizer.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        except FileNotFoundError:
            raise UserError(f"{path}: no such file; the metadata verb of the stage writes it") from None
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"{path}: cannot be read as a video tokenizer: {error}") from None
        if metadata.get("digest") != tokenizer.digest():
            raise UserError(f"{path}: contents do not match the digest in its header; write it anew")
        return tokenizer

    def _set_basis(self, name: str, moments: "_Moments") -> None:
        mean, basis, std = moments.principal_components(self.channels)
        getattr(self, f"{name}_mean").copy_(mean)
        getattr(self, f"{name}_basis").copy_(basis)
        getattr(self, f"{name}_std").copy_(std.clamp(min=float(std[0]) * _MIN_RELATIVE_STD))

    def _encode_groups(self, frames: Tensor, name: str, group: int) -> Tensor:
        mean, basis, std = (getattr(self, f"{name}_{part}") for part in ("mean", "basis", "std"))
        weight = basis / std[:, None]
        # The mean is folded into a bias: patches are read once, by one product.
        latents = torch.addmm(
            -(weight @ mean), _to_patches(frames, group, self.patch).flatten(0, 3), weight.T
        )
        batch, _, time, height, width = frames.shape
        grid = (batch, time // group, height // self.patch, width // self.patch, self.channels)
        return latents.view(grid).movedim(-1, 1)

    def _decode_groups(self, latents: Tensor, name: str, group: int) -> Tensor:
        mean, basis, std = (getattr(self, f"{name}_{part}") for part in ("mean", "basis", "std"))
        patches = torch.addmm(mean, latents.movedim(1, -1).flatten(0, 3), basis * std[:, None])
        batch, _, groups, rows, columns = latents.shape
        cells = patches.view(batch, groups, rows, columns, 3, group, self.patch, self.patch)
        frames = cells.permute(0, 4, 1, 5, 2, 6, 3, 7)
        return frames.reshape(batch, 3, groups * group, rows * self.patch, columns * self.patch)

    def _check_frames(self, frames: Tensor) -> None:
        if frames.ndim != 5 or frames.shape[1] != 3:
            raise UserError(f"frames are {list(frames.shape)}, expected [B, 3, T, H, W]")
        time, height, width = frames.shape[2:]
        if time < 1 or (time - 1) % self.temporal:
            raise UserError(f"{time} frames: the video tokenizer takes 1 + {self.temporal} * k frames")
        if height % self.patch or width % self.patch:
            raise UserError(
                f"frames of {height} x {width}: sides must be multiples of the patch {self.patch}"
            )


class _Moments:
    """Mean and covariance of rows that come in pieces, in float64."""

    def __init__(self, size: int):
        self.count = 0
        self.sum = torch.zeros(size, dtype=torch.float64)
        self.outer = torch.zeros(size, size, dtype=torch.float64)

    def add(self, rows: Tensor) -> None:
        rows = rows.double()
        self.count += len(rows)
        self.sum += rows.sum(0)
        self.outer += rows.T @ rows

    def principal_components(self, channels: int) -> tuple[Tensor, Tensor, Tensor]:
        """Give mean `[size]`, orthonormal basis `[channels, size]` by falling variance, std `[channels]`."""
        if self.count <= channels:
            raise UserError(
                f"video tokenizer: {self.count} patches cannot fix {channels} channels; "
                "give more or longer clips"
            )
        mean = self.sum / self.count
        covariance = self.outer / self.count - torch.outer(mean, mean)
        variances, vectors = torch.linalg.eigh(covariance)
        basis = vectors.flip(1)[:, :channels].T
        # An eigenvector's sign is free: fix it, so that the same corpus gives the same latents everywhere.
        largest = basis.gather(1, basis.abs().argmax(1, keepdim=True))
        return mean, basis * largest.sign(), variances.flip(0)[:channels].clamp(min=1e-12).sqrt()


def _to_float(frames: Tensor) -> Tensor:
    return frames.float() / 127.5 - 1 if frames.dtype == torch.uint8 else frames.float()


def _to_patches(frames: Tensor, group: int, patch: int) -> Tensor:
    """`[B, 3, T, H, W]` -> `[B, T/group, H/patch, W/patch, 3 * group * patch * patch]`."""
    batch, _, time, height, width = frames.shape
    cells = frames.reshape(batch, 3, time // group, group, height // patch, patch, width // patch, patch)
    return cells.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4)


def _sample_patches(clip: Tensor, group: int, patch: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw `count` patches on the patch grid, from any frame on: `[count, 3 * group * patch * patch]`."""
    if clip.ndim != 4 or clip.shape[0] != 3 or clip.shape[1] < 1 or min(clip.shape[2:]) < patch:
        raise UserError(f"clip is {list(clip.shape)}, expected [3, T, H, W] with sides of {patch} or more")
    _, time, height, width = clip.shape
    start, row, column = (
        torch.randint(size, (count, 1, 1, 1), generator=generator)
        for size in (time - group + 1, height // patch, width // patch)
    )
    inside = torch.arange(patch)
    sampled = clip[
        :,
        start + torch.arange(group).view(1, -1, 1, 1),
        row * patch + inside.view(1, 1, -1, 1),
        column * patch + inside.view(1, 1, 1, -1),
    ]  # [3, count, group, patch, patch]
    return _to_float(sampled.movedim(0, 1).flatten(1))
