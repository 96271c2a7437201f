"""Transformers as people write them, right and with one mistake each. All are small and have a residual path."""

WIDTH, HEADS, N_IDS, CONTEXT = 8, 2, 11, 16
