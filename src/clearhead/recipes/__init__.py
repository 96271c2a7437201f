"""Experiments: one file each, which opens with its command, what it takes and what it reaches. Does not import torch."""
