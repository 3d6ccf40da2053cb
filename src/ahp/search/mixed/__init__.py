"""Layouts over several groups of different devices: where each cell lies, and how many layers and micro-batches it gets."""
