"""Windows over the episodes of any LeRobot v3 folder, and their shuffling over ranks.

A window belongs to an anchor row: frames, states and actions at fixed offsets from it. Every row is one.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from flywheel_shared.errors import UserError
from flywheel_shared.lerobot_corpus import Corpus, action_state_arrays, open_corpus
from flywheel_shared.lerobot_frames import EpisodeFrames, FrameTransform

__all__ = ["EpisodeWindows", "ShuffledBatches", "action_state_arrays"]


class EpisodeWindows:
    """Windows at every row of every episode.

    Where an offset leads out of the episode, its nearest row is repeated and the `*_valid` entry is False.
    Episodes are decoded whole, once, and kept as uint8 up to `cache_gib`.
    """

    def __init__(
        self,
        root: Path,
        *,
        cameras: Sequence[str],
        frame_offsets: Sequence[int],
        state_offsets: Sequence[int],
        action_offsets: Sequence[int],
        state_key: str = "observation.state",
        action_key: str = "action",
        cache_gib: float = 2.0,
        frame_transform: FrameTransform | None = None,
    ):
        """Open the folder and check what it says; nothing is decoded yet and nothing is ever fetched.

        Offsets are in rows. `frame_transform` maps uint8 `[n, C, H, W]` to `[n, ...]`, each frame by itself;
        it is applied once, before frames are kept. Raises `UserError` for a folder that is no LeRobot v3
        dataset, a missing camera, key or video.
        """
        self.corpus: Corpus = open_corpus(root, list(dict.fromkeys([state_key, action_key])))
        self.cameras = list(cameras)
        self.fps = self.corpus.fps
        self.episode_lengths = self.corpus.lengths
        self._starts = self.corpus.starts
        self._episode_of_row = np.repeat(np.arange(self.corpus.episodes), self.episode_lengths)
        self._frame_offsets, self._state_offsets, self._action_offsets = (
            np.asarray(offsets, dtype=np.int64) for offsets in (frame_offsets, state_offsets, action_offsets)
        )
        self._states = self.corpus.columns[state_key]
        self._actions = self.corpus.columns[action_key]
        self._frames = EpisodeFrames(self.corpus, self.cameras, cache_gib, frame_transform)

    def __len__(self) -> int:
        """Number of windows: one a row."""
        return int(self._starts[-1])

    def episode_frames(self, episode: int) -> dict[str, Tensor]:
        """All frames of an episode, `{camera: [L, C, H, W]}`, transformed; not to be written to."""
        return self._frames.get(episode)

    def episodes_in_cache(self) -> int:
        """How many episodes of mean length the cache holds."""
        return self._frames.capacity()

    def window(self, index: int) -> dict[str, Any]:
        """One window, as a row of `batch` (without its first dim)."""
        batch = self.batch([index])
        frames = {camera: tensor[0] for camera, tensor in batch.pop("frames").items()}
        return {"frames": frames, **{name: values[0] for name, values in batch.items()}}

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, Any]:
        """Windows at rows `indices`.

        Gives `frames` ({camera: uint8 [B, T, C, H, W]}), `frame_valid` (bool [B, T]), `state` (float32
        [B, S, Ds]), `state_valid` (bool [B, S]), `actions` (float32 [B, A, Da]), `action_valid` (bool
        [B, A]), `task` (B strings), `episode_index` and `frame_index` (int64 [B]).
        """
        anchors = np.asarray(indices, dtype=np.int64)
        if anchors.size == 0 or anchors.min() < 0 or anchors.max() >= len(self):
            raise IndexError(f"windows {anchors} asked for, there are {len(self)}")
        episodes = self._episode_of_row[anchors]
        frame_rows, frame_valid = self._rows(anchors, episodes, self._frame_offsets)
        state_rows, state_valid = self._rows(anchors, episodes, self._state_offsets)
        action_rows, action_valid = self._rows(anchors, episodes, self._action_offsets)
        return {
            "frames": self._gather_frames(episodes, frame_rows - self._starts[episodes, None]),
            "frame_valid": torch.from_numpy(frame_valid),
            "state": torch.from_numpy(self._states[state_rows]),
            "state_valid": torch.from_numpy(state_valid),
            "actions": torch.from_numpy(self._actions[action_rows]),
            "action_valid": torch.from_numpy(action_valid),
            "task": [self.corpus.tasks[task] for task in self.corpus.task_of_row[anchors]],
            "episode_index": torch.from_numpy(episodes),
            "frame_index": torch.from_numpy(anchors - self._starts[episodes]),
        }

    def _rows(
        self, anchors: np.ndarray, episodes: np.ndarray, offsets: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows at the offsets, kept inside the episode, and which of them were inside: both `[B, n]`."""
        wanted = anchors[:, None] + offsets
        rows = np.clip(wanted, self._starts[episodes, None], self._starts[episodes + 1, None] - 1)
        return rows, rows == wanted

    def _gather_frames(self, episodes: np.ndarray, frames: np.ndarray) -> dict[str, Tensor]:
        gathered: dict[str, Tensor] = {}
        # Copied by numpy: torch wakes its threads for a few kilobytes, ten times slower on busy cores.
        into: dict[str, np.ndarray] = {}
        for place, episode in enumerate(episodes.tolist()):
            for camera, all_frames in self._frames.get(episode).items():
                if place == 0:
                    gathered[camera] = all_frames.new_empty(*frames.shape, *all_frames.shape[1:])
                    into[camera] = gathered[camera].numpy()
                np.take(all_frames.numpy(), frames[place], 0, into[camera][place], mode="clip")
        return gathered


