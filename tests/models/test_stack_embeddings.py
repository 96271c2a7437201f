import pytest
import torch

from clearhead import LanguageModel
from clearhead.models.config import LanguageConfig
from clearhead.models.stack import embed_ids, input_embeddings


def test_input_embeddings_embeds_ids_and_passes_embeddings_through():
    ids, embeddings = torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2, 4)
    assert input_embeddings(lambda x: x + 1, ids, None, 4) is not ids
    assert input_embeddings(lambda x: x + 1, None, embeddings, 4) is embeddings


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_ids_of_any_integer_dtype_are_embedded(dtype):
    table, ids = torch.randn(5, 2), torch.tensor([[0, 4]], dtype=dtype)
    assert torch.equal(embed_ids(ids, table), table[torch.tensor([[0, 4]])])
    with pytest.raises(ValueError, match="from 0 to 3, got 4"):
        embed_ids(ids, table[:4])


def test_empty_and_meta_ids_are_embedded():
    assert embed_ids(torch.zeros(1, 0, dtype=torch.long), torch.randn(5, 2)).shape == (1, 0, 2)
    assert embed_ids(torch.zeros(1, 3, dtype=torch.long, device="meta"), torch.randn(5, 2, device="meta")).shape == (
        1,
        3,
        2,
    )


def test_token_embeddings_are_scaled_for_sinusoidal_positions():
    for pos_embed in ("sinusoidal", "learned"):
        model = LanguageModel.from_config(
            LanguageConfig(width=64, depth=1, num_heads=1, vocab_size=50, pos_embed=pos_embed)
        )
        std = model.tokens(torch.arange(50)[None]).std().item()
        assert std == pytest.approx(1.0 if pos_embed == "sinusoidal" else 1 / 8, rel=0.1)
