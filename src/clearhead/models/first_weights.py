"""How weights start, where the parts' own way (Xavier: see nn/linear.py) is not the model's."""

from torch import nn

BERT = 0.02
"""standard deviation of all of BERT's weights"""


def start_like_bert(model: nn.Module) -> None:
    """Small weights: each block adds little to what passes it by, which so survives many norms behind their sums."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.normal_(module.weight, std=BERT)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
