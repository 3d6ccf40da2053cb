#!/bin/sh
# One job on two nodes, which find each other at an address. Here both nodes are this machine. On a cluster, run the same line on every node,
# with one node's name in place of 127.0.0.1 and a folder that all nodes share. Under srun leave out --nodes and --rendezvous.
set -e
cat > plan.yaml <<'PLAN'
schema_version: 1
model: {model_type: llama, vocab_size: 512, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4}
job: {data: text.txt, sequence_length: 64, global_batch_size: 8, steps: 8, optimizer: {warmup_steps: 2}}
parallelism: {pipeline_parallel_degree: 2, micro_batch_size: 2}
PLAN
seq 1 20000 > text.txt
node() { ahp train plan.yaml --nodes 2 --rendezvous "127.0.0.1:${PORT:-29517}" --workers-per-node 1 --run.folder runs/two-nodes; }
node > second-node.log 2>&1 &
node
wait
