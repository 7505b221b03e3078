"""Small models of section 6.2 of the paper, trained in JAX."""
