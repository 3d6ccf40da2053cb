"""The three small models of the equality tests, a batch for them, and the reference: plain PyTorch on one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, SEQUENCE, BATCH = 128, 16, 8


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, pad_token_id=3, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=5, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, attn_implementation="sdpa",
    )  # fmt: skip
    return GPT2LMHeadModel(config)


class Block(nn.Module):
    """In the style of nanoGPT: a packed projection, and sizes computed from the input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(
            width, 3 * width, bias=False
        )  # a bias of the keys has no effect: Adam would make noise of it
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(self.norm_1(x)).split(C, dim=2)
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).contiguous().view(B, T, C))
        return x + self.down(F.relu(self.up(self.norm_2(x))).square())


class Custom(nn.Module):
    """Nobody prepared it for AHP: positions are a bare parameter of the model itself, the blocks a sequence."""

    def __init__(self, width: int = 32, layers: int = 5, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(64, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids) + self.positions[: input_ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class NormedRows(nn.Embedding):
    """With a norm of its own, as Inkling's: a rank with some of the rows would give it to some of the tokens alone."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.norm = nn.LayerNorm(sizes[1])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(ids))


def custom() -> nn.Module:
    torch.manual_seed(0)
    return Custom()


class OfTexts(Custom):
    """For runs of ``ahp train`` that are not about the model: ranks import no transformers, 2.8 s of processor time, before weights are exported."""

    def __init__(self) -> None:
        super().__init__(layers=2, vocabulary=300)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.positions, std=0.02)


class BiasedBlock(Block):
    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        B, T, C = x.shape
        q, k, v = self.qkv(self.norm_1(x)).split(C, dim=2)
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + self.out(y.transpose(1, 2).contiguous().view(B, T, C))
        return x + self.down(F.relu(self.up(self.norm_2(x))).square())


class Biased(nn.Module):
    """Every block is given a trainable table of relative positions, so it must be on every stage; the head is a function."""

    def __init__(self, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.project = nn.Linear(width, width)
        self.relative = nn.Embedding(64, 4)
        self.blocks = nn.ModuleList(BiasedBlock(width, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        position = torch.arange(input_ids.shape[1], device=input_ids.device)
        distance = position[:, None] - position[None, :]
        bias = self.relative(distance.clamp(min=0)).permute(2, 0, 1)[None]
        bias = bias.masked_fill(distance < 0, float("-inf"))
        x = self.project(self.tokens(input_ids))
        for block in self.blocks:
            x = block(x, bias)
        return self.norm(x) @ self.tokens.weight.T


def biased() -> nn.Module:
    torch.manual_seed(0)
    return Biased()


MODELS = {"llama": llama, "gpt2": gpt2, "custom": custom}
BUILDERS = {**MODELS, "biased": biased}

OPTIMIZER: dict[str, Any] = {
    "learning_rate": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "warmup_steps": 0,
    "schedule": "constant", "grad_clip": 0.5,
}  # fmt: skip
JOB: dict[str, Any] = {
    "sequence_length": SEQUENCE, "global_batch_size": BATCH, "steps": 20, "precision": "fp32", "optimizer": OPTIMIZER,
}  # fmt: skip


def batch(step: int) -> dict[str, torch.Tensor]:
    """Sequences with very different numbers of scored tokens, so that a mean of means would show."""
    generator = torch.Generator().manual_seed(1000 + step)
    input_ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    labels = input_ids.clone()
    for row in range(BATCH):
        labels[row, : (row * 5 + step) % SEQUENCE] = -100
    return {"input_ids": input_ids, "labels": labels}


def reference(
    name: str, steps: int, eps: float = OPTIMIZER["eps"], device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """Plain PyTorch: loss and gradient norm of each step, final weights. A masked model's labels are not shifted."""
    model = BUILDERS[name]().to(device)
    first = 0 if "ForMaskedLM" in type(model).__name__ else 1
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=OPTIMIZER["learning_rate"], betas=OPTIMIZER["betas"], eps=eps,
        weight_decay=OPTIMIZER["weight_decay"],
    )  # fmt: skip
    losses, norms = [], []
    for step in range(steps):
        data = {key: value.to(device) for key, value in batch(step).items()}
        output = (
            model(data["input_ids"]) if name in ("custom", "biased", "mixers") else model(input_ids=data["input_ids"])
        )
        logits = output if isinstance(output, torch.Tensor) else output.logits
        loss = F.cross_entropy(
            logits[:, : SEQUENCE - first].reshape(-1, VOCABULARY).float(),
            data["labels"][:, first:].reshape(-1),
            ignore_index=-100,
        )
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["grad_clip"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        norms.append(norm.item())
    return {"losses": losses, "norms": norms, "weights": {n: p.detach() for n, p in model.named_parameters()}}
