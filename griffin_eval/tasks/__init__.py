"""Tasks for lm_eval: the YAML files here and the functions they name."""
