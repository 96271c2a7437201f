"""Recipes: one file per experiment, with its command, time and accuracy. Importing them does not import torch."""
