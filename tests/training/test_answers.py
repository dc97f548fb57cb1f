"""The target's answers: the sampler's distribution, and independence of the batch."""

from __future__ import annotations

import pytest
import torch
from training_toys import STOP, toy_target, toy_tokenizer

from eagle_dropmatch.target import TargetModel
from eagle_dropmatch.training.answers import (
    Prompt,
    answer,
    first_prompts,
    plan,
    second_prompts,
)
from eagle_dropmatch.training.corpus import Example
from eagle_dropmatch.training.prompts import Conversation


@pytest.fixture(scope="module")
def target():
    return TargetModel(toy_target())


def prompts(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 12, (count,), generator=generator).tolist()
    return [
        Prompt(f"p{i}", torch.randint(0, 256, (n,), generator=generator).tolist())
        for i, n in enumerate(lengths)
    ]


def answers(target, asked, temperature, seed=0, new=24, stop_ids=(STOP,)):
    return answer(
        target, asked, temperature=temperature, max_new_tokens=new, stop_ids=stop_ids, seed=seed
    )


def test_a_temperature_near_zero_is_greedy(target):
    asked = prompts(4)
    cold, greedy = answers(target, asked, 1e-4), answers(target, asked, 0.0)
    assert [e.ids for e in cold] == [e.ids for e in greedy]
    assert [e.ids for e in answers(target, asked, 1.0)] != [e.ids for e in greedy]


def test_greedy_answers_are_the_models_own(target):
    for asked, found in zip(prompts(3), answers(target, prompts(3), 0.0), strict=True):
        wanted = target.model.generate(
            torch.tensor([asked.ids]), max_new_tokens=24, do_sample=False, pad_token_id=0
        )
        assert found.ids == wanted[0].tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_answer_does_not_depend_on_its_batch(target, temperature):
    asked = prompts(6)
    together = answers(target, asked, temperature)
    for order in ([3], [5, 0], [4, 3, 2, 1, 0]):
        apart = answers(target, [asked[i] for i in order], temperature)
        assert apart == [together[i] for i in order]


def test_the_seed_decides_the_sample(target):
    asked = prompts(4)
    assert answers(target, asked, 0.8, seed=1) == answers(target, asked, 0.8, seed=1)
    assert answers(target, asked, 0.8, seed=1) != answers(target, asked, 0.8, seed=2)


def test_every_step_draws_anew():
    model = toy_target()
    with torch.no_grad():
        model.lm_head.weight.zero_()  # every token is as likely as any other, at every step
    (found,) = answers(TargetModel(model), prompts(1), 1.0, stop_ids=())
    assert len(set(found.ids[-24:])) > 15


def test_two_prompts_of_one_text_draw_alike_and_others_do_not(target):
    same = [Prompt("a", [1, 2, 3]), Prompt("b", [1, 2, 3]), Prompt("c", [1, 2, 4])]
    first, second, third = answers(target, same, 1.0)
    assert first.ids == second.ids
    assert first.ids[3:] != third.ids[3:]


def test_the_span_is_the_answer_up_to_its_stop_token(target):
    asked = prompts(4)
    free = answers(target, asked, 0.0, stop_ids=())
    stop = free[0].ids[len(asked[0].ids) + 5]
    for prompt, example in zip(asked, answers(target, asked, 0.0, stop_ids=(stop,)), strict=True):
        ((start, end),) = example.spans
        assert example.ids[:start] == prompt.ids
        assert end == len(example.ids) <= start + 24
        assert stop not in example.ids[start : end - 1]
        assert example.ids[end - 1] == stop or end == start + 24
    assert (free[0].source, answers(target, asked[:1], 0.7)[0].source) == (
        "target-greedy",
        "target-0.7",
    )


def test_a_plan_answers_everything_once_in_batches_of_like_length():
    asked = prompts(50)
    batches = list(plan(asked, 4, 3))
    assert sorted(p.id for batch in batches for p in batch) == sorted(p.id for p in asked)
    assert all(len(batch) <= 4 for batch in batches)
    lengths = [[len(p.ids) for p in batch] for batch in batches[:3]]
    flat = [n for batch in lengths for n in batch]
    assert flat == sorted(flat)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


CONVERSATIONS = [
    Conversation("a", [user("one"), assistant("published"), user("two")]),
    Conversation("b", [user("one"), assistant("x"), user("three")]),  # the same question again
    Conversation("c", [user("only")]),
    Conversation("d", [user("long " * 40), assistant(""), user("four")]),
]


def test_opening_questions_are_distinct_and_short_enough():
    tokenizer = toy_tokenizer()
    found = first_prompts(CONVERSATIONS, tokenizer, 150)
    assert [p.id for p in found] == ["a", "c"]
    text = tokenizer.apply_chat_template([user("one")], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(found[0].ids) == text


def test_second_questions_follow_the_targets_own_answers():
    tokenizer = toy_tokenizer()
    written = tokenizer(" <think>hm</think>mine<|im_end|>", add_special_tokens=False).input_ids
    answers = {
        "a": Example("a", "target-greedy", [9, 9, *written], [(2, 2 + len(written))]),
        "c": Example("c", "target-greedy", [9, *written], [(1, 1 + len(written))]),
    }
    (found,) = second_prompts(CONVERSATIONS, answers, tokenizer, 200)
    assert found.id == "a#2"
    text = tokenizer.apply_chat_template(
        [user("one"), assistant("mine"), user("two")], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(found.ids) == text
    assert second_prompts(CONVERSATIONS, answers, tokenizer, 20) == []


def test_an_answer_of_a_stop_token_alone_has_no_second_question():
    answers = {"a": Example("a", "target-greedy", [9, STOP], [(1, 2)])}
    assert second_prompts(CONVERSATIONS, answers, toy_tokenizer(), 200) == []
