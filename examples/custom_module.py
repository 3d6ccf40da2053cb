"""A module of your own: AHP plans it for GPUs that you need not have, and trains it here.

    python custom_module.py                               on one process
    torchrun --nproc-per-node 2 custom_module.py          its weights split over two

AHP asks for blocks that are alike, and for nothing else: no base class, no hooks, no wrapped layers.
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

import ahp

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 256, 64, 4, 4, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, width]"""
        batch, length, width = x.shape
        heads = (batch, length, HEADS, width // HEADS)
        normed = self.norm_1(x)
        query, key, value = (of(normed).view(heads).transpose(1, 2) for of in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [batch, sequence] to logits [batch, sequence, vocabulary]."""
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main() -> None:
    job = ahp.Job(sequence_length=LENGTH, global_batch_size=8, precision="fp32")
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    with torch.device("meta"):  # no memory yet: each rank draws its own part, from job.seed
        model = Model()
    if rank == 0:
        graph = ahp.analyze(model, job)
        print(ahp.search(graph, "8xH100-SXM-80GB", job, keep=3))
    parallel = ahp.parallelize(model, {"job": job, "parallelism": {"tensor_parallel_degree": ranks}})
    for step in range(10):
        ids = torch.randint(VOCABULARY, (8, LENGTH), generator=torch.Generator().manual_seed(step))
        result = parallel.step(parallel.shard({"input_ids": ids, "labels": ids}))
        if rank == 0:
            print(f"step {step}: loss {result.loss:.3f}, gradient norm {result.grad_norm:.3f}")


if __name__ == "__main__":
    main()
