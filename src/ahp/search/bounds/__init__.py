"""Lower bounds of the time and memory of the space's rows, each closer one slower to compute than the one before."""
