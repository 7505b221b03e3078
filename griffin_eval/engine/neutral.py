"""Unsupported generation arguments, and the neutral values at which they have no effect.

The names are those of transformers' ``generate``, vLLM's ``SamplingParams`` and the OpenAI API.
"""

from typing import Any

_BY_VALUES: tuple[tuple[tuple[Any, ...] | None, str], ...] = (
    ((0,), "presence_penalty frequency_penalty diversity_penalty penalty_alpha"),
    ((0,), "min_p epsilon_cutoff eta_cutoff no_repeat_ngram_size encoder_no_repeat_ngram_size"),
    ((0,), "min_length min_new_tokens min_tokens"),
    ((1,), "repetition_penalty encoder_repetition_penalty typical_p guidance_scale"),
    ((1,), "num_beams num_beam_groups num_return_sequences best_of"),
    (([],), "bad_words bad_words_ids suppress_tokens begin_suppress_tokens"),
    (([],), "stop_strings stop_token_ids"),
    (({},), "logit_bias sequence_bias"),
    ((False,), "ignore_eos include_stop_str_in_output token_healing use_beam_search use_mtp"),
    ((False,), "remove_invalid_values return_dict_in_generate"),
    ((False,), "output_attentions output_hidden_states output_logits output_scores"),
    ((True,), "skip_special_tokens spaces_between_special_tokens"),
    # Arguments that never change an answer: memory, the scale of scores, and settings of beam
    # search and assisted generation, which have to be enabled by other arguments.
    (None, "use_cache renormalize_logits length_penalty early_stopping num_assistant_tokens"),
    (None, "num_assistant_tokens_schedule assistant_confidence_threshold"),
    (None, "assistant_lookbehind target_lookbehind"),
)
# Neutral values by argument name; None if every value is neutral.
NEUTRAL: dict[str, tuple[Any, ...] | None] = {
    name: values for values, names in _BY_VALUES for name in names.split()
}


def is_neutral(value: Any, neutral: tuple[Any, ...] | None) -> bool:
    """Return whether a value has no effect. None has no effect in any argument."""
    if value is None or neutral is None:
        return True
    return any(value == one and isinstance(value, bool) is isinstance(one, bool) for one in neutral)
