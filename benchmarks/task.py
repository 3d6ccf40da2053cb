"""What both sides of a measurement have in common: the model, the batch, the optimizer. Changing one changes both."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, MixtralForCausalLM

VOCABULARY = 4096
"""Of every model here."""
EXPERTS_OF_A_TOKEN = 2
"""In a mixture."""
MUON_MOMENTUM = 0.95
"""torch's default."""

MODELS: dict[str, dict[str, int]] = {
    # 2.2 M, 6.5 M and 27.8 M parameters. Sizes of the benchmarks' own (`ahp train` has 4 blocks, vocabulary 2048), so
    # that published figures stay comparable when the catalogue changes.
    "small": {"hidden_size": 128, "intermediate_size": 352, "layers": 6, "heads": 4, "kv_heads": 2},
    "tiny": {"hidden_size": 256, "intermediate_size": 704, "layers": 6, "heads": 8, "kv_heads": 4},
    "medium": {"hidden_size": 512, "intermediate_size": 1408, "layers": 8, "heads": 8, "kv_heads": 4},
}


@dataclass(frozen=True)
class Optimizer:
    """Settings of ``torch.optim.AdamW``, and of ``torch.optim.Muon`` for the matrices of the blocks where it is ``muon``; the
    largest gradient norm."""

    name: str = "adamw"
    learning_rate: float = 1.0e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1.0e-8
    weight_decay: float = 0.1
    grad_clip: float = 1.0

    def keywords(self) -> dict[str, Any]:
        """For ``torch.optim.AdamW``; the fused kernel, as the runtime uses it."""
        return {
            "lr": self.learning_rate,
            "betas": self.betas,
            "eps": self.eps,
            "weight_decay": self.weight_decay,
            "fused": True,
        }

    def muon_keywords(self) -> dict[str, Any]:
        """For ``torch.optim.Muon``, its steps as large as AdamW's, so that both share rate and decay."""
        return {
            "lr": self.learning_rate,
            "weight_decay": self.weight_decay,
            "momentum": MUON_MOMENTUM,
            "adjust_lr_fn": "match_rms_adamw",
        }


@dataclass(frozen=True)
class Task:
    """One model, batch and precision."""

    model: str = "tiny"
    sequence_length: int = 256
    global_batch_size: int = 8
    """Sequences of one optimizer step over all workers."""
    precision: str = "fp32"
    optimizer: Optimizer = field(default_factory=Optimizer)
    seed: int = 0
    experts: int = 0
    """Of each block, half as wide as the MLP of a block without; 0 = no mixture."""

    def model_keys(self) -> dict[str, Any]:
        """The keys of transformers' LlamaConfig, or of its MixtralConfig."""
        size = MODELS[self.model]
        mixture = {"num_local_experts": self.experts, "num_experts_per_tok": EXPERTS_OF_A_TOKEN} if self.experts else {}
        return {
            "vocab_size": VOCABULARY,
            "hidden_size": size["hidden_size"],
            "intermediate_size": size["intermediate_size"] // (2 if self.experts else 1),
            "num_hidden_layers": size["layers"],
            "num_attention_heads": size["heads"],
            "num_key_value_heads": size["kv_heads"],
            "max_position_embeddings": max(1024, self.sequence_length),
            "tie_word_embeddings": False,
            **mixture,
        }

    def build(self) -> LlamaForCausalLM:
        """transformers' LLaMA in fp32 with the weights of ``seed``, alike on every worker and for both sides."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        assert not self.experts, "a mixture is built by build_mixture"
        torch.manual_seed(self.seed)
        config = LlamaConfig(**self.model_keys(), use_cache=False, attn_implementation="sdpa")
        return LlamaForCausalLM(config).train()

    def build_mixture(self) -> MixtralForCausalLM:
        """The same with experts: transformers' Mixtral, without a balance loss."""
        import torch
        from transformers import MixtralConfig, MixtralForCausalLM

        torch.manual_seed(self.seed)
        config = MixtralConfig(
            **self.model_keys(), use_cache=False, attn_implementation="sdpa", output_router_logits=False
        )
        return MixtralForCausalLM(config).train()

    def batch(self, step: int) -> torch.Tensor:
        """Token ids of the global batch of a step, int64 [global batch, sequence]; every token is scored."""
        import torch

        generator = torch.Generator().manual_seed(1_000_003 * self.seed + step)
        return torch.randint(0, VOCABULARY, (self.global_batch_size, self.sequence_length), generator=generator)

    def job(self, num_steps: int) -> dict[str, Any]:
        """The same as a job of AHP: constant learning rate, no warm-up."""
        o = self.optimizer
        return {
            "sequence_length": self.sequence_length,
            "global_batch_size": self.global_batch_size,
            "steps": num_steps,
            "precision": self.precision,
            "seed": self.seed,
            "optimizer": {
                "name": o.name,
                "learning_rate": o.learning_rate,
                "betas": o.betas,
                "eps": o.eps,
                "weight_decay": o.weight_decay,
                "warmup_steps": 0,
                "schedule": "constant",
                "grad_clip": o.grad_clip,
            },
        }
