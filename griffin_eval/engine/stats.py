"""Counters of an engine run."""

from dataclasses import dataclass, fields


@dataclass
class Stats:
    """Counts of tokens (one for each token of each sequence) and of work.

    Attributes:
        tokens_requested: Tokens that answering each request alone would read.
        tokens_unique: Tokens of the radix trees, the minimum that must be read.
        tokens_kept: Tokens of the trees that were not read because ``state_cache=`` had the state
            after them; ``tokens_unique`` excludes them.
        tokens_computed: Tokens that were read, prompts and generated tokens.
        tokens_again: Tokens among those that were read again because a state had been evicted, or
            to avoid almost empty steps.
        tokens_generated: Tokens that were generated.
        states_evicted: States that were dropped because the memory budget was full.
        steps: Calls of the model.
        continuations_encoded_alone: Scored continuations that were tokenised without their context,
            since the tokenizer merges them into its last token.
        seconds: Wall time inside the engine.
    """

    tokens_requested: int = 0
    tokens_unique: int = 0
    tokens_kept: int = 0
    tokens_computed: int = 0
    tokens_again: int = 0
    tokens_generated: int = 0
    states_evicted: int = 0
    steps: int = 0
    continuations_encoded_alone: int = 0
    seconds: float = 0.0

    def __iadd__(self, other: "Stats") -> "Stats":
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        return self

    @property
    def saved_ratio(self) -> float:
        """Ratio of requested to computed tokens."""
        return self.tokens_requested / max(self.tokens_computed, 1)
