"""From clips to an export that makes clips, through the command line: train on 2 ranks, stop, resume."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from vision_tiny import LAPTOP, SMALL, row, write_clips, write_rows

from flywheel_shared.cosmos.generation import VideoGenerator, VideoRequest

pytestmark = pytest.mark.distributed
STEPS = 12


def words(root: Path, *more: str, ranks: int = 2) -> list[str]:
    command = [sys.executable, "-m", "vision_sft", "train", "--recipe", str(LAPTOP), "--root", str(root)]
    command += ["--nproc", str(ranks), "--device", "cpu", "--timeout-s", "60"]
    settings = [*SMALL, f"trainer.max_steps={STEPS}", "trainer.checkpoint_every=4", *more]
    return [*command, *(word for setting in settings for word in ("--set", setting))]


def train(root: Path, *more: str, ranks: int = 2, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        words(root, *more, ranks=ranks), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == code, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("root")
    write_clips(root / "clips" / "libero")
    train(root)
    return root


def losses(root: Path) -> list[float]:
    lines = (root / "checkpoints" / "vision" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["train/loss"] for line in lines if "train/loss" in line]


def latest(root: Path) -> Path:
    run = root / "checkpoints" / "vision"
    return run / (run / "latest_checkpoint.txt").read_text().strip()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    reader = dcp.FileSystemReader(str(folder))
    tree = {
        name: torch.empty(found.size, dtype=found.properties.dtype)
        for name, found in reader.read_metadata().state_dict_metadata.items()
    }
    dcp.load(tree, storage_reader=reader, no_dist=True)
    return tree


def export(root: Path, to: Path) -> Path:
    to.mkdir(parents=True)
    save_file(weights(latest(root) / "ema"), to / "model.safetensors")
    for asset in (latest(root) / "assets").iterdir():
        shutil.copyfile(asset, to / asset.name)
    return to


def test_training_learns_and_its_export_makes_clips(trained, tmp_path):
    found = losses(trained)
    assert len(found) == STEPS
    assert np.isfinite(found).all()
    assert np.mean(found[-3:]) < np.mean(found[:3])
    generator = VideoGenerator.load(export(trained, tmp_path / "export"))
    usual = generator.defaults
    assert (usual.height, usual.width, usual.num_frames, usual.fps) == (32, 64, 9, 10.0)
    (clip,) = generator.generate([VideoRequest("move", 64, 32, 9, 10.0, 0, 2, 1.0)])
    assert clip.shape == (9, 32, 64, 3)


def test_a_run_ended_by_sigterm_goes_on_bit_for_bit(trained, tmp_path):
    shutil.copytree(trained / "clips", tmp_path / "clips")
    with subprocess.Popen(words(tmp_path), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 5/"):
                process.send_signal(signal.SIGTERM)
                break
        process.stdout.read()
        assert process.wait(60) == 143
    train(tmp_path)
    assert losses(tmp_path) == losses(trained)
    ours, reference = weights(latest(tmp_path) / "ema"), weights(latest(trained) / "ema")
    assert all(torch.equal(ours[name], reference[name]) for name in reference)


def test_a_warm_start_goes_on_with_weights_and_tokenizer(trained, tmp_path):
    shutil.copytree(trained / "clips", tmp_path / "clips")
    source = export(trained, tmp_path / "export" / "vision")
    done = train(
        tmp_path, "start.source=export/vision", 'start.skip=["time_embedder"]', "trainer.max_steps=1", ranks=1
    )
    assert "started from" in done.stdout
    report = json.loads((tmp_path / "checkpoints" / "vision" / "warm_start.json").read_text())
    assert report["missing"] == report["unexpected"] == []
    assert all("time_embedder" in name for name in report["skipped"])
    name = "video_tokenizer.safetensors"
    assert (latest(tmp_path) / "assets" / name).read_bytes()[-1000:] == (source / name).read_bytes()[-1000:]
    moved = weights(latest(tmp_path) / "model")["layers.0.self_attn.add_q_proj.weight"]
    start = weights(latest(trained) / "ema")["layers.0.self_attn.add_q_proj.weight"]
    assert (moved - start).abs().max() < 2 * 3e-3  # one step of Adam away


def test_broken_files_are_skipped_and_too_many_end_the_run(trained, tmp_path):
    shutil.copytree(trained / "clips", tmp_path / "clips")
    clips = tmp_path / "clips" / "libero"
    (clips / "videos" / "3.mp4").write_bytes(os.urandom(100))
    done = train(tmp_path, "data.max_bad_share=0.1", "trainer.max_steps=2", ranks=1)
    assert "3.mp4: cannot be decoded" in done.stderr
    for clip in (4, 5):
        (clips / "videos" / f"{clip}.mp4").write_bytes(os.urandom(100))
    done = train(tmp_path, "data.max_bad_share=0.1", "run=other", "trainer.max_steps=9", ranks=1, code=2)
    assert "of 12 windows cannot be trained on" in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 4


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("data.token_budget=20", "oversized: "),
        ("model.vocab_size=300", "model.vocab_size = 300: the tokenizer has 384 ids"),
        ("model.latent_channel=5", "model.latent_channel = 5 must equal tokenizer.channels = 6"),
        ('data.clips=["nowhere"]', "clips/nowhere/train/video_dataset_file.jsonl: no such file"),
        ('data.clip=["x"]', "data.clip: unknown key (did you mean clips?)"),
    ],
)
def test_a_recipe_that_cannot_be_met_is_one_line(trained, setting, said):
    done = train(trained, setting, "run=faulty", ranks=1, code=2)
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_clips_of_two_sizes_are_packed_together(tmp_path):
    folder = tmp_path / "clips" / "libero"
    rows = write_clips(folder, count=6)
    small = [one | {"uuid": f"s-{one['uuid']}"} for one in write_clips(tmp_path / "small", 6, size=(16, 32))]
    for number in range(6):
        shutil.copyfile(tmp_path / "small" / "videos" / f"{number}.mp4", folder / "videos" / f"s{number}.mp4")
        small[number]["vision_path"] = f"../videos/s{number}.mp4"
    write_rows(folder, rows + small)
    train(tmp_path, "trainer.max_steps=4")
    assert np.isfinite(losses(tmp_path)).all()
    assert row(0)["height"] == 32
