"""Attention over packed samples: each sees its own text and its own video and actions, nothing of its neighbours.

Text attends causally to the text before it. Video and actions attend to all of their sample.
"""

from collections.abc import Sequence

import torch
from diffusers.models.transformers.transformer_cosmos3 import Cosmos3AttnProcessor, Cosmos3PackedMoTAttention
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from flywheel_shared.cosmos.sequence import Layout


class PackedAttention(Cosmos3AttnProcessor):
    """Attention processor of every layer; `layout` must be that of the batch at hand.

    On a GPU, variable-length flash kernels; on a CPU, samples padded to one length under a mask.
    """

    layout: Layout

    def __call__(
        self,
        attn: Cosmos3PackedMoTAttention,
        und_seq: Tensor,
        gen_seq: Tensor,
        rotary_emb: tuple[Tensor, Tensor, Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Attend over both streams: `[tokens, hidden]` each, and out of each."""
        heads, kv_heads, size = attn.num_attention_heads, attn.num_key_value_heads, attn.head_dim
        cos_und, sin_und, cos_gen, sin_gen = (part.unsqueeze(1) for part in rotary_emb)
        q_und = attn.norm_q(attn.to_q(und_seq).view(-1, heads, size))
        k_und = attn.norm_k(attn.to_k(und_seq).view(-1, kv_heads, size))
        v_und = attn.to_v(und_seq).view(-1, kv_heads, size)
        q_gen = attn.norm_added_q(attn.add_q_proj(gen_seq).view(-1, heads, size))
        k_gen = attn.norm_added_k(attn.add_k_proj(gen_seq).view(-1, kv_heads, size))
        v_gen = attn.add_v_proj(gen_seq).view(-1, kv_heads, size)
        k_und_for_gen = k_und if attn.k_norm_und_for_gen is None else attn.k_norm_und_for_gen(k_und)
        q_und, q_gen = _rotate(q_und, cos_und, sin_und), _rotate(q_gen, cos_gen, sin_gen)
        k_gen = _rotate(k_gen, cos_gen, sin_gen)
        separate = k_und_for_gen is not k_und
        k_und = _rotate(k_und, cos_und, sin_und)
        k_und_for_gen = _rotate(k_und_for_gen, cos_und, sin_und) if separate else k_und

        text, generated = self.layout.text, self.layout.generated
        order = self.layout.keys
        keys = torch.cat((k_und_for_gen, k_gen))[order]
        values = torch.cat((v_und, v_gen))[order]
        both = [t + g for t, g in zip(text, generated, strict=True)]
        out_und = attend(q_und, k_und, v_und, text, text, causal=True)
        out_gen = attend(q_gen, keys, values, generated, both, causal=False)
        return attn.to_out(out_und.flatten(1)), attn.to_add_out(out_gen.flatten(1))


def attend(
    q: Tensor, k: Tensor, v: Tensor, q_lengths: Sequence[int], k_lengths: Sequence[int], *, causal: bool
) -> Tensor:
    """Attention of each sample's queries to its keys.

    Args:
        q: `[sum of q_lengths, heads, head_dim]`, samples one after another.
        k, v: `[sum of k_lengths, kv_heads, head_dim]`, each head serving heads / kv_heads queries.
        q_lengths, k_lengths: tokens of each sample.
        causal: token i sees tokens up to i (lengths must agree).

    Returns: `[sum of q_lengths, heads, head_dim]`.
    """
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        return _attend_varlen(q, k, v, q_lengths, k_lengths, causal)
    return _attend_padded(q, k, v, q_lengths, k_lengths, causal)


def _attend_varlen(
    q: Tensor, k: Tensor, v: Tensor, q_lengths: Sequence[int], k_lengths: Sequence[int], causal: bool
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    def bounds(lengths: Sequence[int]) -> Tensor:
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return ends.to(q.device, non_blocking=True)

    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (k, v))
    out = varlen_attn(
        q, k, v, bounds(q_lengths), bounds(k_lengths), max(q_lengths), max(k_lengths), is_causal=causal
    )
    assert isinstance(out, Tensor)  # a pair only where its logarithms are asked for
    return out


def _attend_padded(
    q: Tensor, k: Tensor, v: Tensor, q_lengths: Sequence[int], k_lengths: Sequence[int], causal: bool
) -> Tensor:
    dtype = q.dtype
    if q.device.type == "cpu":  # PyTorch's bfloat16 attention is far slower there than float32's
        q, k, v = q.float(), k.float(), v.float()
    queries, keys, values = (
        _pad(x, lengths).transpose(1, 2) for x, lengths in ((q, q_lengths), (k, k_lengths), (v, k_lengths))
    )
    mask = None
    if not causal and len(set(k_lengths)) > 1:
        mask = _real(k_lengths, q.device)[:, None, None, :]
    # Causal samples need no mask: what pads them comes after them.
    out = scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=causal, enable_gqa=True
    ).transpose(1, 2)
    if len(set(q_lengths)) == 1:
        return out.flatten(0, 1).to(dtype)
    return out[_real(q_lengths, q.device)].to(dtype)


def _real(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Which places of padded samples hold tokens, bool `[samples, longest]`."""
    return torch.arange(max(lengths), device=device) < torch.tensor(lengths, device=device)[:, None]


def _pad(x: Tensor, lengths: Sequence[int]) -> Tensor:
    """`[sum of lengths, ...] -> [samples, longest, ...]`, zeros behind."""
    if len(set(lengths)) == 1:
        return x.unflatten(0, (len(lengths), lengths[0]))
    return pad_sequence(list(x.split(list(lengths))), batch_first=True)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
