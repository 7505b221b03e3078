"""Counters of an engine run."""

from dataclasses import dataclass, fields


@dataclass
class Stats:
    """Counts of tokens (one for each token of each sequence) and of work."""

    tokens_requested: int = 0  # tokens that answering each request alone would read
    tokens_unique: int = 0  # tokens of the radix trees, the minimum that must be read
    tokens_kept: int = 0  # further tokens, covered by states in ``state_cache=``
    tokens_computed: int = 0  # tokens that were read, prompts and generated tokens
    tokens_again: int = 0  # repeated ones among them, after evictions or to avoid tiny steps
    tokens_generated: int = 0
    states_evicted: int = 0  # states that were dropped because the memory budget was full
    steps: int = 0  # calls of the model
    continuations_encoded_alone: int = 0  # the tokenizer merges them into their contexts
    seconds: float = 0.0  # wall time inside the engine

    def __iadd__(self, other: "Stats") -> "Stats":
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        return self

    @property
    def saved_ratio(self) -> float:
        """Ratio of requested to computed tokens."""
        return self.tokens_requested / max(self.tokens_computed, 1)
