"""lm_eval's own tasks over long contexts, as one group."""
