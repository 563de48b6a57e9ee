"""The sampler on velocities that are known exactly."""

import torch
from dreamzero_tiny import model_settings

from dreamzero_sft.recipe import SamplerSettings
from dreamzero_sft.sampler import sample_block


class Straight:
    """A model whose data is one point: the velocity towards it is (x_t - x) / sigma."""

    settings = model_settings(num_frame_per_block=1)

    def __init__(self):
        self.video, self.action = torch.randn(2, 4, 1, 4, 6), torch.rand(2, 4, 7) * 2 - 1
        self.negative = torch.zeros_like(self.video)

    def encode_context(self, context, clip_feature):
        return context, clip_feature

    def new_cache(self):
        return []

    def observe(self, *args):
        pass

    def denoise(self, video, time, action, action_time, state, start, cache, context, y):
        assert start == 1
        target = self.negative if not context[0].any() else self.video
        return (
            (video - target) / (time / 1000)[:, None, :, None, None],
            (action - self.action) / (action_time / 1000)[:, :, None],
        )


def sample(model, **changes):
    settings = SamplerSettings(**({"steps": 8} | changes))
    return sample_block(
        model, torch.randn(2, 4, 1, 4, 6), torch.zeros(2, 1, 8), torch.ones(1, 5, 12), torch.zeros(2, 3, 10),
        settings, negative_context=torch.zeros(1, 5, 12),
    )  # fmt: skip


def test_the_sampler_ends_at_the_data():
    # Straight paths: any number of steps is exact up to float32 rounding.
    model = Straight()
    for steps in (2, 8, 16):
        video, action = sample(model, steps=steps)
        torch.testing.assert_close(video, model.video, rtol=0, atol=1e-4)
        torch.testing.assert_close(action, model.action, rtol=0, atol=1e-4)


def test_guidance_moves_the_video_away_from_the_negative_and_leaves_actions():
    model = Straight()
    video, action = sample(model, guidance=3.0)
    torch.testing.assert_close(video, 3 * model.video, rtol=0, atol=1e-3)
    torch.testing.assert_close(action, model.action, rtol=0, atol=1e-4)
