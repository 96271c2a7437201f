"""Training: the loop, optimizers, checkpoints, distributed processes and the run directory."""
