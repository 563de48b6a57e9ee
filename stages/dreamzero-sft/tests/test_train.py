"""From a corpus to a served policy, through the command line: metadata, train on 2 ranks, resume, serve."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dreamzero_tiny import LAPTOP, SMALL, rows_of, write_corpus
from safetensors.torch import save_file

from dreamzero_sft.policy import DreamZeroPolicy
from flywheel_shared.policy_protocol import PolicyClient, PolicyError
from flywheel_shared.policy_server import serve_in_background

pytestmark = pytest.mark.distributed
STEPS = 12


def command(root: Path, verb: str, *more: str) -> list[str]:
    words = [sys.executable, "-m", "dreamzero_sft", verb, "--recipe", str(LAPTOP), "--root", str(root)]
    return [*words, *(w for s in SMALL for w in ("--set", s)), *more]


def train(root: Path, *more: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    words = [
        "--nproc",
        "2",
        "--device",
        "cpu",
        "--timeout-s",
        "60",
        "--set",
        f"trainer.max_steps={STEPS}",
        *more,
    ]
    words += ["--set", "trainer.checkpoint_every=4"]
    done = subprocess.run(
        command(root, "train", *words), capture_output=True, text=True, timeout=240, check=False
    )
    assert not check or done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("root")
    write_corpus(root / "corpus" / "libero")
    subprocess.run(command(root, "metadata"), check=True, capture_output=True, timeout=120)
    return root


@pytest.fixture(scope="module")
def trained(prepared) -> Path:
    train(prepared)
    return prepared


def losses(root: Path) -> list[float]:
    return [row["train/loss"] for row in rows_of(root / "checkpoints" / "dreamzero" / "metrics.jsonl")]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    reader = dcp.FileSystemReader(str(folder))
    tree = {
        name: torch.empty(found.size, dtype=found.properties.dtype)
        for name, found in reader.read_metadata().state_dict_metadata.items()
    }
    dcp.load(tree, storage_reader=reader, no_dist=True)
    return tree


def latest(root: Path) -> Path:
    run = root / "checkpoints" / "dreamzero"
    return run / (run / "latest_checkpoint.txt").read_text().strip()


def test_training_learns_and_saves_whole_checkpoints(trained):
    found = losses(trained)
    assert len(found) == STEPS
    assert all(np.isfinite(found))
    assert np.mean(found[-3:]) < np.mean(found[:3])
    assert latest(trained).name == f"iter_{STEPS:09d}"
    assert {p.name for p in latest(trained).iterdir()} == {
        "model", "ema", "optim", "trainer", "assets", "commit.json"
    }  # fmt: skip


@pytest.mark.slow
def test_a_run_ended_by_sigterm_goes_on_bit_for_bit(trained, tmp_path):
    for folder in ("corpus", "metadata"):
        shutil.copytree(trained / folder, tmp_path / folder)
    words = ["--nproc", "2", "--device", "cpu", "--set", f"trainer.max_steps={STEPS}"]
    words += ["--set", "trainer.checkpoint_every=4"]
    with subprocess.Popen(command(tmp_path, "train", *words), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 5/"):
                process.send_signal(signal.SIGTERM)
                break
        process.stdout.read()
        assert process.wait(60) == 143
    stopped_at = json.loads((latest(tmp_path) / "commit.json").read_text())["step"]
    assert 5 <= stopped_at < STEPS
    train(tmp_path)
    assert losses(tmp_path) == losses(trained)
    for part in ("model", "ema"):
        ours, reference = weights(latest(tmp_path) / part), weights(latest(trained) / part)
        assert all(torch.equal(ours[name], reference[name]) for name in reference)


def test_another_model_in_the_same_run_is_refused(trained):
    done = train(trained, "--set", "model.dim=64", check=False)
    assert done.returncode == 2
    assert "was started with another recipe" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_corpus_is_one_line(tmp_path):
    done = subprocess.run(
        command(tmp_path, "metadata"), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert str(tmp_path / "corpus" / "libero") in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def export(trained, tmp_path_factory) -> Path:
    """What dcp-convert makes, by hand: another stage cannot be imported."""
    folder = tmp_path_factory.mktemp("export")
    shutil.copytree(latest(trained) / "assets", folder, dirs_exist_ok=True)
    save_file(weights(latest(trained) / "ema"), folder / "model.safetensors")
    return folder


def request(**changes):
    rng = np.random.default_rng(0)
    return {
        "observation/image": rng.integers(0, 256, (32, 32, 3), dtype=np.uint8),
        "observation/wrist_image": rng.integers(0, 256, (48, 48, 3), dtype=np.uint8),
        "observation/state": np.zeros(8, dtype=np.float32),
        "prompt": "move the square",
    } | changes


def test_an_export_answers_over_the_socket_and_says_what_it_is(export):
    policy = DreamZeroPolicy(export, torch.device("cpu"))
    with serve_in_background(policy) as uri, PolicyClient(uri, timeout_s=60) as client:
        metadata = client.connect()
        assert (metadata["action_horizon"], metadata["action_dim"], metadata["rate_hz"]) == (8, 7, 10)
        first = client.infer(request())["actions"]
        assert first.shape == (8, 7)
        assert np.isfinite(first).all()
        np.testing.assert_array_equal(client.infer(request())["actions"], first)  # a fixed noise seed
        moved = client.infer(request(**{"observation/state": np.ones(8, dtype=np.float32)}))["actions"]
        assert np.abs(moved - first).max() > 1e-5


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"observation/image": np.zeros((32, 32, 3), dtype=np.float32)}, "observation/image: uint8"),
        ({"observation/wrist_image": np.zeros((32, 32), dtype=np.uint8)}, "observation/wrist_image: uint8"),
        ({"observation/state": np.zeros(7, dtype=np.float32)}, "observation/state: "),
        ({"observation/state": np.full(8, np.nan, dtype=np.float32)}, "finite"),
        ({"prompt": ""}, "prompt: "),
    ],
)
def test_a_wrong_request_is_told_what_is_wrong_and_the_server_lives_on(export, changes, reason):
    policy = DreamZeroPolicy(export, torch.device("cpu"))
    with serve_in_background(policy) as uri, PolicyClient(uri, timeout_s=60) as client:
        with pytest.raises(PolicyError, match=reason):
            client.infer(request(**changes))
        assert client.infer(request())["actions"].shape == (8, 7)


def test_the_server_announces_itself_and_stops_on_sigterm(export, tmp_path):
    ready = tmp_path / "ready"
    words = ["serve", "--export", str(export), "--port", "0", "--ready-file", str(ready)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-m", "dreamzero_sft", *words], env=environment) as process:
        try:
            limit = time.monotonic() + 120
            while not ready.exists():
                assert process.poll() is None
                assert time.monotonic() < limit
                time.sleep(0.1)
            with PolicyClient(f"ws://{ready.read_text()}", timeout_s=60) as client:
                assert client.infer(request())["actions"].shape == (8, 7)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()


def test_an_export_without_a_tensor_is_refused(export, tmp_path):
    from safetensors.torch import load_file

    from flywheel_shared.errors import UserError

    broken = tmp_path / "export"
    shutil.copytree(export, broken)
    tensors = load_file(broken / "model.safetensors")
    del tensors["head.head.weight"]
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(UserError, match="1 missing"):
        DreamZeroPolicy(broken, torch.device("cpu"))
