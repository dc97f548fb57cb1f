"""Prompts and the common counting rule."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from eval_fakes import BOS, EOS, CharTokenizer

from eagle_dropmatch.errors import UserError
from eagle_dropmatch.evals.chat import ChatSettings, cut, render, strip_thinking
from eagle_dropmatch.settings import stop_token_ids

USER = [{"role": "user", "content": "hi"}]


class DoublingTokenizer(CharTokenizer):
    """Adds its own BOS although it was told not to."""

    def __call__(self, text, add_special_tokens=True):
        return super().__call__(text, add_special_tokens=True)


class NoBosTokenizer(CharTokenizer):
    bos_token_id = None

    def apply_chat_template(self, messages, **kwargs):
        return super().apply_chat_template(messages, **kwargs).removeprefix("<s>")


@pytest.mark.parametrize("tokenizer", [CharTokenizer(), DoublingTokenizer()])
def test_a_prompt_starts_with_exactly_one_bos(tokenizer):
    prompt = render(tokenizer, USER, ChatSettings())
    assert prompt.ids.count(BOS) == 1
    assert prompt.ids[0] == BOS


def test_a_template_without_bos_gets_none():
    assert BOS not in render(NoBosTokenizer(), USER, ChatSettings()).ids


def test_the_prompt_does_not_depend_on_the_models_name():
    renamed = CharTokenizer()
    renamed.name_or_path = "/models/llama-2-vicuna-qwen"
    assert render(renamed, USER, ChatSettings()) == render(CharTokenizer(), USER, ChatSettings())


def test_the_system_prompt_goes_first():
    text = render(CharTokenizer(), USER, ChatSettings(system_prompt="간결하게")).text
    assert text == "<s><system>간결하게</><user>hi</><assistant>"


def test_a_tokenizer_without_template_is_refused():
    bare = CharTokenizer()
    bare.chat_template = None
    with pytest.raises(UserError, match="the tokenizer of char has no chat template"):
        render(bare, USER, ChatSettings())


def test_a_template_that_refuses_the_system_role_is_one_line():
    from jinja2 import TemplateError

    class Refusing(CharTokenizer):
        def apply_chat_template(self, messages, **kwargs):
            raise TemplateError("System role not supported")

    with pytest.raises(UserError, match="refuses a system prompt: System role not supported"):
        render(Refusing(), USER, ChatSettings(system_prompt="x"))


def test_other_errors_of_a_template_are_not_hidden():
    class Broken(CharTokenizer):
        def apply_chat_template(self, messages, **kwargs):
            raise KeyError("bug")

    with pytest.raises(KeyError):
        render(Broken(), USER, ChatSettings())


def test_thinking_reaches_the_template_or_is_refused():
    seen = {}

    class Thinking(CharTokenizer):
        chat_template = "{% if enable_thinking %}"

        def apply_chat_template(self, messages, **kwargs):
            seen.update(kwargs)
            return super().apply_chat_template(messages, **kwargs)

    render(Thinking(), USER, ChatSettings(thinking=False))
    assert seen["enable_thinking"] is False
    seen.clear()
    render(Thinking(), USER, ChatSettings())
    assert "enable_thinking" not in seen
    with pytest.raises(UserError, match="knows no enable_thinking"):
        render(CharTokenizer(), USER, ChatSettings(thinking=True))


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        ("<think>hmm</think>\n\nYes.", "Yes."),
        ("plain answer", "plain answer"),
        ("<think>a</think>one <think>b</think>two", "one two"),
        ("<think>cut off", ""),
        ("opened in the prompt</think> So: 3", "So: 3"),
        ("Said <think>and cut", "Said"),
    ],
)
def test_reasoning_stays_out_of_the_next_turn(answer, kept):
    assert strip_thinking(answer) == kept


def test_all_declared_stop_ids_count():
    tokenizer = CharTokenizer()
    assert stop_token_ids(SimpleNamespace(eos_token_id=[9, 7]), tokenizer) == (9, 7, EOS)
    assert stop_token_ids(SimpleNamespace(eos_token_id=5), tokenizer) == (5, EOS)
    assert stop_token_ids(SimpleNamespace(eos_token_id=[EOS, 5]), tokenizer) == (EOS, 5)
    assert stop_token_ids(SimpleNamespace(eos_token_id=None), tokenizer) == (EOS,)
    assert stop_token_ids(4, [9, 4], torch.tensor([[3]]), None) == (4, 9, 3)
    tokenizer.eos_token_id = None
    assert stop_token_ids(SimpleNamespace(eos_token_id=None), tokenizer) == ()


def test_the_cut_keeps_the_first_stop_token_and_nothing_after():
    assert cut([5, 6, 7, 8, 7], [7, 8], 10) == [5, 6, 7]
    assert cut([5, 6, 7], [7], 2) == [5, 6]
    assert cut([5, 6], [], 9) == [5, 6]
