"""How a model is fitted: the loop, and the run directory that survives whatever stops it."""
