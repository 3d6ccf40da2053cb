"""What rows of the space take and hold at least, each closer look slower than the one before."""
