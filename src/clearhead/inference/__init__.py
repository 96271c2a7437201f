"""Whatever takes a trained run: asking it, testing it, showing what it does."""
