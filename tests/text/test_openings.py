"""A conversation continued after a text equals the conversation that contains the text."""

import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from griffin_eval.text.chat import PLAIN, TemplateRefused, after_opening, opening, rendered

GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
NAMES = types.SimpleNamespace(special_tokens={"bos_token": "<bos>", "eos_token": "<eos>"})
TEXTS = st.text(st.characters(codec="utf-8"), min_size=1).map(str.strip).filter(bool)


def user(content):
    return {"role": "user", "content": content}


def model(content):
    return {"role": "assistant", "content": content}


@pytest.mark.parametrize("template", [GEMMA, PLAIN])
@given(book=TEXTS, said=st.lists(TEXTS, min_size=1, max_size=5))
def test_opening_and_rest_are_the_whole(template, book, said):
    messages = [(model if i % 2 else user)(text) for i, text in enumerate(said)]
    whole = [user(f"{book}\n\n{said[0]}"), *messages[1:]]
    found = opening(template, book + "\n", NAMES) + after_opening(template, messages, NAMES)
    assert found == rendered(template, whole, NAMES)


def test_the_models_turn_may_be_left_open():
    whole = [user("a book\n\nWho?"), model("It was")]
    rest = after_opening(GEMMA, [user("Who?"), model("It was")], NAMES, add_generation_prompt=False)
    expected = rendered(GEMMA, whole, NAMES, add_generation_prompt=False)
    assert opening(GEMMA, "a book", NAMES) + rest == expected and expected.endswith("It was")


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (GEMMA, [{"role": "system", "content": "a"}, user("b")], "'system' comes first"),
        (GEMMA, [user("a"), user("b")], "must alternate"),
        ("{{ messages[0]['content'] | upper }}", [user("a")], None),
        (
            "{{ messages | length }}. {{ messages[0]['content'] }}",
            [user("a"), model("b")],
            "begins",
        ),
        ("no one", [user("a")], "leaves out"),
        ("{{ 1 / 0 }}", [user("a")], "division"),
        ("{% if", [user("a")], "unexpected|Expected|end of"),
    ],
)
def test_what_cannot_be_is_said(template, messages, reason):
    if reason is None:
        with pytest.raises(TemplateRefused, match="changes what"):
            opening(template, "a book", NAMES)
        return
    with pytest.raises(TemplateRefused, match=reason):
        after_opening(template, messages, NAMES)
