import random
import struct

import msgpack
import numpy as np
import pytest

from flywheel_shared.errors import UserError
from flywheel_shared.policy_protocol import pack, unpack

# Bytes that openpi-client 0.1.2 packed.
OPENPI_BYTES = bytes.fromhex(
    "85a5696d61676584c40b5f5f6e6461727261795f5fc3c40464617461c406000102030405c4056474797065a37c7531c4057368617065"
    "93010203a5737461746584c40b5f5f6e6461727261795f5fc3c40464617461c4080000c03f000000c0c4056474797065a33c6634c405"
    "73686170659102a47374657083c40d5f5f6e7067656e657269635f5fc3c40464617461"
    "03c4056474797065a33c6938a670726f6d7074a2676fa16e9401cb4004000000000000c0c3"
)


def message() -> dict:
    return {
        "image": np.arange(6, dtype=np.uint8).reshape(1, 2, 3),
        "state": np.array([1.5, -2], np.float32),
        "step": np.int64(3),
        "prompt": "go",
        "n": [1, 2.5, None, True],
    }


def test_bytes_are_those_of_the_openpi_client():
    assert pack(message()) == OPENPI_BYTES


def test_messages_of_the_openpi_client_are_read():
    read = unpack(OPENPI_BYTES)
    wanted = message()
    for key in ("image", "state"):
        np.testing.assert_array_equal(read[key], wanted[key])
        assert read[key].dtype == wanted[key].dtype
        assert read[key].flags.writeable
    assert read["step"] == 3
    assert isinstance(read["step"], np.int64)
    assert (read["prompt"], read["n"]) == ("go", [1, 2.5, None, True])


@pytest.mark.parametrize("dtype", ["?", "i1", "u2", "<i8", ">i4", "f2", ">f8", "S3", "<U2"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (2, 3)])
def test_every_plain_dtype_and_shape_survives(dtype, shape):
    array = np.ones(shape, dtype)
    read = unpack(pack(array))
    np.testing.assert_array_equal(read, array)
    assert read.shape == shape
    assert read.dtype.isnative


def test_strided_arrays_are_packed_by_value():
    array = np.arange(24).reshape(4, 6)[::2, ::-1].T
    np.testing.assert_array_equal(unpack(pack(array)), array)


@pytest.mark.parametrize(
    "value",
    [
        np.array([object()]),
        np.array([1j]),
        np.zeros(2, "f4,i4"),
        object(),
        {1, 2},
        2**70,
        np.datetime64("2020"),
    ],
)
def test_what_is_no_plain_value_is_refused_by_pack(value):
    with pytest.raises(UserError, match="cannot be packed"):
        pack({"x": value})


def array_map(**changes) -> bytes:
    fields = {"__ndarray__": True, "data": bytes(12), "dtype": "<f4", "shape": [3], **changes}
    return msgpack.packb({key.encode(): value for key, value in fields.items() if value is not ...})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (array_map(dtype="|O"), "unsupported dtype '|O'"),
        (array_map(dtype="O"), "unsupported dtype"),
        (array_map(dtype="<c8", shape=[1]), "unsupported dtype"),
        (array_map(dtype="f4,O"), "unsupported dtype"),
        (array_map(dtype="(2,)f4"), "unsupported dtype"),
        (array_map(dtype="<U0", data=b"", shape=[2**62]), "unsupported dtype"),
        (array_map(dtype=["<f4"]), "unsupported dtype"),
        (array_map(dtype="f3"), "malformed"),
        (array_map(dtype=...), "unsupported dtype None"),
        (array_map(shape=[4]), "needs 16 bytes, found 12"),
        (array_map(shape=[2**40, 2**40]), "found 12"),
        (array_map(shape=[-3]), "shape is"),
        (array_map(shape=[3.0]), "shape is"),
        (array_map(shape=3), "shape is"),
        (array_map(shape=...), "shape is None"),
        (array_map(shape=[1] * 40 + [3]), "41 dims"),
        (array_map(data="abc"), "str data"),
        (array_map(data=...), "NoneType data"),
        (msgpack.packb({b"__npgeneric__": True, b"data": 300, b"dtype": "u1"}), "malformed"),
        (msgpack.packb({b"__npgeneric__": True, b"data": [1], b"dtype": "u1"}), "holds a list"),
        (msgpack.packb({b"__npgeneric__": True, b"data": 1, b"dtype": "O"}), "unsupported dtype"),
        (b"", "malformed"),
        (b"\xc1", "malformed"),
        (msgpack.packb({"a": 1}) + b"x", "malformed"),
        (msgpack.packb({(1, 2): 3}), "malformed"),
        (b"\x91" * 100_000, "malformed"),
        (b"\xdd" + struct.pack(">I", 2**31), "malformed"),
        (b"\xdd" + struct.pack(">I", 50_000) + b"\x90" * 50_000, "more than 10000 lists"),
    ],
)
def test_malformed_messages_are_refused_in_one_line(data, words):
    with pytest.raises(UserError) as caught:
        unpack(data)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_truncated_and_corrupted_messages_never_raise_anything_else():
    rng = random.Random(0)
    for cut in range(len(OPENPI_BYTES)):
        with pytest.raises(UserError):
            unpack(OPENPI_BYTES[:cut])
    refused = 0
    for _ in range(5000):
        corrupted = bytearray(OPENPI_BYTES)
        for _ in range(rng.randint(1, 4)):
            corrupted[rng.randrange(len(corrupted))] = rng.randrange(256)
        try:
            unpack(bytes(corrupted))
        except UserError:
            refused += 1
    assert refused > 2000  # most changes hit the structure, few only a value
