"""Writes a plan or a config as what another program starts: one file for each target, listed in ``registry.py``."""
