"""The published model's numbers, on a fixture made by running it with random weights."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from dreamzero_sft.model import ModelSettings, WorldActionModel

GOLDEN = Path(
    os.environ.get("WAM_FIXTURE", Path(__file__).parents[4] / "shared/golden/wam_i2v_tiny.safetensors")
)
TOLERANCE = 1e-5  # float32, outputs of order 0.1
PREFIXES = ("w.", "in.", "out.")


@pytest.fixture(scope="module")
def fixture():
    if not GOLDEN.exists():
        pytest.skip(f"no fixture of the published model at {GOLDEN.name}: set WAM_FIXTURE to one")
    with safe_open(GOLDEN, "pt") as f:
        config = json.loads(f.metadata()["config"])
        tensors = {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118 - safe_open is no dict
    groups = [{k.removeprefix(p): v for k, v in tensors.items() if k.startswith(p)} for p in PREFIXES]
    return config, *groups


def build(config, weights):
    fields = {
        k: tuple(v) if k == "patch_size" else v for k, v in config.items() if k in ModelSettings.model_fields
    }
    model = WorldActionModel(ModelSettings(**fields))
    model.load_state_dict(weights, strict=True)
    return model


def run_training(model, inputs):
    return model(
        inputs["x"], inputs["clean_x"], inputs["timestep"], inputs["action"], inputs["timestep_action"],
        inputs["state"], inputs["context"], inputs["clip_feature"], inputs.get("y"),
    )  # fmt: skip


def test_training_forward_equals_the_published_model(fixture):
    config, weights, inputs, expected = fixture
    with torch.no_grad():
        video, action = run_training(build(config, weights), inputs)
    torch.testing.assert_close(video, expected["video"], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(action, expected["action"], rtol=0, atol=TOLERANCE)


def test_gradient_norm_of_every_parameter_equals_the_published_model(fixture):
    config, weights, inputs, _ = fixture
    side = GOLDEN.with_suffix(".json")
    if not side.exists():
        pytest.skip("the fixture has no gradient norms beside it")
    expected = json.loads(side.read_text())
    model = build(config, weights)
    video, action = run_training(model, inputs)
    loss = video.square().mean() + action.square().mean()
    assert loss.item() == pytest.approx(expected["loss_mean_square"], rel=1e-5)
    loss.backward()
    norms = {name: p.grad.norm().item() for name, p in model.named_parameters()}
    assert norms.keys() == expected["grad_norms"].keys()
    for name, value in expected["grad_norms"].items():
        assert norms[name] == pytest.approx(value, rel=1e-4, abs=1e-8), name


def test_cached_inference_equals_the_published_model(fixture):
    config, weights, inputs, expected = fixture
    model = build(config, weights)
    f, a = config["num_frame_per_block"], config["num_action_per_block"]
    y = inputs.get("y")
    batch = inputs["x"].shape[0]
    with torch.no_grad():
        cache = model.new_cache()
        context = model.encode_context(inputs["context"], inputs["clip_feature"])
        first_y, block_y = (None, None) if y is None else (y[:, :, :1], y[:, :, 1 : 1 + f])
        model.observe(inputs["x"][:, :, :1], 0, cache, context, first_y)
        video, action = model.denoise(
            inputs["x"][:, :, 1 : 1 + f], torch.full((batch, f), 500.0), inputs["action"][:, :a],
            torch.full((batch, a), 500.0), inputs["state"][:, : config["num_state_per_block"]], 1, cache, context,
            block_y, isolate_state=False,
        )  # fmt: skip
    torch.testing.assert_close(video, expected["cached_video"], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(action, expected["cached_action"], rtol=0, atol=TOLERANCE)
