"""Using a trained run: prediction, evaluation, generation and explanation."""
