"""The transformer on packed samples, and the settings that make one."""

from typing import Any

import torch
from diffusers.models.transformers.transformer_cosmos3 import (
    Cosmos3OmniTransformer,
    Cosmos3VLTextRotaryEmbedding,
)
from pydantic import Field
from torch import Tensor, nn

from flywheel_shared.cosmos.attention import PackedAttention
from flywheel_shared.cosmos.sequence import Packed
from flywheel_shared.fsdp import generator_of
from flywheel_shared.recipe import Section


class ModelSettings(Section):
    """Sizes, named as in diffusers; the defaults are those of Cosmos 3 Nano.

    Attributes:
        rope_axes_dim: rotary frequencies of time, height and width; they sum to head_dim / 2.
        action_dim: width that actions are padded to; None makes a model without actions.
    """

    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_hidden_layers: int = 36
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 151936
    rope_theta: float = 5e6
    rope_axes_dim: tuple[int, int, int] = (24, 20, 20)
    rms_norm_eps: float = 1e-6
    latent_channel: int = 48
    latent_patch_size: int = 2
    base_fps: int = 24
    action_dim: int | None = Field(default=None, ge=1)
    num_embodiment_domains: int = 32

    def config(self) -> dict[str, Any]:
        """Arguments of `Cosmos3OmniTransformer`."""
        values = self.model_dump()
        values["rope_axes_dim"] = list(self.rope_axes_dim)
        values["patch_latent_dim"] = self.latent_channel * self.latent_patch_size**2
        values["action_gen"] = self.action_dim is not None
        return values


class CosmosModel(Cosmos3OmniTransformer):
    """`Cosmos3OmniTransformer` whose forward pass takes a packed batch; parameters keep their names."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.attention = PackedAttention()
        self.set_attn_processor(self.attention)  # type: ignore[arg-type]
        freeze_unused(self)

    @classmethod
    def on_meta(cls, settings: ModelSettings) -> "CosmosModel":
        """Build one whose parameters hold nothing yet; its buffers are real."""
        with torch.device("meta"):
            model = cls.from_settings(settings)
        model.rotary_emb = Cosmos3VLTextRotaryEmbedding(
            settings.head_dim, settings.rope_theta, settings.rope_axes_dim
        )
        return model

    @classmethod
    def from_settings(cls, settings: ModelSettings) -> "CosmosModel":
        """Build one with weights as PyTorch and diffusers initialise them."""
        return cls(**settings.config())

    def forward(self, packed: Packed) -> tuple[list[Tensor], list[Tensor]]:  # type: ignore[override]
        """Velocities of each sample's latents `[1, C, T, H, W]`, and of each acting sample's actions `[rows, D]`.

        Both are zero at what is given clean. Heads that the batch does not use get gradients of zero, so that
        ranks with different batches reduce the same gradients.
        """
        self.attention.layout = packed.layout
        inputs = dict(packed.inputs)
        dtype = self.embed_tokens.weight.dtype
        for name in ("vision_tokens", "action_tokens"):
            if name in inputs:
                inputs[name] = [tokens.to(dtype) for tokens in inputs[name]]
        videos, _, actions = super().forward(**inputs, return_dict=False)
        if self.action_gen and actions is None:
            domain = torch.zeros(1, dtype=torch.int64, device=videos[0].device)
            row = self.action_proj_in(videos[0].new_zeros(1, self.action_proj_in.input_size), domain)
            unused = self.action_proj_out(row + self.action_modality_embed, domain).sum()
            videos[0] = videos[0] + 0 * unused
        return videos, actions or []


def freeze_unused(model: Any) -> None:
    """Take out of training what no output depends on: the language head, and the end of the text's last layer."""
    last = model.layers[-1]
    attn = last.self_attn
    parts: list[nn.Module] = [model.lm_head, model.norm, last.mlp, last.post_attention_layernorm]
    parts += [attn.to_q, attn.to_out, attn.norm_q]
    if attn.k_norm_und_for_gen is not None:
        parts.append(attn.norm_k)
    for part in parts:
        part.requires_grad_(False)


# What the generation stream passes through, beside the layers' `*_moe_gen` parts.
_GENERATION = (
    "_moe_gen", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "norm_added_", "k_norm_und_for_gen",
    "proj_in", "proj_out", "time_embedder", "action_modality_embed",
)  # fmt: skip


def freeze_text_tower(model: nn.Module) -> None:
    """Train the generation tower and its heads alone: text goes on to be read as the language model reads it."""
    for name, parameter in model.named_parameters():
        if not any(part in name for part in _GENERATION):
            parameter.requires_grad_(False)


def init_from_scratch(model: Any, seed: int = 0) -> None:
    """Draw all weights of a model that is on one device."""
    for name, parameter in model.named_parameters():
        generator = generator_of(name, seed)
        parameter.data.copy_(initial_value(model, name, parameter.shape, generator))


def initial_value(model: Any, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """The parameter `name` of a model that starts from nothing: float32, on the CPU.

    Heads that read and write latents and actions are drawn with deviation 1 / sqrt(fan-in), cut at three, with
    biases of zero, as cosmos-framework's; the rest of the linear layers likewise, so that small models train.
    """
    if len(shape) == 1:
        zero = name.endswith("bias") or name.endswith("modality_embed")
        return torch.zeros(shape) if zero else torch.ones(shape)
    if name in ("action_proj_in.bias.weight", "action_proj_out.bias.weight"):
        return torch.zeros(shape)
    fan_in = shape[1]
    if name == "action_proj_in.fc.weight":
        fan_in = model.action_proj_in.input_size
    elif name == "action_proj_out.fc.weight":
        fan_in = model.action_proj_out.input_size
    std = 0.02 if name == "embed_tokens.weight" else fan_in**-0.5
    return nn.init.trunc_normal_(torch.empty(shape), std=std, a=-3 * std, b=3 * std, generator=generator)
