"""A training loop of your own, which goes on where it was ended, under whatever layout it is started next.

torchrun --nproc-per-node 2 own_loop.py
torchrun --nproc-per-node 2 own_loop.py --pipeline    goes on with a pipeline where the first split every layer
"""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ahp

STEPS, FOLDER = 10, Path("checkpoint")
JOB = {"sequence_length": 128, "global_batch_size": 8, "steps": 2 * STEPS}
TENSOR, PIPELINE = {"tensor_parallel_degree": 2}, {"pipeline_parallel_degree": 2, "micro_batch_size": 2}


def batch(step: int) -> dict[str, torch.Tensor]:
    """The global batch of a step, alike on every rank: a function of the step, so that a restart reads no text twice."""
    ids = torch.randint(512, (8, 128), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def main() -> None:
    layout = PIPELINE if "--pipeline" in sys.argv else TENSOR
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    with torch.device("meta"):  # no memory yet: each rank draws its own part, from job.seed
        model = LlamaForCausalLM(config)
    parallel = ahp.parallelize(model, {"job": JOB, "parallelism": layout})  # joins the ranks
    if FOLDER.exists():
        parallel.load(FOLDER)
    first = parallel.num_steps_done
    for step in range(first, first + STEPS):
        result = parallel.step(parallel.shard(batch(step)))
        if torch.distributed.get_rank() == 0:
            print(f"step {step}: loss {result.loss:.4f}, gradient norm {result.grad_norm:.4f}")
    loss = parallel.evaluate([parallel.shard(batch(-1))])
    parallel.save(FOLDER)
    if torch.distributed.get_rank() == 0:
        print(f"loss of unseen text {loss:.4f}; saved in {FOLDER}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
