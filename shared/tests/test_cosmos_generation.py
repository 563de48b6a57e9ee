"""Sampling and generation: what is given stays, what is made depends on its own request alone."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from cosmos_export import write_export

from flywheel_shared.cosmos.export import Export
from flywheel_shared.cosmos.generation import VideoGenerator, VideoRequest
from flywheel_shared.cosmos.sampler import SamplerSettings, sample_clips
from flywheel_shared.cosmos.sequence import Packed, Sample
from flywheel_shared.cosmos.text import PromptTokenizer, TextSettings
from flywheel_shared.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_export(tmp_path_factory.mktemp("export"))


@pytest.fixture(scope="module")
def generator(folder):
    return VideoGenerator.load(folder)


def picture(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (1, 32, 64, 3), dtype=np.uint8)


def request(**changes) -> VideoRequest:
    plain = VideoRequest("pick up the bowl", 64, 32, 9, 10.0, 7, 3, 1.0)
    return dataclasses.replace(plain, **changes)


class Line:
    """A model whose velocity leads on a straight line from the noise to `goal`: the exact solution is known."""

    config = None

    def __init__(self, goal: float, action_goal: float) -> None:
        self.goal, self.action_goal = goal, action_goal

    def __call__(self, packed: Packed):
        level = float(packed.inputs["vision_timesteps"][0]) / 1000
        videos = [(x - self.goal) / level for x in packed.inputs["vision_tokens"]]
        actions = [(x - self.action_goal) / level for x in packed.inputs.get("action_tokens", [])]
        return videos, actions


def test_a_straight_flow_is_followed_to_its_end(monkeypatch):
    from types import SimpleNamespace

    from flywheel_shared.cosmos.model import ModelSettings

    line = Line(0.5, -0.25)
    line.config = SimpleNamespace(
        **ModelSettings(action_dim=6).config(),
        enable_fps_modulation=True,
        unified_3d_mrope_temporal_modality_margin=15000,
        unified_3d_mrope_reset_spatial_ids=True,
    )
    ids = torch.arange(5)
    given = torch.full((4, 3, 4, 4), 2.0)
    samples = [
        Sample(ids, given, 10.0, (0,), torch.zeros(8, 6), 5),
        Sample(ids, torch.zeros(4, 2, 6, 4), 10.0),
        Sample(ids, given, 10.0, (0, 1, 2), torch.full((8, 6), 9.0), 6),
        Sample(ids, given, 10.0, (0,), torch.full((8, 6), 9.0), 6, clean_rows=8),
    ]
    made = sample_clips(line, samples, [1, 2, 3, 4], SamplerSettings(steps=8), 64)
    assert torch.equal(made[0].latents[:, 0], given[:, 0])
    torch.testing.assert_close(made[0].latents[:, 1:], torch.full((4, 2, 4, 4), 0.5), rtol=0, atol=1e-4)
    torch.testing.assert_close(made[0].actions[:, :5], torch.full((8, 5), -0.25), rtol=0, atol=1e-4)
    assert not made[0].actions[:, 5].any()
    torch.testing.assert_close(made[1].latents, torch.full((4, 2, 6, 4), 0.5), rtol=0, atol=1e-4)
    assert torch.equal(made[2].latents, given)
    torch.testing.assert_close(made[2].actions, torch.full((8, 6), -0.25), rtol=0, atol=1e-4)
    assert torch.equal(made[3].actions, samples[3].actions)


def test_a_clip_is_the_same_alone_and_among_others(generator):
    one, other = request(frames=picture(0)), request(prompt="close the drawer, please", seed=8)
    together = generator.generate([one, other])
    alone = generator.generate([one])[0]
    assert together[0].shape == (9, 32, 64, 3)
    assert together[0].dtype == np.uint8
    assert np.abs(together[0].astype(int) - alone).max() <= 1  # rounding to 8 bits
    again = generator.generate([request(frames=picture(0), seed=9)])[0]
    assert (again[1:] != alone[1:]).any()


def test_the_given_frame_comes_back_as_the_tokenizer_codes_it(folder, generator):
    frame = picture(1)
    clip = generator.generate([request(frames=frame)])[0]
    tokenizer = Export.load(folder, torch.device("cpu")).tokenizer
    coded = tokenizer.decode(tokenizer.encode(torch.from_numpy(frame).permute(3, 0, 1, 2)[None]))
    expected = ((coded[0, :, 0] + 1) * 127.5).permute(1, 2, 0).numpy()
    assert np.abs(clip[0] - expected).max() <= 1


def test_guidance_moves_away_from_the_negative_prompt(folder):
    export = Export.load(folder, torch.device("cpu"))
    sample = Sample(torch.arange(5), torch.zeros(6, 3, 4, 8), 10.0, (0,))
    plain, guided, back = (
        sample_clips(
            export.model, [sample], [0], SamplerSettings(steps=1, guidance=g), 32, [torch.arange(9)]
        )[0]
        for g in (1.0, 3.0, 0.0)
    )
    # One Euler step is linear in the velocity: x(g) = x(0) + g (x(1) - x(0)).
    expected = back.latents + 3 * (plain.latents - back.latents)
    torch.testing.assert_close(guided.latents, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(guided.latents, plain.latents)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"width": 60}, "width: found 60; allowed: multiples of 8"),
        ({"num_frames": 8}, "num_frames: found 8"),
        ({"fps": 0.0}, "fps: found 0.0"),
        ({"num_inference_steps": 0}, "num_inference_steps: found 0"),
        ({"frames": np.zeros((1, 32, 64), np.uint8)}, "frames: found uint8"),
        ({"frames": np.zeros((9, 32, 64, 3), np.uint8)}, "nothing is left to make"),
        ({"prompt": "x" * 3000}, "prompt of 3002 tokens"),
    ],
)
def test_what_cannot_be_made_is_refused_by_name(generator, changes, said):
    with pytest.raises(UserError, match=said.replace("(", r"\(")):
        generator.generate([request(**changes)])


def test_an_export_that_is_none_is_refused(folder, tmp_path):
    with pytest.raises(UserError, match=r"config\.json: no such file"):
        VideoGenerator.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"format": "dreamzero-sft/1"}))
    with pytest.raises(UserError, match="format is 'dreamzero-sft/1'"):
        VideoGenerator.load(tmp_path)


def test_prompts_of_bytes_are_closed_and_described():
    prompts = PromptTokenizer(TextSettings())
    assert prompts.ids("ab").tolist() == [ord("a") + 3, ord("b") + 3, 1, 259]
    assert int(prompts.ids("grüß").max()) < prompts.vocabulary
    assert prompts.describe("Pick it up.", 17, 10.0, 64, 128) == (
        "Pick it up. The video is 1.7 seconds long and is of 10 FPS. This video is of 64x128 resolution."
    )
    with pytest.raises(UserError, match="no such folder"):
        PromptTokenizer(TextSettings(tokenizer="nowhere"))
