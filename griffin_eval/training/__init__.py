"""Training of small models for section 6.2 of the paper, in JAX."""
