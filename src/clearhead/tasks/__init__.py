"""Tasks: a data set with everything that depends on it, from its splits and its loss to how a prediction is shown.

`clearhead.tasks.registry.TASKS` lists them. Importing a task does not import torch.
"""
