"""Layouts over several groups of different devices: which cells lie where, who takes how many layers and micro-batches."""
