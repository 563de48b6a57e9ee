"""Attention of the world-action model: over the block structure in training, over a cache in inference."""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from dreamzero_sft.layout import Layout
from dreamzero_sft.rope import rotate

Rotation = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim, statistics in float32, with a learned scale."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """``[..., dim] -> [..., dim]`` in the dtype of ``x``."""
        wide = x if x.dtype == torch.float64 else x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention without a mask: ``[B, Lq, H, d], [B, Lk, H, d], [B, Lk, H, d] -> [B, Lq, H, d]``."""
    if q.dtype == torch.bfloat16 and q.device.type == "cpu":
        # PyTorch's bfloat16 attention on a CPU took half of a small model's step; in float32 a twelfth.
        return attend(q.float(), k.float(), v.float()).to(q.dtype)
    return scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(
        1, 2
    )


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """Teacher-forcing attention over a whole window, as dense calls on contiguous ranges.

    Clean frame 0 and clean block ``i`` see the clean tokens up to their own end. Noisy frame 0 sees itself. The
    video and actions of block ``i`` see frame 0, the clean blocks before ``i`` and their own group; a state sees
    the states of its block. Equal to a softmax under the corresponding boolean mask.

    Args:
        q, k, v: ``[B, layout.tokens, heads, head_dim]``.
        layout: where each token lies.

    Returns:
        ``[B, layout.tokens, heads, head_dim]``.
    """
    out = [attend(q[:, r], k[:, : r.stop], v[:, : r.stop]) for r in layout.clean_ranges]
    first = layout.noisy_first_range
    if first.stop > first.start:
        out.append(attend(q[:, first], k[:, first], v[:, first]))
    for seen, group in zip(layout.clean_ranges, layout.groups, strict=True):
        states = slice(group.stop - layout.states_per_block, group.stop)
        keys = torch.cat((k[:, : seen.stop], k[:, group]), dim=1)
        values = torch.cat((v[:, : seen.stop], v[:, group]), dim=1)
        out.append(attend(q[:, group.start : states.start], keys, values))
        out.append(attend(q[:, states], k[:, states], v[:, states]))
    return torch.cat(out, dim=1)


class KVCache:
    """Keys and values of the observed frames of one layer; empty at first.

    Attributes:
        k, v: ``[B, tokens, heads, head_dim]``, keys already rotated, or None.
    """

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def with_new(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The cached tokens followed by new ones, without storing them."""
        if self.k is None or self.v is None:
            return k, v
        return torch.cat((self.k, k), dim=1), torch.cat((self.v, v), dim=1)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store new tokens; all that is cached now."""
        self.k, self.v = k, v = self.with_new(k, v)
        return k, v


class SelfAttention(nn.Module):
    """Multi-head self-attention with a norm of q and k over the whole width and rotary positions."""

    def __init__(self, dim: int, heads: int, eps: float) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = RMSNorm(dim, eps), RMSNorm(dim, eps)

    def project(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values ``[B, L, heads, head_dim]`` with positions applied."""
        q = self.norm_q(self.q(x)).unflatten(-1, (self.heads, -1))
        k = self.norm_k(self.k(x)).unflatten(-1, (self.heads, -1))
        v = self.v(x).unflatten(-1, (self.heads, -1))
        return rotate(q, rotation), rotate(k, rotation), v

    def forward(self, x: Tensor, rotation: Rotation, layout: Layout) -> Tensor:
        """Training: ``[B, layout.tokens, dim] -> [B, layout.tokens, dim]``."""
        q, k, v = self.project(x, rotation)
        return self.o(attend_blocks(q, k, v, layout).flatten(2))

    def observe(self, x: Tensor, rotation: Rotation, cache: KVCache) -> Tensor:
        """Inference on observed frames: they see the cache and themselves, and enter the cache."""
        q, k, v = self.project(x, rotation)
        keys, values = cache.append(k, v)
        return self.o(attend(q, keys, values).flatten(2))

    def denoise(
        self, x: Tensor, rotation: Rotation, cache: KVCache, states: int, isolate_state: bool
    ) -> Tensor:
        """Inference on one block [video, actions, states] over the cache, which is left as it is.

        Args:
            x: ``[B, L, dim]``; the last ``states`` tokens are the states.
            rotation: positions of the L tokens.
            cache: observed frames.
            states: number of state tokens.
            isolate_state: states see only themselves, as in training; else they see everything, as the reference.
        """
        q, k, v = self.project(x, rotation)
        keys, values = cache.with_new(k, v)
        if not isolate_state:
            return self.o(attend(q, keys, values).flatten(2))
        out = (attend(q[:, :-states], keys, values), attend(q[:, -states:], k[:, -states:], v[:, -states:]))
        return self.o(torch.cat(out, dim=1).flatten(2))


class CrossAttention(nn.Module):
    """Attention to text and, apart from it with keys and values of its own, to image features; outputs are added."""

    def __init__(self, dim: int, heads: int, eps: float) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = RMSNorm(dim, eps), RMSNorm(dim, eps)
        self.k_img, self.v_img = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.norm_k_img = RMSNorm(dim, eps)

    def forward(self, x: Tensor, text: Tensor, image: Tensor | None) -> Tensor:
        """``x [B, L, dim]``, ``text [B or 1, T, dim]``, ``image [B, I, dim]`` or None ``-> [B, L, dim]``.

        A text of batch size 1 is one prompt for the whole batch: its keys and values are computed once.
        """
        batch = x.shape[0]
        q = self.norm_q(self.q(x)).unflatten(-1, (self.heads, -1))
        k = self.norm_k(self.k(text)).unflatten(-1, (self.heads, -1)).expand(batch, -1, -1, -1)
        v = self.v(text).unflatten(-1, (self.heads, -1)).expand(batch, -1, -1, -1)
        out = attend(q, k, v)
        if image is not None:
            k = self.norm_k_img(self.k_img(image)).unflatten(-1, (self.heads, -1))
            out = out + attend(q, k, self.v_img(image).unflatten(-1, (self.heads, -1)))
        return self.o(out.flatten(2))
