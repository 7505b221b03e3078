"""Readers and writers of checkpoints: containers, and the names of parameters in them."""
