"""Packed samples give what each would give alone, by diffusers' own attention and packing; gradients too."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from diffusers import Cosmos3OmniPipeline, Cosmos3OmniTransformer
from diffusers.pipelines.cosmos.pipeline_cosmos3_omni import get_3d_mrope_ids_vae_tokens

from flywheel_shared.cosmos.model import (
    CosmosModel,
    ModelSettings,
    init_from_scratch,
)
from flywheel_shared.cosmos.objective import (
    ObjectiveSettings,
    add_noise,
    draw_levels,
    flow_matching_loss,
    shift_of,
    waver,
)
from flywheel_shared.cosmos.sequence import Sample, pack

TINY = ModelSettings(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=64,
    rope_axes_dim=(2, 1, 1),
    latent_channel=4,
    action_dim=6,
    num_embodiment_domains=3,
)
TOLERANCE = 1e-5  # float32; sums run in another order


@pytest.fixture
def model():
    torch.manual_seed(0)
    made = CosmosModel.from_settings(TINY)
    init_from_scratch(made)
    return made


def samples() -> list[Sample]:
    """Other lengths, grids (an odd side among them), rates and modes."""
    actions = torch.randn(8, 6)
    actions[:, 5:] = 0
    return [
        Sample(torch.randint(64, (7,)), torch.randn(4, 3, 4, 4), 10.0, (0,)),
        Sample(torch.randint(64, (3,)), torch.randn(4, 2, 6, 5), 15.0, (0,), actions, 5, domain_id=1),
        Sample(
            torch.randint(64, (5,)),
            torch.randn(4, 3, 4, 4),
            24.0,
            (0, 1, 2),
            torch.randn(8, 6),
            6,
            domain_id=2,
        ),
        Sample(
            torch.randint(64, (5,)), torch.randn(4, 3, 4, 4), 24.0, (0,), torch.randn(8, 6), 6, 8, domain_id=2
        ),
        # A state row, given; and a first latent alone, with actions to be made.
        Sample(torch.randint(64, (5,)), torch.randn(4, 3, 4, 4), 24.0, (0,), torch.randn(9, 6), 6, 1, 0, 2),
        Sample(
            torch.randint(64, (4,)), torch.randn(4, 1, 4, 4), 12.0, (0,), torch.randn(8, 6), 6, domain_id=1
        ),
    ]


def alone(reference, sample: Sample, level: float):
    """One sample through diffusers' transformer, its inputs built by diffusers' pipeline."""
    pipeline = SimpleNamespace(transformer=reference, vae_scale_factor_temporal=4)
    build = Cosmos3OmniPipeline
    text = build._prepare_text_segment(pipeline, sample.text_ids.tolist(), "cpu")
    offset = text["vision_start_temporal_offset"]
    vision = build._prepare_vision_segment(
        pipeline,
        sample.latents[None],
        True,
        offset,
        sample.fps,
        text["und_len"],
        "cpu",
        list(sample.clean_frames),
    )
    length = text["und_len"] + vision["num_vision_tokens"]
    positions = [text["text_mrope_ids"], vision["vision_mrope_ids"]]
    extra = {}
    if sample.actions is not None:
        clean = list(range(sample.clean_rows))
        action = build._prepare_action_segment(
            pipeline, sample.actions, clean, offset, sample.fps, length, "cpu"
        )
        length += action.pop("action_len")
        action["action_mrope_ids"], _ = get_3d_mrope_ids_vae_tokens(
            grid_t=len(sample.actions),
            grid_h=1,
            grid_w=1,
            temporal_offset=offset,
            fps=sample.fps,
            base_fps=float(reference.config.base_fps),
            temporal_compression_factor=1,
            base_temporal_compression_factor=4,
            start_frame_offset=sample.first_row,  # the pipeline's is always 1
            reset_spatial_indices=reference.config.unified_3d_mrope_reset_spatial_ids,
        )
        positions.append(action.pop("action_mrope_ids"))
        noisy = action.pop("num_noisy_action_tokens")
        extra = action | {
            "action_tokens": [sample.actions],
            "action_timesteps": torch.full((noisy,), level * 1000),
            "action_domain_ids": [torch.tensor([sample.domain_id])],
        }
    known = ("input_ids", "text_indexes", "und_len", "vision_token_shapes", "vision_sequence_indexes")
    known += ("vision_mse_loss_indexes", "vision_noisy_frame_indexes")
    return reference(
        position_ids=torch.cat(positions, dim=1),
        sequence_length=length,
        vision_tokens=[sample.latents[None]],
        vision_timesteps=torch.full((vision["num_noisy_vision_tokens"],), level * 1000),
        **{name: value for name, value in (text | vision).items() if name in known},
        **extra,
        return_dict=False,
    )


def test_packed_samples_equal_each_alone_in_outputs_and_gradients(model):
    torch.manual_seed(1)
    reference = Cosmos3OmniTransformer(**TINY.config())
    reference.load_state_dict(model.state_dict())
    batch, levels = samples(), [0.2, 0.5, 0.7, 0.9, 0.3, 0.6]
    videos, actions = model(pack(batch, levels, model.config))
    loss, expected_loss = torch.zeros(()), torch.zeros(())
    acting = iter(actions)
    for sample, level, video in zip(batch, levels, videos, strict=True):
        expected_videos, _, expected_actions = alone(reference, sample, level)
        torch.testing.assert_close(video, expected_videos[0], rtol=0, atol=TOLERANCE)
        weight = torch.randn_like(video)
        loss, expected_loss = (
            loss + (weight * video).sum(),
            expected_loss + (weight * expected_videos[0]).sum(),
        )
        if expected_actions is not None:
            action = next(acting)
            torch.testing.assert_close(action, expected_actions[0], rtol=0, atol=TOLERANCE)
            weight = torch.randn_like(action)
            loss, expected_loss = (
                loss + (weight * action).sum(),
                expected_loss + (weight * expected_actions[0]).sum(),
            )
    loss.backward()
    expected_loss.backward()
    wanted = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            scale = max(1.0, float(wanted[name].grad.abs().max()))
            torch.testing.assert_close(
                parameter.grad, wanted[name].grad, rtol=0, atol=TOLERANCE * scale, msg=name
            )
        else:  # frozen because nothing depends on it
            assert wanted[name].grad is None or not wanted[name].grad.any(), name


def test_heads_that_a_batch_does_not_use_get_gradients_of_zero(model):
    only_video = [samples()[0]]
    flow_matching_loss(model, only_video, ObjectiveSettings(), 64)["loss"].backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) != parameter.requires_grad, name
    assert not model.action_proj_in.fc.weight.grad.any()


@pytest.mark.parametrize("mean_over", ["all", "made"])
def test_padding_and_clean_parts_never_count(model, mean_over):
    settings = ObjectiveSettings(mean_over=mean_over)
    torch.manual_seed(2)
    first = flow_matching_loss(model, samples(), settings, 64)
    assert all(torch.isfinite(term) for term in first.values())
    padded = samples()[1]
    model.zero_grad()
    flow_matching_loss(model, [padded], settings, 64)["loss"].backward()
    out = model.action_proj_out
    gradient = out.fc.weight.grad.view(3, 32, 6)
    assert gradient[1, :, :5].abs().sum() > 0
    assert not gradient[1, :, 5].any()  # the width beyond the embodiment's own
    assert not gradient[[0, 2]].any()  # other embodiments


@pytest.mark.parametrize("mean_over", ["all", "made"])
def test_what_lies_beyond_an_episode_never_counts(model, mean_over):
    """Outputs beyond the counted ones get no gradient; the loss is the mean over the counted ones."""
    settings = ObjectiveSettings(mean_over=mean_over, video_weight=1, action_weight=1)
    sample = dataclasses.replace(samples()[4], counted_frames=2, counted_rows=4)
    torch.manual_seed(3)
    seen = {}

    class Spy(torch.nn.Module):
        config = model.config

        def forward(self, packed):
            videos, actions = model(packed)
            seen["video"], seen["action"] = videos[0], actions[0]
            for output in seen.values():
                output.retain_grad()
            return videos, actions

    flow_matching_loss(Spy(), [sample], settings, 64)["loss"].backward()
    touched = seen["video"].grad[0].abs().sum((0, 2, 3)) > 0
    assert touched.tolist() == [False, True, False]
    rows = seen["action"].grad.abs().sum(1) > 0
    assert rows.tolist() == [False, True, True, True] + [False] * 5
    torch.manual_seed(3)
    levels = draw_levels(1, settings, 64, torch.device("cpu"))
    _, ((target, action_target),) = add_noise([sample], levels)
    error = (seen["video"][0, :, 1] - target[:, 1]).square().sum() / (4 * 4 * 4)
    action_error = (seen["action"][1:4] - action_target[1:4]).square().mean()
    if mean_over == "all":
        error, action_error = error / 2, action_error * 3 / 4
    torch.manual_seed(3)
    terms = flow_matching_loss(model, [sample], settings, 64)
    torch.testing.assert_close(terms["video"], error, rtol=1e-5, atol=0)
    torch.testing.assert_close(terms["action"], action_error, rtol=1e-5, atol=0)


def test_noise_levels_follow_the_published_formulas():
    u = torch.tensor([0.0, 0.25, 0.5, 1.0], dtype=torch.float64)
    expected = 1 - u - 1.29 * (torch.cos(torch.pi / 2 * u) ** 2 - 1 + u)
    torch.testing.assert_close(waver(u), expected, rtol=0, atol=1e-12)
    assert [shift_of(side) for side in (64, 256, 480, 704, 720, 1080)] == [3, 3, 5, 10, 10, 10]
    torch.manual_seed(0)
    levels = draw_levels(20000, ObjectiveSettings(), 256, torch.device("cpu"))
    assert levels.min() >= 0
    assert levels.max() <= 1
    torch.manual_seed(0)
    raw = waver(torch.rand(20000))
    torch.testing.assert_close(levels, 3 * raw / (1 + 2 * raw))


def test_published_sizes():
    """Nano with its action heads: 15.17 B parameters, the language head included."""
    with torch.device("meta"):
        model = CosmosModel.from_settings(ModelSettings(action_dim=64))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert round(count / 1e9, 2) == 15.17
