"""Looks inside any PyTorch model: its attention, head by head, and what changes when a head is changed."""
