"""Experiments, one file each, with the command, time and accuracy of each. Loads without torch."""
