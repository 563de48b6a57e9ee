"""What the robot says and what the model sees."""

import numpy as np
import pytest
import torch

from dreamzero_sft.samples import first_frame_condition, latent_mask
from dreamzero_sft.statistics import build_metadata, read_metadata
from dreamzero_sft.transforms import Transform, ViewSettings
from flywheel_shared.errors import UserError
from flywheel_shared.views import side_by_side


def test_a_request_and_a_training_frame_become_the_same_picture():
    metadata = build_metadata("x", np.random.default_rng(0).normal(size=(10, 7)), np.zeros((10, 8)), {})["x"]
    transform = Transform(metadata, ViewSettings(height=16, width=16), 7, 8)
    frames = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8)
    whole_episode = transform.resize(frames)
    for index in range(6):
        torch.testing.assert_close(
            transform.resize(frames[index : index + 1]), whole_episode[index : index + 1]
        )
    picture = side_by_side([whole_episode[None], whole_episode[None]])
    assert picture.shape == (1, 3, 6, 16, 32)
    assert -1 <= picture.min() <= picture.max() <= 1


def test_a_latent_counts_only_where_all_its_frames_are_real():
    valid = torch.tensor([[True] * 9, [True] * 6 + [False] * 3])
    assert latent_mask(valid, 4).tolist() == [[True, True, True], [True, True, False]]


def test_the_image_condition_marks_and_holds_frame_0_alone():
    latents = torch.randn(2, 3, 4, 2, 2)
    y = first_frame_condition(latents)
    assert y.shape == (2, 7, 4, 2, 2)
    torch.testing.assert_close(y[:, 4:, 0], latents[:, :, 0])
    assert y[:, :4, 0].eq(1).all()
    assert not y[:, :, 1:].any()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "not JSON"),
        ('{"droid": {}}', "no embodiment 'libero_sim'; found droid"),
        ('{"libero_sim": {"statistics": {}}}', "lacks state.state or action.actions"),
        (
            '{"libero_sim": {"statistics": {"state": {"state": {"q01": [NaN], "q99": [1]}}, "action": {}}}}',
            "q01 is not finite",
        ),
    ],
)
def test_bad_metadata_is_named(tmp_path, content, reason):
    path = tmp_path / "metadata.json"
    path.write_text(content)
    with pytest.raises(UserError, match=reason):
        read_metadata(path, "libero_sim")
