"""Tensors in, tensors out: the parts that transformers are made of. Knows no file, token or device."""
