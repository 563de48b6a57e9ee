"""From a robot's numbers and pictures to the model's, and back. Training samples and requests use the same object."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from flywheel_shared.normalisation import QuantileNorm
from flywheel_shared.recipe import Section
from flywheel_shared.views import resize


class ViewSettings(Section):
    """How pictures reach the model.

    Attributes:
        cameras: dataset keys of the views, left to right in the model's picture.
        request_keys: keys of the same views in a policy request.
        height, width: pixels of one view in the model's picture.
    """

    cameras: tuple[str, ...] = ("observation.images.agentview", "observation.images.wrist")
    request_keys: tuple[str, ...] = ("observation/image", "observation/wrist_image")
    height: int
    width: int


class Transform:
    """Views, states and actions of one embodiment."""

    def __init__(
        self, metadata: Mapping[str, Any], views: ViewSettings, action_dim: int, state_dim: int
    ) -> None:
        self.views = views
        self.action = QuantileNorm(metadata["statistics"]["action"]["actions"], action_dim)
        self.state = QuantileNorm(metadata["statistics"]["state"]["state"], state_dim)

    def resize(self, frames: Tensor) -> Tensor:
        """One camera's ``uint8 [T, C, H, W]`` to the view's size, uint8, antialiased."""
        return resize(frames, self.views.height, self.views.width)
