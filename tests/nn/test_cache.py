import pytest
import torch

from clearhead.nn.cache import DecoderCache, KVCache


def keys_values(length, batch=2):
    return torch.randn(batch, 3, length, 4), torch.randn(batch, 3, length, 5)


def test_extend_returns_all_keys_and_values_in_order():
    cache, ks, vs = KVCache(), [], []
    for length in (1, 1, 3, 1, 7, 1):  # repeatedly exceeds the allocated capacity
        k, v = keys_values(length)
        ks.append(k)
        vs.append(v)
        all_k, all_v = cache.extend(k, v)
        assert torch.equal(all_k, torch.cat(ks, 2))
        assert torch.equal(all_v, torch.cat(vs, 2))
        assert cache.length == all_k.shape[2]


def test_extend_reallocates_logarithmically_often():
    cache, buffers = KVCache(), set()
    kept = []  # keeps every buffer alive so that no address is reused
    for _ in range(100):
        k, _ = cache.extend(*keys_values(1))
        kept.append(k)
        buffers.add(k.data_ptr())
    assert len(buffers) <= 8, "capacity doubles"


def test_select_reorders_rows_and_extend_continues():
    cache = KVCache()
    cache.select(torch.tensor([0]))  # selecting from an empty cache does nothing
    k, v = keys_values(3)
    cache.extend(k, v)
    rows = torch.tensor([1, 1, 0])
    cache.select(rows)
    more_k, more_v = keys_values(1, batch=3)
    all_k, all_v = cache.extend(more_k, more_v)
    assert torch.equal(all_k, torch.cat([k[rows], more_k], 2))
    assert torch.equal(all_v, torch.cat([v[rows], more_v], 2))


def test_get_or_compute_computes_only_once_per_memory():
    cache, calls, memory = KVCache(), [], torch.zeros(1)

    def compute():
        calls.append(1)
        return keys_values(3)

    first, second = cache.get_or_compute(memory, compute), cache.get_or_compute(memory, compute)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert len(calls) == 1
    with pytest.raises(ValueError, match="of another memory"):
        cache.get_or_compute(torch.zeros(1), compute)


def test_extend_rejects_another_batch_size():
    cache = KVCache()
    cache.extend(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))
    with pytest.raises(ValueError, match=r"it holds \(1, 2\), got \(3, 2\)"):
        cache.extend(torch.zeros(3, 2, 1, 4), torch.zeros(3, 2, 1, 4))


def test_decoder_cache_has_self_and_cross_attention_caches_per_layer():
    cache = DecoderCache(2)
    assert (len(cache.layers), cache.length) == (2, 0)
    k, v = keys_values(3)
    for layer in cache.layers:
        layer.self_attn.extend(k, v)
        layer.cross_attn.get_or_compute(k, lambda: (k, v))
    assert cache.length == 3
    swapped = torch.tensor([1, 0])
    cache.select(swapped)
    for layer in cache.layers:
        assert torch.equal(layer.self_attn.extend(k, v)[0], torch.cat([k[swapped], k], 2))
        assert torch.equal(layer.cross_attn.get_or_compute(k, lambda: (v, k))[0], k), (
            "cross-attention keys are not reordered"
        )
