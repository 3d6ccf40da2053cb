"""What rows of the space take and hold at least, each closer look dearer than the one before."""
