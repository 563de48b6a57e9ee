"""Attention over the block structure against a plain dense boolean mask, in float64, outputs and gradients."""

import itertools

import pytest
import torch

from dreamzero_sft.attention import attend_blocks
from dreamzero_sft.layout import Layout


def dense_mask(layout: Layout) -> torch.Tensor:
    """Who sees whom, written from the rules alone: ``[tokens, tokens]`` bool."""
    roles = [("clean", 0 if f == 0 else 1 + (f - 1) // layout.frames_per_block)
             for f in range(layout.clean_frames) for _ in range(layout.tokens_per_frame)]  # fmt: skip
    if layout.noisy_first_frame:
        roles += [("first", 0)] * layout.tokens_per_frame
    for block in range(1, layout.blocks + 1):
        roles += [("video", block)] * layout.video_tokens_per_block
        roles += [("action", block)] * layout.actions_per_block
        roles += [("state", block)] * layout.states_per_block

    def sees(query, key):
        (q_role, q_block), (k_role, k_block) = query, key
        if q_role == "clean":
            return k_role == "clean" and k_block <= q_block
        if q_role in ("first", "state"):
            return k_role == q_role and k_block == q_block
        return (k_role == "clean" and k_block < q_block) or (
            k_role in ("video", "action", "state") and k_block == q_block
        )

    return torch.tensor([[sees(q, k) for k in roles] for q in roles])


LAYOUTS = [
    Layout(1, 1, 3, 2),
    Layout(1, 2, 4, 5, noisy_first_frame=False),
    Layout(3, 2, 4, 5),
    Layout(4, 2, 2, 3, states_per_block=2),
    Layout(5, 1, 1, 1, noisy_first_frame=False),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_block_attention_equals_a_dense_mask_in_outputs_and_gradients(layout):
    heads, size = 2, 6
    leaves = [
        torch.randn(2, layout.tokens, heads, size, dtype=torch.float64, requires_grad=True) for _ in range(3)
    ]
    upstream = torch.randn(2, layout.tokens, heads, size, dtype=torch.float64)

    fast = attend_blocks(*leaves, layout)
    fast_gradients = torch.autograd.grad(fast, leaves, upstream)

    q, k, v = (x.transpose(1, 2) for x in leaves)
    scores = (q @ k.transpose(-1, -2) / size**0.5).masked_fill(~dense_mask(layout), float("-inf"))
    plain = (scores.softmax(-1) @ v).transpose(1, 2)
    plain_gradients = torch.autograd.grad(plain, leaves, upstream)

    torch.testing.assert_close(fast, plain, rtol=0, atol=1e-12)
    for ours, reference in itertools.zip_longest(fast_gradients, plain_gradients):
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-12)


def test_the_sequence_leaves_out_only_clean_tokens_nobody_reads():
    layout = Layout(3, 2, 4, 5)
    mask = dense_mask(layout)
    clean = layout.clean_ranges[-1].stop
    read_by_others = mask[clean:, :clean].any(dim=0)
    assert read_by_others.all()
    assert layout.clean_frames == layout.frames - layout.frames_per_block
