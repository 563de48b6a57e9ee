"""The model's structure: sizes, causality, and that inference is what was trained."""

import pytest
import torch
from dreamzero_tiny import model_settings

from dreamzero_sft.model import ModelSettings, WorldActionModel, build_on_meta, parameter_count

WAN21_14B = ModelSettings(
    model_type="i2v", dim=5120, ffn_dim=13824, num_heads=40, num_layers=40, in_dim=36, out_dim=16,
    concat_first_frame_latent=True,
)  # fmt: skip
WAN22_5B = ModelSettings(dim=3072, ffn_dim=14336, num_heads=24, num_layers=30, in_dim=48, out_dim=48)


def random_model(seed=0, **changes):
    torch.manual_seed(seed)
    model = WorldActionModel(model_settings(**changes)).double()
    model.init_weights()
    torch.nn.init.normal_(model.head.head.weight, std=0.1)  # published initialisation is zero
    return model


def inputs(model, blocks=2, batch=2):
    s = model.settings
    frames = 1 + blocks * s.num_frame_per_block
    video = torch.randn(batch, 4, frames, 4, 6, dtype=torch.float64)
    return {
        "noisy": video,
        "clean": torch.randn_like(video),
        "timestep": torch.rand(batch, frames, dtype=torch.float64) * 1000,
        "action": torch.randn(batch, blocks * s.num_action_per_block, 7, dtype=torch.float64),
        "timestep_action": torch.rand(batch, blocks * s.num_action_per_block, dtype=torch.float64) * 1000,
        "state": torch.randn(batch, blocks, 8, dtype=torch.float64),
        "context": torch.randn(batch, 5, 12, dtype=torch.float64),
        "clip_feature": torch.randn(batch, 3, 10, dtype=torch.float64),
    }


@pytest.mark.parametrize(("settings", "count"), [(WAN21_14B, 16_484_292_448), (WAN22_5B, 5_606_692_832)])
def test_parameter_counts_are_the_published_ones(settings, count):
    assert parameter_count(build_on_meta(settings)) == count


def test_a_block_sees_neither_later_blocks_nor_other_blocks_noise():
    model = random_model()
    given = inputs(model)
    video, action = model(**given)
    changed = {name: value.clone() for name, value in given.items()}
    changed["noisy"][:, :, 3:] += 1  # block 1
    changed["action"][:, 4:] += 1
    changed["state"][:, 1:] += 1
    changed["clean"][:, :, 3:] += 1
    new_video, new_action = model(**changed)
    torch.testing.assert_close(new_video[:, :, :3], video[:, :, :3], rtol=0, atol=1e-12)
    torch.testing.assert_close(new_action[:, :4], action[:, :4], rtol=0, atol=1e-12)
    assert (new_action[:, 4:] - action[:, 4:]).abs().max() > 1e-3


def test_actions_depend_on_what_was_seen_before_and_on_the_state():
    model = random_model()
    given = inputs(model)
    _, action = model(**given)
    for name, where in (
        ("clean", (slice(None), slice(None), 0)),
        ("state", (slice(None), 0)),
        ("clip_feature", ...),
    ):
        changed = given | {name: given[name].clone()}
        changed[name][where] += torch.randn_like(changed[name][where])  # a shift alone would vanish in norms
        assert (model(**changed)[1][:, :4] - action[:, :4]).abs().max() > 1e-4, name


@pytest.mark.parametrize("layers", [1, 3])
def test_cached_inference_of_the_first_block_is_the_training_forward(layers):
    # float64, 1e-10: the same sums in another order.
    model = random_model(num_layers=layers)
    given = inputs(model, blocks=1)
    video, action = model(**given)
    cache, context = model.new_cache(), model.encode_context(given["context"], given["clip_feature"])
    model.observe(given["clean"][:, :, :1], 0, cache, context)
    found_video, found_action = model.denoise(
        given["noisy"][:, :, 1:], given["timestep"][:, 1:], given["action"], given["timestep_action"],
        given["state"], 1, cache, context,
    )  # fmt: skip
    torch.testing.assert_close(found_video, video[:, :, 1:], rtol=0, atol=1e-10)
    torch.testing.assert_close(found_action, action, rtol=0, atol=1e-10)


def test_cached_inference_of_a_later_block_is_the_training_forward():
    model = random_model()
    given = inputs(model, blocks=2)
    video, action = model(**given)
    cache, context = model.new_cache(), model.encode_context(given["context"], given["clip_feature"])
    model.observe(given["clean"][:, :, :1], 0, cache, context)
    model.observe(given["clean"][:, :, 1:3], 1, cache, context)
    found_video, found_action = model.denoise(
        given["noisy"][:, :, 3:], given["timestep"][:, 3:], given["action"][:, 4:], given["timestep_action"][:, 4:],
        given["state"][:, 1:], 3, cache, context,
    )  # fmt: skip
    torch.testing.assert_close(found_video, video[:, :, 3:], rtol=0, atol=1e-10)
    torch.testing.assert_close(found_action, action[:, 4:], rtol=0, atol=1e-10)


def test_one_prompt_for_a_batch_equals_the_prompt_repeated():
    model = random_model()
    given = inputs(model)
    shared = given | {"context": given["context"][:1]}
    repeated = given | {"context": given["context"][:1].expand(2, -1, -1)}
    for ours, reference in zip(model(**shared), model(**repeated), strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-12)


def test_leaving_out_noisy_frame_0_changes_nothing_else():
    torch.manual_seed(1)
    full, short = random_model(), random_model(noisy_first_frame=False)
    short.load_state_dict(full.state_dict())
    given = inputs(full)
    video, action = full(**given)
    short_video, short_action = short(**given)
    torch.testing.assert_close(short_video[:, :, 1:], video[:, :, 1:], rtol=0, atol=1e-12)
    torch.testing.assert_close(short_action, action, rtol=0, atol=1e-12)
    assert not short_video[:, :, 0].any()


def test_bfloat16_weights_keep_times_apart():
    # In bfloat16 996 and 1000 are the same number; the outputs must differ because times stay float32.
    model = random_model().bfloat16()
    given = {k: v.float() for k, v in inputs(model).items()}
    outputs = [model(**(given | {"timestep_action": torch.full((2, 8), t)}))[1] for t in (999.0, 1000.0)]
    assert (outputs[0] - outputs[1]).abs().max() > 0


@pytest.mark.parametrize("dim", [33, 6])
def test_a_width_that_heads_do_not_divide_is_refused(dim):
    with pytest.raises(ValueError, match="even head size"):
        model_settings(dim=dim)
