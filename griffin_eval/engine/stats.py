"""What a run read, and what it did not have to read."""

from dataclasses import dataclass, fields


@dataclass
class Stats:
    """Counts of tokens, each in units of one token of one sequence, and of the work done.

    Attributes:
        tokens_requested: tokens that scoring or continuing each request alone would read.
        tokens_unique: tokens of the radix trees, the least that must be read.
        tokens_kept: tokens of these trees that were not read, since the states after them were in
            the folder of ``state_cache=``; they are not among ``tokens_unique``.
        tokens_computed: tokens that were read, of prompts and generated ones.
        tokens_again: those of them that were read once more, because a state had been evicted or to
            spare steps that would be almost empty.
        tokens_generated: tokens that generation chose.
        states_evicted: states that were dropped because the memory budget was full.
        steps: calls of the model.
        continuations_encoded_alone: scored continuations that were encoded without their context,
            since the tokenizer merges them into its last token.
        seconds: wall time inside the engine.
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
        """Requested tokens over computed tokens."""
        return self.tokens_requested / max(self.tokens_computed, 1)
