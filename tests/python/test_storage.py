"""A packed tensor is plain bytes: it survives every way of storing it, at any alignment."""

import io
import sys

import numpy as np
import pytest
import torch
from common import assert_same_bits, make_layer, make_matrix, matmul, route

import w4a8


@pytest.fixture
def sample():
    matrix = make_matrix(33, 96, 32, torch.bfloat16, bias=True)
    packed, x = matrix.pack(), torch.randn(5, 96)
    return matrix, packed, x, matmul(x, matrix, packed)


def test_it_is_contiguous_uint8(sample):
    _, packed, _, _ = sample
    assert packed.dtype == torch.uint8
    assert packed.dim() == 1
    assert packed.is_contiguous()


def test_torch_save(sample):
    matrix, packed, x, want = sample
    buffer = io.BytesIO()
    torch.save({"weight": packed}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer)["weight"]
    assert_same_bits(loaded, packed)
    assert_same_bits(matmul(x, matrix, loaded), want)


def test_safetensors(sample, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    matrix, packed, x, want = sample
    # Tensors of odd sizes before it: safetensors aligns to 8 bytes at most.
    safetensors.save_file({"a": torch.zeros(3, dtype=torch.uint8), "w": packed}, tmp_path / "f.safetensors")
    loaded = safetensors.load_file(tmp_path / "f.safetensors")["w"]
    assert_same_bits(loaded, packed)
    assert_same_bits(matmul(x, matrix, loaded), want)


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 7, 31, 63])
def test_numpy_memmap(kernel, sample, tmp_path, offset):
    matrix, packed, x, want = sample
    path = tmp_path / "weights.bin"
    path.write_bytes(b"x" * offset + packed.numpy().tobytes() + b"behind")
    mapped = np.memmap(path, np.uint8, "c", offset=offset, shape=(packed.numel(),))
    loaded = torch.from_numpy(mapped)
    assert loaded.data_ptr() % 64 == offset
    assert_same_bits(matmul(x, matrix, loaded), want)
    assert w4a8.read_header(mapped) == w4a8.read_header(packed)


@pytest.mark.parametrize("offset", [1, 5, 33])
def test_torch_from_file(kernel, sample, tmp_path, offset):
    matrix, packed, x, want = sample
    path = tmp_path / "weights.bin"
    path.write_bytes(b"x" * offset + packed.numpy().tobytes())
    whole = torch.from_file(str(path), shared=False, size=offset + packed.numel(), dtype=torch.uint8)
    assert_same_bits(matmul(x, matrix, whole[offset:]), want)


@pytest.mark.parametrize("offset", [1, 17])
def test_moe_at_odd_addresses(kernel, offset):
    layer = make_layer(4, 64, 32, bias=True)
    x, (ids, router) = torch.randn(9, 64), route(9, 2, 4)
    want = layer(x, ids, router)

    def moved(t):
        storage = torch.empty(t.numel() + offset, dtype=torch.uint8)
        view = storage[offset:].view(t.shape)
        view.copy_(t)
        return view

    layer.w13_packed, layer.w2_packed = moved(layer.w13_packed), moved(layer.w2_packed)
    assert layer.w13_packed.data_ptr() % 2 == 1
    assert_same_bits(layer(x, ids, router), want)


def test_unpack_at_odd_addresses(sample):
    matrix, packed, _, _ = sample
    moved = torch.cat([packed.new_zeros(1), packed])[1:]
    weights, scales, bias = w4a8.dyn_quant_unpack_4bit_weight(moved, 32, 96, 33)
    assert_same_bits(weights, matrix.weights)
    assert_same_bits(scales, matrix.scales)
    assert_same_bits(bias, matrix.bias)


def test_packing_is_deterministic(sample, set_threads):
    """No byte of padding is left to chance."""
    matrix, packed, _, _ = sample
    for threads in (1, 2, 3):
        set_threads(threads)
        torch.full((3 * packed.numel(),), 0xAB, dtype=torch.uint8)  # dirties what the allocator hands out next
        assert_same_bits(matrix.pack(), packed)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, np.array, np.frombuffer])
def test_header_of_any_buffer(sample, kind):
    _, packed, _, _ = sample
    data = packed.numpy().tobytes()
    if kind is np.array:
        view = np.frombuffer(data, np.uint8).copy()
    elif kind is np.frombuffer:
        view = np.frombuffer(data, np.uint8)
    else:
        view = kind(data)
    assert w4a8.read_header(view) == w4a8.read_header(packed)


def test_header_of_a_stack_row():
    packed = make_matrix(24, 64, 32, experts=3).pack()
    assert w4a8.read_header(packed[2]) == w4a8.read_header(packed[0])
    assert w4a8.read_header(packed[2])["bytes"] == packed.shape[1]


@pytest.mark.skipif(sys.byteorder != "little", reason="the format is little endian")
def test_documented_layout(sample):
    """docs/packed_layout.md, written out: nibbles, scales and bias are where it says."""
    matrix, packed, _, _ = sample
    data = packed.numpy()
    # Two groups of bfloat16 scales fill a line: records of two groups, 64 + 8 * 64 bytes, and of one.
    records = [0, 0, 64 + 8 * 64]  # of each group
    sums_at = 64 + 8 * 64 + 64 + 4 * 64
    bias_at = sums_at + 16 * 4
    panel_bytes = bias_at + 16 * 4
    assert len(data) == 64 + 3 * panel_bytes
    weights = matrix.weights.numpy()
    values = np.stack([weights & 15, weights >> 4], -1).reshape(33, 96)
    for column in range(48):
        panel = data[64 + column // 16 * panel_bytes :][:panel_bytes]
        c = column % 16
        for k in range(96):
            line = 1 + k // 8 + k // 64  # behind a line of scales for each 64 values of k
            byte = panel[line * 64 + 4 * c + k % 4]
            nibble = byte >> 4 if k % 8 >= 4 else byte & 15
            assert nibble == (values[column, k] if column < 33 else 8)
        if column < 33:
            for group, record in enumerate(records):
                at = record + group % 2 * 32 + 2 * c
                assert panel[at : at + 2].view(np.int16) == matrix.scales[column, group].view(torch.int16).numpy()
            assert panel[bias_at : bias_at + 64].view(np.float32)[c] == matrix.bias[column].item()
