"""The rivals: each layout written by hand in plain PyTorch, after PyTorch's own tutorials. Nothing here imports AHP.

Each class has ``step(input_ids int64 [global batch, sequence]) -> (loss, gradient norm)``: forward, backward, clip,
update; the mean loss of the global batch and the global norm before clipping, alike on every worker.
"""
