"""Griffin in PyTorch, the twin of `griffin_eval.model_jax`."""
