"""Weights from safetensors, DCP folders and runs, straight into shards, with an account of every name."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cosmos_export import SETTINGS, write_export
from ranks import run_ranks
from safetensors.torch import save_file

from flywheel_shared.cosmos.build import build_sharded
from flywheel_shared.cosmos.model import CosmosModel, init_from_scratch
from flywheel_shared.errors import UserError
from flywheel_shared.fsdp import local
from flywheel_shared.launch import World, distributed
from flywheel_shared.mesh import ParallelDims
from flywheel_shared.trainer import TrainerSettings
from flywheel_shared.warm_start import WarmStartSettings, warm_start

TRAINER = TrainerSettings(max_steps=1, learning_rate=1e-3, seed=3)


@pytest.fixture
def world():
    with distributed("cpu") as made:
        yield made


def fresh(seed: int) -> CosmosModel:
    model = CosmosModel.from_settings(SETTINGS)
    init_from_scratch(model, seed)
    return model


def test_safetensors_fill_all_but_what_is_skipped(world, tmp_path):
    write_export(tmp_path, seed=1)
    source, model = fresh(1).state_dict(), fresh(2)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    report = warm_start(model, WarmStartSettings(source=tmp_path, skip=("action_",)), Path(), world)
    assert report.missing == report.unexpected == []
    assert any(name.startswith("action_proj_in") for name in report.skipped)
    for name, tensor in model.state_dict().items():
        expected = before if "action_" in name else source
        assert torch.equal(tensor, expected[name]), name


def test_names_that_do_not_match_are_told(world, tmp_path):
    weights = {f"net.{name}": x.bfloat16() for name, x in fresh(1).state_dict().items()}
    del weights["net.proj_in.weight"]
    weights["net.sound_proj_in.weight"] = torch.zeros(3)
    save_file(weights, tmp_path / "model.safetensors")
    model = fresh(2)
    report = warm_start(model, WarmStartSettings(source=tmp_path, prefix="net."), Path(), world)
    assert report.missing == ["proj_in.weight"]
    assert report.unexpected == ["sound_proj_in.weight"]
    assert torch.equal(model.proj_out.weight, fresh(1).proj_out.weight.bfloat16().float())
    assert "1 missing (proj_in.weight)" in report.line()


def test_another_shape_and_another_model_are_refused(world, tmp_path):
    save_file({"proj_in.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(
        UserError, match=r"proj_in.weight is \[2, 2\], the model's is \[32, 24\]; name it in skip"
    ):
        warm_start(fresh(0), WarmStartSettings(source=tmp_path), Path(), world)
    save_file({"something": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="nothing fits the model: it has something"):
        warm_start(fresh(0), WarmStartSettings(source=tmp_path), Path(), world)
    with pytest.raises(UserError, match="neither safetensors nor a checkpoint"):
        warm_start(fresh(0), WarmStartSettings(source=tmp_path / "nowhere"), Path(), world)
    (tmp_path / "model.safetensors").write_bytes(b"not at all")
    with pytest.raises(UserError, match="cannot be read"):
        warm_start(fresh(0), WarmStartSettings(source=tmp_path), Path(), world)


def whole_after_start(world: World, source: str | None, replicate: int) -> dict[str, torch.Tensor]:
    mesh = ParallelDims(replicate=replicate).build(world)
    start = None if source is None else WarmStartSettings(source=Path(source))
    model, _ = build_sharded(SETTINGS, TRAINER, mesh, world, start)
    assert all(local(p).numel() < p.numel() for p in model.parameters() if p.shape[0] % 4 == 0)
    return {name: x.full_tensor() for name, x in model.state_dict().items()}


@pytest.mark.distributed
@pytest.mark.parametrize("form", ["fresh", "safetensors", "dcp"])
def test_every_mesh_starts_from_the_same_weights(tmp_path, form):
    expected = fresh(3 if form == "fresh" else 1).state_dict()
    source = None
    if form == "safetensors":
        source = str(write_export(tmp_path / "export", seed=1))
    elif form == "dcp":
        source = str(tmp_path / "dcp")
        dcp.save(expected, checkpoint_id=source)
    for tensors in run_ranks(4, whole_after_start, source, 2, scratch=tmp_path / "ranks"):
        for name, tensor in tensors.items():
            assert torch.equal(tensor, expected[name]), name


def test_the_report_is_kept(world, tmp_path):
    from flywheel_shared.warm_start import write_report

    write_export(tmp_path / "export")
    report = warm_start(fresh(2), WarmStartSettings(source=Path("export")), tmp_path, world)
    write_report(report, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "warm_start.json").read_text())["loaded"] == report.loaded
