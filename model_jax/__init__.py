"""Griffin in JAX (Flax NNX), the twin of `griffin_eval.model_torch`."""
