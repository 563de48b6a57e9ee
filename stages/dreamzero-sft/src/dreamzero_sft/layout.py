"""Where every token of a training sequence lies, and what it may look at.

The public order of the teacher-forcing sequence is [clean video | noisy video | actions | states]. Inside the
model the tokens of one causal block are kept together, so that every attention call reads contiguous ranges:

    [clean frame 0 | clean block 0 | ... ] [noisy frame 0] [noisy block 0, actions 0, state 0] [noisy block 1, ...]

The last clean block is left out: no token that is in the loss ever looks at it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """The blocks of one window.

    Attributes:
        blocks: causal blocks in the window; it has ``1 + blocks * frames_per_block`` latent frames.
        frames_per_block: latent frames in a block.
        tokens_per_frame: patches of one latent frame (height x width after patching).
        actions_per_block: action tokens in a block.
        states_per_block: state tokens in a block.
        noisy_first_frame: whether frame 0 is also denoised (the reference does; its tokens see only themselves).
    """

    blocks: int
    frames_per_block: int
    tokens_per_frame: int
    actions_per_block: int
    states_per_block: int = 1
    noisy_first_frame: bool = True

    @property
    def frames(self) -> int:
        """Latent frames of the window, the conditioning frame included."""
        return 1 + self.blocks * self.frames_per_block

    @property
    def clean_frames(self) -> int:
        """Clean latent frames in the sequence: all but the last block's."""
        return 1 + (self.blocks - 1) * self.frames_per_block

    @property
    def first_noisy_frame(self) -> int:
        """Index of the first latent frame that is denoised."""
        return 0 if self.noisy_first_frame else 1

    @property
    def clean_ranges(self) -> list[slice]:
        """Token ranges of clean frame 0 and of each clean block kept; each sees everything up to its own end."""
        stops = [(1 + i * self.frames_per_block) * self.tokens_per_frame for i in range(self.blocks)]
        return [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]

    @property
    def noisy_first_range(self) -> slice:
        """Token range of noisy frame 0 (empty when it is not denoised); it sees only itself."""
        start = self.clean_frames * self.tokens_per_frame
        return slice(start, start + (self.tokens_per_frame if self.noisy_first_frame else 0))

    @property
    def video_tokens_per_block(self) -> int:
        """Noisy video tokens of a block."""
        return self.frames_per_block * self.tokens_per_frame

    @property
    def group_tokens(self) -> int:
        """Tokens of a block's group: noisy video, actions and states."""
        return self.video_tokens_per_block + self.actions_per_block + self.states_per_block

    @property
    def groups(self) -> list[slice]:
        """Token range of each block's group [noisy video, actions, states].

        Video and actions of group ``i`` see clean ranges ``0..i`` (frame 0 and the blocks before) and the group;
        its states see themselves.
        """
        first = self.noisy_first_range.stop
        return [
            slice(first + i * self.group_tokens, first + (i + 1) * self.group_tokens)
            for i in range(self.blocks)
        ]

    @property
    def tokens(self) -> int:
        """Tokens of the sequence as it is computed."""
        return self.groups[-1].stop

    def __post_init__(self) -> None:
        """Refuse sizes that describe no window.

        Raises:
            ValueError: if a count is not positive.
        """
        for name in (
            "blocks",
            "frames_per_block",
            "tokens_per_frame",
            "actions_per_block",
            "states_per_block",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, found {getattr(self, name)}")
