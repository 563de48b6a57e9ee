from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from flywheel_shared.errors import UserError
from flywheel_shared.video import LinearVideoTokenizer


def moving_scene(seed: int, frames: int = 17, size: int = 64) -> Tensor:
    """A table, a shaded wall and two coloured discs that move: uint8 `[3, T, H, W]`."""
    generator = torch.Generator().manual_seed(seed)
    ys, xs = torch.meshgrid(torch.linspace(0, 1, size), torch.linspace(0, 1, size), indexing="ij")
    wall = torch.stack([0.3 + 0.4 * xs, 0.5 - 0.2 * ys, 0.4 + 0.1 * torch.sin(12 * ys)])
    clip = wall[:, None].repeat(1, frames, 1, 1)
    for _ in range(2):
        start, velocity, colour = (torch.rand(n, generator=generator) for n in (2, 2, 3))
        for time in range(frames):
            y, x = start + (velocity - 0.5) * time / frames
            soft_edge = torch.sigmoid((0.15 - ((ys - y) ** 2 + (xs - x) ** 2).sqrt()) * size / 2)
            clip[:, time] = clip[:, time] * (1 - soft_edge) + colour[:, None, None] * soft_edge
    return (clip.clamp(0, 1) * 255).round().to(torch.uint8)


@pytest.fixture(scope="module")
def tokenizer() -> LinearVideoTokenizer:
    return LinearVideoTokenizer.fit([moving_scene(seed) for seed in range(12)], channels=16)


def psnr_db(one: Tensor, other: Tensor) -> float:
    return float(10 * torch.log10(4 / ((one - other) ** 2).mean()))  # the range -1 to 1 is 2 wide


def to_float(frames: Tensor) -> Tensor:
    return frames.float() / 127.5 - 1


@pytest.mark.parametrize(("frames", "latents"), [(1, 1), (5, 2), (17, 5)])
def test_frames_are_grouped_as_the_wan_vae_does(tokenizer, frames, latents):
    clip = moving_scene(0, frames)[None]
    encoded = tokenizer.encode(clip)
    assert encoded.shape == (1, 16, latents, 8, 8)
    assert encoded.dtype == torch.float32
    assert tokenizer.decode(encoded).shape == clip.shape


def test_structured_videos_that_were_not_fitted_come_back_well(tokenizer):
    clips = torch.stack([moving_scene(seed) for seed in range(100, 104)])
    decoded = tokenizer.decode(tokenizer.encode(clips))
    quality = psnr_db(decoded, to_float(clips))
    print(f"PSNR of unseen clips: {quality:.1f} dB")
    # Seen: 42.3 dB, with 16 numbers for 768. The clips differ from the fitted ones in all but the wall.
    assert quality > 40
    assert decoded.abs().max() <= 1


def test_more_channels_rebuild_better_and_all_of_them_rebuild_the_first_frame():
    clips = [moving_scene(seed, 9, 32) for seed in range(6)]
    batch = torch.stack(clips)
    quality = []
    for channels in (4, 16, 48):
        tokenizer = LinearVideoTokenizer.fit(clips, patch=4, channels=channels)
        quality.append(psnr_db(tokenizer.decode(tokenizer.encode(batch)), to_float(batch)))
    assert quality == sorted(quality)
    first = batch[:, :, :1]
    # 48 channels are all of a 4 x 4 patch: what is left is float32 rounding, around 1e-6.
    torch.testing.assert_close(tokenizer.decode(tokenizer.encode(first)), to_float(first), atol=1e-4, rtol=0)


def test_latents_have_zero_mean_and_unit_variance_per_channel(tokenizer):
    encoded = tokenizer.encode(torch.stack([moving_scene(seed) for seed in range(12)]))
    for part in (encoded[:, :, :1], encoded[:, :, 1:]):
        values = part.transpose(0, 1).flatten(1)
        # The statistics are those of sampled patches (512 of 1,088 places a clip): a few percent off.
        assert values.mean(1).abs().max() < 0.15
        assert (values.std(1) - 1).abs().max() < 0.2


def test_encoding_is_causal_and_local(tokenizer):
    clip = moving_scene(3)[None].float() / 127.5 - 1
    changed = clip.clone()
    changed[:, :, 9:13, 16:24, 40:48] = torch.rand(1, 3, 4, 8, 8)
    difference = (tokenizer.encode(changed) - tokenizer.encode(clip)).abs().amax((0, 1))
    assert difference[3, 2, 5] > 0
    difference[3, 2, 5] = 0
    assert difference.max() == 0


def test_decode_gives_the_least_squares_solution(tokenizer):
    clip = to_float(moving_scene(5)[None])
    encoded = tokenizer.encode(clip)
    # Latents of the reconstruction are the latents: a projection. Nothing is clamped at this contrast.
    torch.testing.assert_close(tokenizer.encode(tokenizer.decode(encoded)), encoded, atol=2e-2, rtol=0)


def test_uint8_and_float_frames_give_the_same_latents(tokenizer):
    clip = moving_scene(4)[None]
    assert torch.equal(tokenizer.encode(clip), tokenizer.encode(to_float(clip)))


