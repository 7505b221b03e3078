"""Tasks for lm_eval: YAML files, and the functions and classes that they name."""
