"""The flow-matching objective: its schedule, what counts, and that it has its minimum at the right answer."""

import pytest
import torch
from dreamzero_tiny import model_settings

from dreamzero_sft.layout import Layout
from dreamzero_sft.model import WorldActionModel
from dreamzero_sft.objective import POINTS, Batch, ObjectiveSettings, Schedule, flow_matching_loss

LAYOUT = Layout(blocks=2, frames_per_block=2, tokens_per_frame=6, actions_per_block=4)
SETTINGS = ObjectiveSettings()


def test_the_schedule_is_the_published_one():
    # Published figures for shift 5: median time 833, mean 748; weights mean 1, at most 2.08, 0 at time 1000.
    schedule = Schedule(5.0)
    _, time, weight = schedule.at(torch.arange(POINTS))
    assert time.median().item() == pytest.approx(833, abs=1)
    assert time.mean().item() == pytest.approx(748, abs=1)
    assert weight.mean().item() == pytest.approx(1, abs=1e-5)
    assert weight.max().item() == pytest.approx(2.08, abs=0.01)
    assert weight[0].item() == 0
    assert time[0].item() == 1000


def batch(size=3, seed=0) -> Batch:
    torch.manual_seed(seed)
    return Batch(
        latents=torch.randn(size, 4, 5, 4, 6),
        actions=torch.randn(size, 8, 7),
        action_mask=torch.ones(size, 8, 7, dtype=torch.bool),
        state=torch.randn(size, 2, 8),
        context=torch.randn(size, 5, 12),
        clip_feature=torch.randn(size, 3, 10),
        frame_mask=torch.ones(size, 5, dtype=torch.bool),
    )


class Oracle(torch.nn.Module):
    """Knows the clean data: the velocity is (x_t - x) / sigma."""

    def __init__(self, data, error=0.0):
        super().__init__()
        self.data, self.error = data, error

    def forward(self, noisy, clean, time, action, action_time, *rest):
        video = (noisy - self.data.latents) / (time / 1000)[:, None, :, None, None]
        return video + self.error, (action - self.data.actions) / (action_time / 1000)[
            :, :, None
        ] + self.error


def loss_of(model, data, seed=0, settings=SETTINGS):
    generator = torch.Generator().manual_seed(seed)
    return flow_matching_loss(model, data, Schedule(settings.shift), settings, LAYOUT, generator)


def test_the_true_velocity_has_no_loss_and_a_wrong_one_its_weighted_square():
    # The weights' mean is 1 over the schedule; 400 draws of three samples come within 10%.
    data = batch()
    assert loss_of(Oracle(data), data)["loss"].item() < 1e-8
    found = [loss_of(Oracle(data, error=2.0), data, seed)["loss/action"].item() for seed in range(400)]
    assert sum(found) / len(found) == pytest.approx(4.0, rel=0.1)


def test_padding_never_counts():
    data = batch()
    clean = loss_of(Oracle(data), data)["loss"].item()
    model = Oracle(batch())
    data.action_mask[:, :, 5:] = False
    data.action_mask[1, 3:] = False
    data.frame_mask[2, 3:] = False
    model.data.actions[:, :, 5:] += 1e3  # a wrong answer in the padding
    model.data.actions[1, 3:] -= 1e3
    model.data.latents[2, :, 3:] += 1e3
    assert loss_of(model, data)["loss"].item() == pytest.approx(clean, abs=1e-8)


def test_a_batch_with_nothing_that_counts_has_no_loss_and_no_nan():
    data = batch()
    data.action_mask[:] = False
    data.frame_mask[:] = False
    assert loss_of(Oracle(data, error=1.0), data)["loss"].item() == 0


def test_weights_of_the_terms_scale_them():
    data = batch()
    one = loss_of(Oracle(data, error=1.0), data)
    two = loss_of(
        Oracle(data, error=1.0), data, settings=ObjectiveSettings(video_weight=0.5, action_weight=3.0)
    )
    expected = 0.5 * one["loss/video"] + 3 * one["loss/action"]
    torch.testing.assert_close(two["loss"], expected)


def test_every_parameter_gets_a_finite_gradient():
    torch.manual_seed(0)
    model = WorldActionModel(model_settings())
    model.init_weights()
    torch.nn.init.normal_(model.head.head.weight, std=0.1)
    loss_of(model, batch())["loss"].backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().max() > 0, name
