import pytest
import torch

from clearhead.models.inputs import check_ids, embeddings_or


def test_ids_are_embedded_and_embeddings_pass():
    ids, embeddings = torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2, 4)
    assert embeddings_or(lambda x: x + 1, ids, None, 4) is not ids
    assert embeddings_or(lambda x: x + 1, None, embeddings, 4) is embeddings


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_whole_numbers_of_any_size_are_ids(dtype):
    check_ids(torch.tensor([[0, 4]], dtype=dtype), 5)
    with pytest.raises(ValueError, match="from 0 to 3, got 4"):
        check_ids(torch.tensor([[0, 4]], dtype=dtype), 4)


def test_an_empty_sequence_and_the_meta_device_are_not_looked_into():
    check_ids(torch.zeros(1, 0, dtype=torch.long), 5)
    check_ids(torch.zeros(1, 3, dtype=torch.long, device="meta"), 1)