def test_temporal_1_codes_every_frame_by_itself():
    tokenizer = LinearVideoTokenizer.fit([moving_scene(seed, 5) for seed in range(4)], temporal=1)
    clip = moving_scene(9, 6)[None]
    encoded = tokenizer.encode(clip)
    assert encoded.shape == (1, 16, 6, 8, 8)
    for time in range(6):
        torch.testing.assert_close(
            tokenizer.encode(clip[:, :, time : time + 1])[:, :, 0], encoded[:, :, time]
        )


def test_same_clips_and_seed_give_the_same_digest_and_others_do_not(tokenizer):
    def fit(seed: int) -> LinearVideoTokenizer:
        return LinearVideoTokenizer.fit([moving_scene(number) for number in range(12)], seed=seed)

    assert fit(0).digest() == tokenizer.digest()
    assert fit(1).digest() != tokenizer.digest()


def test_what_is_saved_is_loaded_bit_for_bit(tokenizer, tmp_path: Path):
    path = tmp_path / "metadata" / "video_tokenizer.safetensors"
    tokenizer.save(path)
    loaded = LinearVideoTokenizer.load(path)
    assert loaded.digest() == tokenizer.digest()
    clip = moving_scene(7)[None]
    assert torch.equal(loaded.encode(clip), tokenizer.encode(clip))
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_wrong_or_damaged_files_are_user_errors(tokenizer, tmp_path: Path):
    path = tmp_path / "video_tokenizer.safetensors"
    with pytest.raises(UserError, match="no such file"):
        LinearVideoTokenizer.load(path)
    path.write_bytes(b"not safetensors")
    with pytest.raises(UserError, match="cannot be read as a video tokenizer"):
        LinearVideoTokenizer.load(path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(UserError, match="not a linear_video_tokenizer"):
        LinearVideoTokenizer.load(path)
    tokenizer.save(path)
    damaged = bytearray(path.read_bytes())
    damaged[-100] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(UserError, match="do not match the digest"):
        LinearVideoTokenizer.load(path)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((1, 3, 6, 64, 64), "1 . 4"),
        ((1, 3, 5, 60, 64), "multiples of the patch 8"),
        ((3, 5, 64, 64), "expected"),
    ],
)
def test_frames_that_do_not_fit_are_user_errors(tokenizer, shape, words):
    with pytest.raises(UserError, match=words):
        tokenizer.encode(torch.zeros(shape))


def test_too_little_to_fit_on_is_a_user_error():
    with pytest.raises(UserError, match="0 patches"):
        LinearVideoTokenizer.fit([])
    with pytest.raises(UserError, match="0 patches"):  # no clip is long enough for a group
        LinearVideoTokenizer.fit([moving_scene(0, 3)])
    with pytest.raises(UserError, match="expected"):
        LinearVideoTokenizer.fit([torch.zeros(5, 3, 64, 64)])
    with pytest.raises(UserError, match="at most"):
        LinearVideoTokenizer(patch=2, channels=16)


def test_a_corpus_without_any_contrast_gives_finite_latents():
    flat = torch.full((3, 9, 16, 16), 100, dtype=torch.uint8)
    tokenizer = LinearVideoTokenizer.fit([flat], channels=4)
    assert tokenizer.encode(flat[None]).isfinite().all()
    torch.testing.assert_close(tokenizer.decode(tokenizer.encode(flat[None])), to_float(flat[None]))


def test_the_wan_vae_stands_in_the_same_place(tmp_path):
    """A tiny VAE of the published class: shapes of Wan 2.2, latents shifted and scaled by its own numbers."""
    from diffusers import AutoencoderKLWan

    from flywheel_shared.wan_video import WanVideoTokenizer

    torch.manual_seed(0)
    vae = AutoencoderKLWan(
        base_dim=8, decoder_base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, attn_scales=[],
        temperal_downsample=[False, True, True], is_residual=True, in_channels=12, out_channels=12,
        patch_size=2, scale_factor_spatial=16, scale_factor_temporal=4,
        latents_mean=[0.1, 0.2, 0.3, 0.4], latents_std=[1.0, 2.0, 3.0, 4.0],
    )  # fmt: skip
    vae.save_pretrained(tmp_path / "vae")
    tokenizer = WanVideoTokenizer.load(tmp_path, torch.float32)
    assert (tokenizer.patch, tokenizer.temporal, tokenizer.channels) == (16, 4, 4)
    frames = torch.randint(0, 256, (2, 3, 9, 32, 64), dtype=torch.uint8)
    latents = tokenizer.encode(frames)
    assert latents.shape == (2, 4, 3, 2, 4)
    plain = vae.eval().encode(frames.float() / 127.5 - 1).latent_dist.mode()
    expected = (plain[:, 3] - 0.4) / 4
    torch.testing.assert_close(latents[:, 3], expected, rtol=1e-5, atol=1e-5)
    decoded = tokenizer.decode(latents)
    torch.testing.assert_close(decoded, vae.decode(plain)[0].clamp(-1, 1), rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match="8 frames"):
        tokenizer.encode(frames[:, :, :8])
    with pytest.raises(UserError, match="no video VAE"):
        WanVideoTokenizer.load(tmp_path / "nowhere")
