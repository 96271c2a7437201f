"""Experiments: one file each, opening with its command, what it takes and what it reaches. No torch needed."""
