"""Writes a plan or a config as a file that another program starts from: one module for each target, listed in ``registry.py``."""
