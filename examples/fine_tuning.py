"""Fine-tune with adapters (LoRA) from Hugging Face weights, with ZeRO-3 on two workers; then read the merged weights with transformers.

    python fine_tuning.py        needs peft: pip install 'adaptive-hybrid-parallelism[lora]'

Weights and text are made here, so that nothing is downloaded: put your own folder and file in their place.
"""

import json
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import ahp

BASE, ANSWERS, RUN = Path("base"), Path("answers.jsonl"), Path("runs/tuned")


def make_inputs() -> None:
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(BASE)
    rows = ({"prompt": f"{a} + {b} = ", "completion": str(a + b)} for a in range(20) for b in range(20))
    ANSWERS.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        [ANSWERS.read_text()], vocab_size=512, show_progress=False, special_tokens=["<|endoftext|>"]
    )
    tokenizer.save(str(BASE / "tokenizer.json"))


def main() -> None:
    make_inputs()
    plan = ahp.Plan.model_validate(
        {
            "model": str(BASE),
            "init_from": str(BASE),
            "job": {
                "data": str(ANSWERS),
                "sequence_length": 64,
                "global_batch_size": 8,
                "steps": 8,
                "lora": {"r": 8, "lora_alpha": 16},  # the keys of peft's LoraConfig
                "optimizer": {"learning_rate": 1e-3, "warmup_steps": 2},
            },
            "parallelism": {"data_parallel_shard_degree": 2, "zero_stage": 3},  # what `ahp plan` writes for a cluster
        }
    )
    outcome = ahp.Trainer(plan, folder=RUN).run()
    print(f"{outcome.status.state} after step {outcome.status.step}")
    tuned = AutoModelForCausalLM.from_pretrained(RUN / "hf")  # RUN/hf/adapter has the adapters alone
    print(f"{sum(p.numel() for p in tuned.parameters()):,} parameters, adapters merged")


if __name__ == "__main__":
    main()
