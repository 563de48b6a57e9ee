"""The parts that streaming rests on, at random."""

import math
import random

import numpy as np
import pytest

from dcp_convert.chunks import bands
from dcp_convert.dtypes import BY_NAME
from dcp_convert.names import natural, plain_name
from dcp_convert.safetensors_file import OutputTensor, plan_shards


@pytest.mark.parametrize("seed", range(200))
def test_bands_are_the_row_major_order_cut_in_pieces(seed):
    dice = random.Random(seed)
    shape = tuple(dice.randrange(0, 6) for _ in range(dice.randrange(0, 5)))
    limit = dice.randrange(1, 40)
    order = np.arange(math.prod(shape)).reshape(shape)
    pieces = []
    for offsets, sizes in bands(shape, limit):
        assert 0 < math.prod(sizes) <= limit
        box = tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))
        pieces.append(order[box].reshape(-1))
    joined = np.concatenate(pieces) if pieces else np.empty(0)
    assert np.array_equal(joined, order.reshape(-1))


@pytest.mark.parametrize("seed", range(50))
def test_shards_keep_to_the_limit_and_hold_every_tensor_once(seed):
    dice = random.Random(seed)
    limit = dice.randrange(1, 500)
    tensors = []
    for i in range(dice.randrange(1, 40)):
        kind = BY_NAME[dice.choice(["float32", "bfloat16", "int64", "bool"])]
        count = dice.randrange(0, 60)
        tensors.append(OutputTensor(f"t.{i}", (count,), kind, count * kind.size))
    shards = plan_shards(tensors, limit)
    assert sorted(t.name for s in shards for t in s.tensors) == sorted(t.name for t in tensors)
    for shard in shards:
        values = sum(t.bytes for t in shard.tensors)
        assert values <= limit or len([t for t in shard.tensors if t.bytes]) == 1
        assert len(shard.header) % 8 == 0
        assert shard.bytes == len(shard.header) + values
        at = 0
        for tensor in shard.tensors:
            assert at % tensor.kind.size == 0, "values are not aligned"
            at += tensor.bytes


def test_blocks_are_ordered_as_numbers():
    names = ["blocks.10.w", "blocks.2.w", "a.b", "blocks.2.b"]
    assert sorted(names, key=natural) == ["a.b", "blocks.2.b", "blocks.2.w", "blocks.10.w"]


def test_marks_of_wrappers_go():
    assert plain_name("module.blocks.0._fsdp_wrapped_module._checkpoint_wrapped_module.w") == "blocks.0.w"
    assert plain_name("_orig_mod.module.w") == "w"
    assert plain_name("submodule.w") == "submodule.w"
