"""Decoded episodes of a LeRobot v3 corpus, kept in a bounded memory.

Frames are found by counting: frame `f` of an episode is frame `first + f` of its video file, where `first` is
the number of frames of the episodes before it in that file. The timestamps of the rows are not looked at, so
that jitter in them can neither fail nor shift a frame.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset
import torch
from torch import Tensor

from flywheel_shared.errors import UserError, one_line
from flywheel_shared.lerobot_corpus import Corpus

FrameTransform = Callable[[Tensor], Tensor]

_FRAMES_A_PIECE = 128  # bounds the memory of full-size frames while an episode is decoded
_OPEN_VIDEOS = 8


@dataclass(frozen=True)
class _Place:
    """Where an episode lies in a video file."""

    path: Path
    first_by_count: int
    first_by_time: int
    frames_in_file: int  # of the episodes that the metadata puts there


class EpisodeFrames:
    """All frames of an episode by camera, decoded at first use, the least recently used ones dropped.

    Safe for several threads. In a forked process decoders are opened anew, as inherited ones do not work; it
    must also call `torch.set_num_threads(1)`, as DataLoader's workers do: torch's threads do not survive.
    """

    def __init__(
        self, corpus: Corpus, cameras: Sequence[str], cache_gib: float, transform: FrameTransform | None
    ):
        """`transform` maps frames uint8 `[n, C, H, W]` to `[n, ...]`, each frame by itself."""
        self._corpus = corpus
        self._cache_bytes = int(cache_gib * 2**30)
        self._transform = transform
        self._lock = threading.RLock()
        self._episodes: OrderedDict[int, dict[str, Tensor]] = OrderedDict()
        self._bytes = 0
        self._decoders = _Decoders()
        for camera in cameras:
            if camera not in corpus.cameras:
                raise UserError(
                    f"{corpus.root}: no colour camera {camera!r}; there are {list(corpus.cameras)}"
                )
        self._videos = {
            camera: _places(corpus, camera) for camera in cameras if corpus.cameras[camera] == "video"
        }
        self._cameras = list(cameras)

    def get(self, episode: int) -> dict[str, Tensor]:
        """Give `{camera: [L, C, H, W]}`, contiguous; not to be written to."""
        with self._lock:
            if episode in self._episodes:
                self._episodes.move_to_end(episode)
                return self._episodes[episode]
            frames = {camera: self._decode(episode, camera) for camera in self._cameras}
            self._episodes[episode] = frames
            self._bytes += _nbytes(frames)
            while self._bytes > self._cache_bytes and len(self._episodes) > 1:
                self._bytes -= _nbytes(self._episodes.popitem(last=False)[1])
            return frames

    def capacity(self) -> int:
        """Number of episodes of mean length that the cache holds, at least 1; decodes one for its size."""
        rows = self._corpus.lengths
        bytes_a_frame = _nbytes(self.get(0)) / rows[0]
        return max(1, int(self._cache_bytes / max(bytes_a_frame * rows.mean(), 1)))

    def _decode(self, episode: int, camera: str) -> Tensor:
        if camera in self._videos:
            pieces = self._decode_video(self._videos[camera][episode], int(self._corpus.lengths[episode]))
        else:
            pieces = self._decode_images(episode, camera)
        return torch.cat([piece if self._transform is None else self._transform(piece) for piece in pieces])

    def _decode_video(self, place: _Place, length: int) -> list[Tensor]:
        decoder = self._decoders.open(place.path)
        count = len(decoder)
        # A file may hold episodes that the metadata no longer lists: then only its own clock tells the place.
        first = place.first_by_count if count == place.frames_in_file else place.first_by_time
        if first + length > count:
            raise UserError(
                f"{place.path}: {count} frames, but an episode needs {first} to {first + length - 1}"
            )
        try:
            return [
                decoder.get_frames_in_range(
                    begin, min(begin + _FRAMES_A_PIECE, first + length)
                ).data.contiguous()
                for begin in range(first, first + length, _FRAMES_A_PIECE)
            ]
        except RuntimeError as error:
            raise UserError(f"{place.path}: cannot be decoded: {one_line(str(error))[:200]}") from None

    def _decode_images(self, episode: int, camera: str) -> list[Tensor]:
        """Frames that are stored as PNG or JPEG inside the rows."""
        from torchvision.io import ImageReadMode, decode_image

        rows = pyarrow.dataset.dataset(self._corpus.data_files, format="parquet").to_table(
            columns=[camera, "frame_index"], filter=pyarrow.dataset.field("episode_index") == episode
        )
        encoded = rows.sort_by("frame_index")[camera].combine_chunks().field("bytes").to_pylist()
        try:
            images = [
                decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)
                for data in encoded
            ]
        except (RuntimeError, TypeError, ValueError) as error:
            where = f"{self._corpus.root}: {camera}: episode {episode}"
            raise UserError(f"{where}: an image cannot be decoded: {one_line(str(error))[:200]}") from None
        return [
            torch.stack(images[begin : begin + _FRAMES_A_PIECE])
            for begin in range(0, len(images), _FRAMES_A_PIECE)
        ]


class _Decoders:
    """A few open video files of this process."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._open: OrderedDict[Path, Any] = OrderedDict()
        self._inherited: list[Any] = []

    def open(self, path: Path) -> Any:
        from torchcodec.decoders import VideoDecoder

        if self._process != os.getpid():
            # Neither usable in a forked process nor safe to destroy there: their threads are not.
            self._inherited.append(self._open)
            self._process, self._open = os.getpid(), OrderedDict()
        if path not in self._open:
            try:
                # "exact" reads the packet index once, so that frame n is frame n.
                self._open[path] = VideoDecoder(path, seek_mode="exact")
            except (RuntimeError, ValueError, OSError) as error:
                raise UserError(f"{path}: cannot be opened: {one_line(str(error))[:200]}") from None
        self._open.move_to_end(path)
        while len(self._open) > _OPEN_VIDEOS:
            self._open.popitem(last=False)
        return self._open[path]


def _places(corpus: Corpus, camera: str) -> list[_Place]:
    """Where each episode lies in the files of a camera; raises `UserError` for files that are not there."""
    start_s = corpus.video_start_s[camera]
    members: dict[Path, list[int]] = {}
    for episode in np.argsort(start_s, kind="stable").tolist():
        members.setdefault(corpus.video_files[camera][episode], []).append(episode)
    places: dict[int, _Place] = {}
    for path, episodes in members.items():
        if not path.is_file():
            raise UserError(f"{path}: no such video; camera {camera!r} of episode {episodes[0]} needs it")
        lengths = corpus.lengths[episodes]
        for episode, before in zip(episodes, np.cumsum(lengths) - lengths, strict=True):
            by_time = round(float(start_s[episode]) * corpus.fps)
            places[episode] = _Place(path, int(before), by_time, int(lengths.sum()))
    return [places[episode] for episode in range(corpus.episodes)]


def _nbytes(frames: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in frames.values())
