"""Frames of windows, decoded by torchcodec and kept as uint8 up to a bound."""

import threading
from collections import OrderedDict

from torch import Tensor
from torchcodec.decoders import VideoDecoder

from flywheel_shared.cosmos.generation import fit
from flywheel_shared.errors import one_line
from vision_sft.clips import Faulty, Window


class WindowFrames:
    """Decoded windows; the least recently used ones go when `cache_gib` is full."""

    def __init__(self, cache_gib: float) -> None:
        self._room = int(cache_gib * 2**30)
        self._kept: OrderedDict[int, Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, number: int, window: Window) -> Tensor:
        """Uint8 `[T, C, H, W]` in the size of the window; raises `Faulty` where it cannot be decoded."""
        with self._lock:
            if number in self._kept:
                self._kept.move_to_end(number)
                return self._kept[number]
        frames = decode(window)
        with self._lock:
            self._kept[number] = frames
            used = sum(kept.nbytes for kept in self._kept.values())
            while used > self._room and self._kept:
                used -= self._kept.popitem(last=False)[1].nbytes
        return frames


def decode(window: Window) -> Tensor:
    """Uint8 `[T, C, H, W]`; raises `Faulty`."""
    try:
        decoder = VideoDecoder(str(window.video), num_ffmpeg_threads=1)
        held = len(decoder)
        if window.frames[-1] >= held:
            raise Faulty(f"{window.video}: frame {window.frames[-1]} asked for, the file has {held}")
        frames: Tensor = decoder.get_frames_at(list(window.frames)).data
    except Faulty:
        raise
    except Exception as error:  # the decoder's own errors have no common type
        raise Faulty(f"{window.video}: cannot be decoded: {one_line(str(error))[:160]}") from None
    return fit(frames, window.height, window.width)
