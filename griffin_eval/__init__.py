"""Convert and evaluate Griffin, Hawk and RecurrentGemma checkpoints in JAX and PyTorch."""

__version__ = "0.1.0"
