"""One thread for each test process: several that share two cores only get in each other's way."""

import torch

torch.set_num_threads(1)
