"""Step 4: how each tensor of a block is split over the tensor-parallel axis, found on the traced graph."""
