"""Small transformers as people write them: correct ones, and ones with a single fault. All have a residual path."""

WIDTH, NUM_HEADS, VOCAB_SIZE, CONTEXT_LENGTH = 8, 2, 11, 16
