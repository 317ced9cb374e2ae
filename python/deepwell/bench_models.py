"""Decoders in plain PyTorch for `deepwell bench`, by the sizes of a published model or of a small one."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from deepwell import _deepwell
from deepwell.errors import DeepwellError, UnsupportedError

_SMALL = {
    "tiny": {"layers": 2, "hidden": 128, "heads": 4, "ffn": 512, "vocabulary": 1024},
    "mini": {"layers": 4, "hidden": 256, "heads": 8, "ffn": 1024, "vocabulary": 8192},
}
_ALIASES = {"small": "gpt3-125m", "llama-70b": "llama2-70b"}
NAMES = (*_SMALL, *_ALIASES)


def sizes_of(name: str) -> dict:
    """Returns the sizes of a built-in model, a name of the catalogue or a Hugging Face folder."""
    if name in _SMALL:
        small = _SMALL[name]
        more = {"kv_heads": small["heads"], "head_dim": small["hidden"] // small["heads"]}
        return {**small, **more, "gated": 1, "tied": 0, "positions": 0, "experts": 0, "kv_rank": 0}
    try:
        return _deepwell.planner_model(_ALIASES.get(name, name))
    except _deepwell.Error as error:
        raise DeepwellError(f"{error}; or one of {', '.join(NAMES)}") from None


def check(sizes: dict) -> None:
    """Raises UnsupportedError for models that `Decoder` does not build."""
    if sizes["experts"] or sizes["kv_rank"]:
        kind = "a mixture of experts" if sizes["experts"] else "a model with latent attention"
        raise UnsupportedError(
            f"{kind} is not supported by this benchmark: choose a dense model, or `deepwell bench moe`"
        )


def parameter_count(sizes: dict) -> int:
    """Returns the number of parameters of `Decoder(sizes)`."""
    hidden, width = sizes["hidden"], sizes["head_dim"]
    attention = hidden * width * 2 * (sizes["heads"] + sizes["kv_heads"])
    mlp = (3 if sizes["gated"] else 2) * hidden * sizes["ffn"]
    tables = sizes["vocabulary"] * (1 if sizes["tied"] else 2) + sizes["positions"]
    return sizes["layers"] * (attention + mlp + 2 * hidden) + hidden * tables + hidden


def step_flops(sizes: dict, batch: int, seq_len: int) -> int:
    """Returns the operations of a training step, forward and backward: six for each weight of a matrix and token, and
    those of causal attention."""
    hidden, tokens = sizes["hidden"], batch * seq_len
    outside = sizes["positions"] + (0 if sizes["tied"] else sizes["vocabulary"])
    weights = parameter_count(sizes) - hidden * (outside + 2 * sizes["layers"] + 1)
    attention = 6 * sizes["layers"] * sizes["heads"] * sizes["head_dim"] * tokens * seq_len
    return 6 * weights * tokens + attention


class _Block(torch.nn.Module):
    def __init__(self, sizes: dict) -> None:
        super().__init__()
        hidden = sizes["hidden"]
        self.heads, self.kv_heads = sizes["heads"], sizes["kv_heads"]
        self.head_dim = sizes["head_dim"]
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.attention_norm = torch.nn.RMSNorm(hidden, eps=1e-5)
        self.q, self.k, self.v = (torch.nn.Linear(hidden, n, bias=False) for n in (q, kv, kv))
        self.o = torch.nn.Linear(q, hidden, bias=False)
        self.mlp_norm = torch.nn.RMSNorm(hidden, eps=1e-5)
        self.gate = torch.nn.Linear(hidden, sizes["ffn"], bias=False) if sizes["gated"] else None
        self.up = torch.nn.Linear(hidden, sizes["ffn"], bias=False)
        self.down = torch.nn.Linear(sizes["ffn"], hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq_len, _ = x.shape
        y = self.attention_norm(x)
        q = self.q(y).view(batch, seq_len, self.heads, self.head_dim).transpose(1, 2)
        k = self.k(y).view(batch, seq_len, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v(y).view(batch, seq_len, self.kv_heads, self.head_dim).transpose(1, 2)
        grouped = self.kv_heads != self.heads
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        x = x + self.o(y.transpose(1, 2).reshape(batch, seq_len, -1))
        y = self.mlp_norm(x)
        y = self.up(y) * F.silu(self.gate(y)) if self.gate is not None else F.gelu(self.up(y))
        return x + self.down(y)


class Decoder(torch.nn.Module):
    """Returns the mean cross-entropy of the next tokens. Norms are RMSNorm, linear layers have no bias, and there are
    no rotary positions: the matrices, not the details, have a published model's sizes."""

    def __init__(self, sizes: dict) -> None:
        super().__init__()
        check(sizes)
        hidden = sizes["hidden"]
        self.embedding = torch.nn.Embedding(sizes["vocabulary"], hidden)
        self.positions = (
            torch.nn.Embedding(sizes["positions"], hidden) if sizes["positions"] else None
        )
        self.blocks = torch.nn.ModuleList(_Block(sizes) for _ in range(sizes["layers"]))
        self.norm = torch.nn.RMSNorm(hidden, eps=1e-5)
        self.head = torch.nn.Linear(hidden, sizes["vocabulary"], bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.02)
        if sizes["tied"]:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
