"""What was trained comes out: every bit, under plain names, in files that safetensors reads."""

import hashlib
import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dcp_convert import export


def load_export(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


@pytest.mark.parametrize("kind", ["run", "iteration", "folder"])
def test_sharded_weights_come_back_bit_for_bit(sharded, tool, same_bits, tmp_path, kind):
    source = {"run": sharded.run, "iteration": sharded.iteration, "folder": sharded.iteration / "model"}[kind]
    result = tool("to-safetensors", source, tmp_path / "out", "--weights", "model")
    assert (result.returncode, result.stdout.count("\n")) == (0, 1), result.stderr
    assert same_bits(load_file(tmp_path / "out" / "model.safetensors"), sharded.model)


def test_unsharded_weights_come_back_bit_for_bit(unsharded, tool, same_bits, tmp_path):
    assert tool("to-safetensors", unsharded.iteration, tmp_path / "out", "--weights", "model").returncode == 0
    assert same_bits(load_file(tmp_path / "out" / "model.safetensors"), unsharded.model)


def test_number_of_ranks_does_not_show_in_the_bytes(sharded, unsharded, tool, tmp_path):
    for name, saved in {"a": sharded, "b": unsharded}.items():
        assert tool("to-safetensors", saved.iteration, tmp_path / name).returncode == 0
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (
        tmp_path / "b" / "model.safetensors"
    ).read_bytes()


def test_file_is_what_the_library_would_have_written(sharded, tool, tmp_path):
    assert tool("to-safetensors", sharded.iteration, tmp_path / "out", "--weights", "model").returncode == 0
    plain = {name: value.contiguous() for name, value in sharded.model.items()}
    save_file(plain, tmp_path / "library.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        tmp_path / "library.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(("weights", "expected"), [("auto", "ema"), ("ema", "ema"), ("model", "model")])
def test_ema_weights_are_taken_unless_asked_otherwise(sharded, tool, same_bits, tmp_path, weights, expected):
    assert tool("to-safetensors", sharded.run, tmp_path / "out", "--weights", weights).returncode == 0
    assert same_bits(load_export(tmp_path / "out"), getattr(sharded, expected))
    assert json.loads((tmp_path / "out" / "export.json").read_text())["source"]["weights"] == expected


@pytest.mark.parametrize("band_bytes", [16, 24, 200])
def test_tensors_larger_than_a_band_are_read_in_slices(sharded, same_bits, tmp_path, monkeypatch, band_bytes):
    # From two float64 values up: cuts inside rows, across chunk borders and through strided buffers.
    monkeypatch.setattr(export, "BAND_BYTES", band_bytes)
    export.to_safetensors(sharded.iteration, tmp_path / "out", "model", "keep", 10**9, False, lambda _: None)
    assert same_bits(load_export(tmp_path / "out"), sharded.model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_casts_equal_those_of_torch(sharded, same_bits, tmp_path, dtype):
    export.to_safetensors(sharded.iteration, tmp_path / "out", "auto", dtype, 10**9, False, print)
    expected = {
        name: value.to(getattr(torch, dtype)) if value.is_floating_point() else value
        for name, value in sharded.ema.items()
    }
    assert same_bits(load_export(tmp_path / "out"), expected)


def test_permuted_tensor_is_read_once_and_not_once_a_band(tmp_path, same_bits, monkeypatch):
    import torch.distributed.checkpoint as dcp

    values = torch.randn(300, 200).t()
    dcp.save({"x": values}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    read = 0
    preadv = os.preadv

    def counting(descriptor, buffers, offset):
        nonlocal read
        read += sum(len(buffer) for buffer in buffers)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(export, "BAND_BYTES", 4000)
    monkeypatch.setattr(os, "preadv", counting)
    export.to_safetensors(tmp_path / "dcp", tmp_path / "out", "auto", "keep", 10**9, False, print)
    assert values.nbytes < read < 1.2 * values.nbytes  # besides the values, the frame of the archive
    assert same_bits(load_export(tmp_path / "out"), {"x": values})


def test_several_files_follow_the_index_of_hugging_face(sharded, tool, same_bits, tmp_path):
    out, limit = tmp_path / "out", 1000
    assert tool("to-safetensors", sharded.iteration, out, "--max-shard-size", "1KB").returncode == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    count = len(files)
    assert count > 1
    assert files == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    sizes = {}
    for file in files:
        content = load_file(out / file)
        assert {name for name, place in index["weight_map"].items() if place == file} == content.keys()
        sizes[file] = sum(value.nbytes for value in content.values())
        assert sizes[file] <= limit or len(content) == 1
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert same_bits(load_export(out), sharded.ema)


def test_assets_and_provenance_travel_with_the_weights(sharded, tool, tmp_path):
    out = tmp_path / "out"
    assert tool("to-safetensors", sharded.run, out).returncode == 0
    assert (out / "config.json").read_text() == '{"model_type": "test"}'
    assert (out / "tokenizer" / "vocabulary.bin").read_bytes() == bytes(range(256))
    record = json.loads((out / "export.json").read_text())
    found = {
        path.relative_to(out).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in out.rglob("*")
        if path.is_file() and path.name != "export.json"
    }
    assert {name: entry["sha256"] for name, entry in record["files"].items()} == found
    commit_sum = hashlib.sha256((sharded.iteration / "commit.json").read_bytes()).hexdigest()
    assert record["source"] == {
        "run": "run",
        "checkpoint": "iter_000000100",
        "step": 100,
        "weights": "ema",
        "verified": "sha256",
        "commit_sha256": commit_sum,
    }
    assert record["parameters"] == sum(value.numel() for value in sharded.ema.values())
    assert re.fullmatch(r"dcp-convert \d+\.\d+\.\d+", record["tool"])


def test_same_checkpoint_gives_the_same_export(sharded, tool, tmp_path):
    for name in ("a", "b"):
        assert tool("to-safetensors", sharded.run, tmp_path / name).returncode == 0
    for path in (tmp_path / "a").rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes()


def test_model_is_found_inside_the_state_dict_that_was_saved(tmp_path, tool, same_bits):
    import torch.distributed.checkpoint as dcp

    weights = {
        "model.norm.weight": torch.randn(3),
        "_orig_mod.block._checkpoint_wrapped_module.w": torch.randn(2, 2),
    }
    state = {"app": {"model": weights, "optim": {"state": {"w": torch.ones(2)}, "lr": 0.1}}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    result = tool("to-safetensors", tmp_path / "dcp", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert "2 entries are no weights" in result.stderr
    # "model." is part of the first name, as in many language models: only the dict around it goes.
    first, second = weights.values()
    assert same_bits(load_export(tmp_path / "out"), {"model.norm.weight": first, "block.w": second})


@pytest.mark.parametrize("dtype", ["uint16", "float8_e4m3fn", "complex64", "int8", "float64"])
def test_rarer_types_come_back_bit_for_bit(tmp_path, tool, same_bits, dtype):
    import torch.distributed.checkpoint as dcp

    values = torch.arange(24).reshape(2, 3, 4).to(getattr(torch, dtype))
    dcp.save(
        {"x": values, "odd": torch.ones(3, dtype=torch.uint8)}, checkpoint_id=tmp_path / "dcp", no_dist=True
    )
    assert tool("to-safetensors", tmp_path / "dcp", tmp_path / "out").returncode == 0
    expected = {"x": values, "odd": torch.ones(3, dtype=torch.uint8)}
    assert same_bits(load_export(tmp_path / "out"), expected)
    save_file(expected, tmp_path / "library.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        tmp_path / "library.safetensors"
    ).read_bytes()