class ShuffledBatches:
    """Batches of windows in an order that depends on seed, epoch, rank and world size alone.

    Every epoch the episodes are permuted and dealt to the ranks in runs of equally many windows: all ranks
    together see every window once, and a rank decodes its share only. Within a rank a window's place is that
    of its episode plus a random shift of up to `buffer_episodes` episodes (around the end), so that at any
    time windows of about that many episodes are mixed, and one episode is decoded for each that is used up.
    When the buffer holds all of the rank's episodes, the order is a uniform permutation.

    With `drop_last` (the default, for training) all ranks make the same number of batches, and less than a
    batch a rank is left out of an epoch, another one each time. Without, every window comes once and the last
    batch is short, which some ranks may not have.
    """

    def __init__(
        self,
        windows: EpisodeWindows,
        batch_size: int,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        episodes: Sequence[int] | None = None,
        drop_last: bool = True,
        buffer_episodes: int | None = None,
        epochs: int | None = None,
        prefetch: int = 0,
    ):
        """`batch_size` is a rank's. `buffer_episodes` defaults to four fifths of what the cache holds.

        `epochs` None never ends. `prefetch` batches are made ahead by a thread, which does not change their
        order. Raises `UserError` for unknown episodes and for a corpus too small for one batch.
        """
        self.epoch = 0
        self.position = 0  # batches handed out in this epoch
        self._windows = windows
        self._batch_size = batch_size
        self._seed = seed
        self._rank, self._world_size = rank, world_size
        self._episodes = _checked_episodes(windows, episodes)
        self._count = int(windows.episode_lengths[self._episodes].sum())
        self._drop_last = drop_last
        self._epochs = epochs
        self._prefetch = prefetch
        if self.batches_per_epoch == 0:
            raise UserError(
                f"{windows.corpus.root}: {self._count} windows are too few for a batch of {batch_size} "
                f"on each of {world_size} ranks"
            )
        # The rest of the cache is room for the episode that comes in and the one that goes out.
        self._buffer = buffer_episodes or max(1, windows.episodes_in_cache() * 4 // 5)
        self._order_epoch = -1
        self._order = np.empty(0, dtype=np.int64)
        self._ahead: deque[Future[dict[str, Any]]] = deque()
        self._thread: ThreadPoolExecutor | None = None

    @property
    def batches_per_epoch(self) -> int:
        """Batches that this rank makes in an epoch."""
        if self._drop_last:
            return self._count // self._world_size // self._batch_size
        begin, end = self._share()
        return -(-(end - begin) // self._batch_size)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, Any]:
        """The next batch, as `EpisodeWindows.batch` gives it."""
        if self._epochs is not None and self.epoch >= self._epochs:
            raise StopIteration
        batch = self._take() if self._prefetch else self._make(self.epoch, self.position)
        self.epoch, self.position = self._after(self.epoch, self.position)
        return batch

    def state_dict(self) -> dict[str, int]:
        """Where it stands: the batch after the last one handed out comes next."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "global_batch": self._batch_size * self._world_size,
            "buffer_episodes": self._buffer,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there, batch for batch, when seed, batch size, ranks and episodes are the same.

        With another batch size or number of ranks it goes on at the same fraction of the epoch; the order is
        another one then, so windows of that one epoch may come twice or not at all.
        """
        wait(self._ahead)
        self._ahead.clear()
        self._buffer = state["buffer_episodes"]
        self._order_epoch = -1
        consumed = state["position"] * state["global_batch"]
        self.epoch = state["epoch"]
        self.position = min(consumed // (self._batch_size * self._world_size), self.batches_per_epoch - 1)

    def _after(self, epoch: int, position: int) -> tuple[int, int]:
        return (epoch, position + 1) if position + 1 < self.batches_per_epoch else (epoch + 1, 0)

    def _take(self) -> dict[str, Any]:
        """Take the next batch from those made ahead and order more."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="windows")
        epoch, position = self.epoch, self.position
        for ahead in range(self._prefetch + 1):
            if self._epochs is not None and epoch >= self._epochs:
                break
            if ahead >= len(self._ahead):
                self._ahead.append(self._thread.submit(self._make, epoch, position))
            epoch, position = self._after(epoch, position)
        return self._ahead.popleft().result()

    def _make(self, epoch: int, position: int) -> dict[str, Any]:
        return self._windows.batch(self._indices(epoch, position))

    def _indices(self, epoch: int, position: int) -> np.ndarray:
        if epoch != self._order_epoch:
            self._order, self._order_epoch = self._epoch_order(epoch), epoch
        return self._order[position * self._batch_size : (position + 1) * self._batch_size]

    def _share(self) -> tuple[int, int]:
        return (
            self._count * self._rank // self._world_size,
            self._count * (self._rank + 1) // self._world_size,
        )

    def _epoch_order(self, epoch: int) -> np.ndarray:
        """Rows of this rank in the order of the epoch, int64 `[n]`."""
        episodes = np.random.default_rng([self._seed, epoch]).permutation(self._episodes)
        lengths = self._windows.episode_lengths[episodes]
        begin, end = self._share()
        # Rows of all episodes one after the other, of which this rank takes its run.
        place = np.repeat(np.arange(len(episodes)), lengths)[begin:end]
        before = np.cumsum(lengths) - lengths
        rows = self._windows.corpus.starts[episodes[place]] + np.arange(begin, end) - before[place]
        place = place - place[0]
        held = int(place[-1]) + 1
        random = np.random.default_rng([self._seed, epoch, self._rank + 1])
        shift = random.random(len(rows)) * min(self._buffer, held)
        return rows[np.argsort((place + shift) % held, kind="stable")]


def _checked_episodes(windows: EpisodeWindows, episodes: Sequence[int] | None) -> np.ndarray:
    total = windows.corpus.episodes
    chosen = np.arange(total) if episodes is None else np.unique(np.asarray(episodes, dtype=np.int64))
    if len(chosen) == 0 or chosen[0] < 0 or chosen[-1] >= total:
        wanted = "none" if len(chosen) == 0 else f"{chosen[0]} to {chosen[-1]}"
        raise UserError(f"{windows.corpus.root}: episodes {wanted} asked for, there are 0 to {total - 1}")
    return chosen
