"""One side of a row of gpu.py, alone in its process: ``python gpu_side.py SIDE CASE`` prints its times, losses and memory as JSON."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

Side = Literal["ahp", "plain", "trainer"]
VOCABULARY = 128256
"""Of Llama 3 (its config.json): a head that chunked loss is for."""
SMOKE_VOCABULARY = 512
WARMUP = 5
"""Steps before the clock counts: allocators and the compiler of kernels begin in them."""
LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY, GRAD_CLIP = 3.0e-4, (0.9, 0.95), 1.0e-8, 0.1, 1.0


@dataclass(frozen=True)
class Variant:
    """What a row asks for; AHP's words for it."""

    compile: bool = False
    activation_checkpoint: Literal["none", "selective", "full"] = "none"
    loss_chunk_tokens: int | None = None
    precision: Literal["bf16", "fp8"] = "bf16"
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    lora_rank: int | None = None
    """Of adapters of every linear layer of the blocks; None: all weights are trained."""


@dataclass(frozen=True)
class Case:
    """A model, a variant and a batch."""

    size: dict[str, Any]
    """``model_type`` and sizes, named as transformers' config of it names them."""
    variant: Variant
    device: str
    sequence_length: int
    batch_size: int
    micro_batch_size: int
    steps: int

    @property
    def vocabulary(self) -> int:
        return SMOKE_VOCABULARY if self.size["hidden_size"] < 1024 else VOCABULARY

    def model_keys(self) -> dict[str, Any]:
        """The keys of transformers' config."""
        return {
            **self.size,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": max(4096, self.sequence_length),
            "tie_word_embeddings": False,
        }

    def build(self) -> Any:
        """In fp32 on the device, alike for every side."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        keys = self.model_keys()
        config = AutoConfig.for_model(keys.pop("model_type"), **keys, use_cache=False)
        with torch.device(self.device):
            return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32).train()

    def batch(self, step: int) -> torch.Tensor:
        """Token ids int64 [batch, sequence]; all tokens are scored."""
        import torch

        generator = torch.Generator().manual_seed(step)
        return torch.randint(0, self.vocabulary, (self.batch_size, self.sequence_length), generator=generator)

    def job(self) -> dict[str, Any]:
        return {
            "sequence_length": self.sequence_length,
            "global_batch_size": self.batch_size,
            "steps": WARMUP + self.steps,
            "precision": self.variant.precision,
            "lora": None if self.variant.lora_rank is None else {"r": self.variant.lora_rank, "target_modules": "all-linear"},
            "optimizer": {
                "name": self.variant.optimizer, "learning_rate": LEARNING_RATE, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY,
                "warmup_steps": 0, "schedule": "constant", "grad_clip": GRAD_CLIP,
            },
        }  # fmt: skip

    def parallelism(self) -> dict[str, Any]:
        return {
            "micro_batch_size": self.micro_batch_size,
            "activation_checkpoint": self.variant.activation_checkpoint,
        }

    def engine(self) -> dict[str, Any]:
        return {"compile": self.variant.compile, "loss_chunk_tokens": self.variant.loss_chunk_tokens}


def ahp_step(case: Case) -> Callable[[torch.Tensor], float]:
    import torch

    import ahp

    plan = {"job": case.job(), "parallelism": case.parallelism(), "engine": case.engine()}
    parallel = ahp.parallelize(case.build(), plan, device=torch.device(case.device))
    return lambda ids: parallel.step(parallel.shard({"input_ids": ids, "labels": ids})).loss


def plain_step(case: Case) -> Callable[[torch.Tensor], float]:
    """fp32 weights under autocast, blocks compiled one by one, torch's checkpoint, fused AdamW. Of chunked loss and 8 bits: each chunk of
    logits under checkpoint, as users write it, and torchao's conversion of the blocks' linear layers and its AdamW. Of adapters: peft's, in
    fp32 beside weights in bf16."""
    import torch
    import torch.nn.functional as F
    from torch.utils.checkpoint import checkpoint

    model, variant = case.build().to(case.device), case.variant
    if variant.lora_rank is not None:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model.bfloat16(), LoraConfig(r=variant.lora_rank, target_modules="all-linear")
        ).base_model.model
    if variant.precision == "fp8":
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(model.model.layers)
    for block in model.model.layers:
        if variant.compile:
            block.compile(dynamic=False)
        if variant.activation_checkpoint != "none":
            run = partial(checkpoint, block.forward, use_reentrant=False)
            block.forward = (
                partial(run, context_fn=_keep_products) if variant.activation_checkpoint == "selective" else run
            )
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = _optimizer(variant.optimizer, trained)

    def chunk_loss(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(
            model.lm_head(hidden).float().flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
        )

    def step(ids: torch.Tensor) -> float:
        ids = ids.to(case.device, non_blocking=True)
        targets = F.pad(ids[:, 1:], (0, 1), value=-100)
        scored, total = (targets != -100).sum(), torch.zeros((), device=case.device)
        for part, wanted in zip(ids.split(case.micro_batch_size), targets.split(case.micro_batch_size), strict=True):
            with torch.autocast(case.device, torch.bfloat16):
                hidden = model.model(part).last_hidden_state
                if variant.loss_chunk_tokens is None:
                    loss = chunk_loss(hidden, wanted)
                else:
                    rows = max(1, variant.loss_chunk_tokens // len(part))
                    pairs = zip(hidden.split(rows, 1), wanted.split(rows, 1), strict=True)
                    loss = torch.stack([checkpoint(chunk_loss, *pair, use_reentrant=False) for pair in pairs]).sum()
            (loss / scored).backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(trained, GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return (total / scored).item()

    return step


def _keep_products() -> Any:
    """Products and fused attention are kept, the rest is run again: what AHP calls selective."""
    import torch
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    aten = torch.ops.aten
    kept = [aten.mm.default, aten._grouped_mm.default]
    kept += [
        getattr(aten, f"_scaled_dot_product_{kernel}_attention").default for kernel in ("cudnn", "efficient", "flash")
    ]
    return create_selective_checkpoint_contexts(kept)


def _optimizer(name: str, trained: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    import torch

    keys: dict[str, Any] = {"lr": LEARNING_RATE, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
    if name == "adamw":
        return torch.optim.AdamW(trained, fused=True, **keys)
    from torchao.optim import AdamW8bit

    return AdamW8bit(trained, **keys)


def timed(case: Case, step: Callable[[torch.Tensor], float]) -> dict[str, Any]:
    """A step ends when its loss is on the host."""
    batches = [case.batch(number) for number in range(WARMUP + case.steps)]
    losses, times_s = [], []
    for number, ids in enumerate(batches):
        if number == WARMUP:
            _reset_peak(case.device)
        start = time.perf_counter()
        losses.append(step(ids))
        _synchronize(case.device)
        times_s.append(time.perf_counter() - start)
    return {"losses": losses, "step_times_s": times_s[WARMUP:], **_memory(case.device)}


def trained(case: Case) -> dict[str, Any]:
    """transformers' Trainer as its users set it, on the same batches in the same order."""
    import tempfile

    from torch.utils.data import IterableDataset
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Rows(IterableDataset):
        def __iter__(self) -> Any:
            for number in range(WARMUP + case.steps):
                yield from ({"input_ids": row, "labels": row} for row in case.batch(number))

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.ends.append(time.perf_counter())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            _synchronize(case.device)
            self.ends.append(time.perf_counter())
            if len(self.ends) == WARMUP + 1:
                _reset_peak(case.device)

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=case.micro_batch_size, max_steps=WARMUP + case.steps,
            gradient_accumulation_steps=case.batch_size // case.micro_batch_size, bf16=True, optim="adamw_torch_fused",
            learning_rate=LEARNING_RATE, adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_epsilon=EPS,
            weight_decay=WEIGHT_DECAY, max_grad_norm=GRAD_CLIP, lr_scheduler_type="constant",
            gradient_checkpointing=case.variant.activation_checkpoint == "full", torch_compile=case.variant.compile,
            logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=case.device == "cpu",
        )  # fmt: skip
        trainer = Trainer(model=case.build(), args=arguments, train_dataset=Rows(), callbacks=[clock])
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    times_s = [end - start for start, end in zip(clock.ends, clock.ends[1:], strict=False)]
    return {"losses": losses, "step_times_s": times_s[WARMUP:], **_memory(case.device)}


def _synchronize(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def _reset_peak(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _memory(device: str) -> dict[str, int | None]:
    import torch

    if device != "cuda":
        return {"allocated_bytes": None, "reserved_bytes": None}
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def main(side: str, plain: dict[str, Any]) -> None:
    """Imports what takes seconds, and begins when its standard input says so: the processes of a row are started together."""
    for name in ("torch", "transformers", "ahp.runtime.parallel"):
        importlib.import_module(name)
    sys.stdin.readline()
    case = Case(**{**plain, "variant": Variant(**plain["variant"])})
    steps = {"ahp": ahp_step, "plain": plain_step}
    print(json.dumps(timed(case, steps[side](case)) if side in steps else trained(case)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
