"""``generate`` takes and gives what transformers' own does."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import rig
import torch
from transformers import GenerationConfig, TextStreamer

from eagle_dropmatch.decoder import GenerateOutput, SpeculativeDecoder
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.target import TargetModel

LEVELS = 4


@pytest.fixture
def model_config(target: TargetModel) -> Iterator[GenerationConfig]:
    """The model's own generation config, put back afterwards."""
    kept = target.model.generation_config
    target.model.generation_config = copy.deepcopy(kept)
    yield target.model.generation_config
    target.model.generation_config = kept


@pytest.fixture
def decoder(target: TargetModel, answers: list[list[int]]) -> SpeculativeDecoder:
    """A decoder for the first prompt alone: its drafter knows that answer."""
    return rig.decoder(target, rig.oracle(answers[:1], LEVELS))


def place_of_a_new_token(answer: list[int], at: int) -> int:
    return next(i for i in range(at, len(answer)) if answer[i] not in answer[:i])


def test_ids_come_back_with_the_prompt_in_front(
    decoder: SpeculativeDecoder, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    out = decoder.generate(rig.ids(prompts[0]), max_new_tokens=6)
    assert isinstance(out, torch.Tensor)
    assert out.dtype == torch.int64
    assert out.tolist() == [prompts[0] + answers[0][:6]]


def test_a_dict_holds_sequences_and_the_record(
    decoder: SpeculativeDecoder, prompts: list[list[int]]
) -> None:
    plain = decoder.generate(rig.ids(prompts[0]), max_new_tokens=11)
    out = decoder.generate(rig.ids(prompts[0]), max_new_tokens=11, return_dict_in_generate=True)
    assert isinstance(out, GenerateOutput)
    assert torch.equal(out.sequences, plain)
    assert (out.stats.num_steps, out.stats.tau) == (2, 5.0)
    assert out.stats.histogram == [0, 0, 0, 0, 2]
    assert out.stats.prefill_seconds > 0
    assert out.stats.decode_seconds > 0


@pytest.mark.parametrize("pad", [None, 7])
def test_ended_rows_are_padded_on_the_right(
    target: TargetModel, prompts: list[list[int]], answers: list[list[int]], pad: int | None
) -> None:
    decoder = rig.decoder(target, rig.oracle(answers[:2], LEVELS))
    place = place_of_a_new_token(answers[0], 4)
    stop = answers[0][place]
    never = next(i for i in range(rig.VOCAB) if i not in answers[0] + answers[1])
    later = answers[1].index(stop) if stop in answers[1] else len(answers[1])
    assert later > place, "the second row must outlive the first"
    settings = GenerationConfig(eos_token_id=[stop, never], pad_token_id=pad, max_new_tokens=20)
    tokens, mask = rig.padded(prompts[:2])
    out = decoder.generate(tokens, mask, settings)
    assert isinstance(out, torch.Tensor)
    count = min(20, later + 1)
    assert out.shape == (2, tokens.shape[1] + count)
    filled = [stop if pad is None else pad] * (count - place - 1)
    assert out[0, tokens.shape[1] :].tolist() == answers[0][: place + 1] + filled
    assert out[1, tokens.shape[1] :].tolist() == answers[1][:count]


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_without_any_limit_there_are_twenty_new_tokens(
    decoder: SpeculativeDecoder, target: TargetModel, prompts: list[list[int]]
) -> None:
    ours = decoder.generate(rig.ids(prompts[0]))
    theirs = target.model.generate(rig.ids(prompts[0]), do_sample=False, pad_token_id=0)
    assert ours.tolist() == theirs.tolist()
    assert ours.shape[1] == len(prompts[0]) + 20


@pytest.mark.parametrize("length", [12, 20, 30])
def test_max_length_counts_the_prompt(
    decoder: SpeculativeDecoder, target: TargetModel, prompts: list[list[int]], length: int
) -> None:
    settings = GenerationConfig(max_length=length, do_sample=False)
    ours = decoder.generate(rig.ids(prompts[0]), generation_config=settings)
    theirs = target.model.generate(rig.ids(prompts[0]), generation_config=settings, pad_token_id=0)
    assert ours.shape[1] == length
    assert ours.tolist() == theirs.tolist()


def test_an_argument_wins_over_a_given_config_and_that_over_the_models(
    decoder: SpeculativeDecoder, prompts: list[list[int]], model_config: GenerationConfig
) -> None:
    model_config.max_new_tokens = 3
    prompt, size = rig.ids(prompts[0]), len(prompts[0])
    given = GenerationConfig(max_new_tokens=5)
    assert decoder.generate(prompt).shape[1] == size + 3
    assert decoder.generate(prompt, generation_config=given).shape[1] == size + 5
    assert decoder.generate(prompt, generation_config=given, max_new_tokens=4).shape[1] == size + 4


def test_what_a_given_config_leaves_open_comes_from_the_models(
    decoder: SpeculativeDecoder,
    target: TargetModel,
    prompts: list[list[int]],
    answers: list[list[int]],
    model_config: GenerationConfig,
) -> None:
    place = place_of_a_new_token(answers[0], 3)
    model_config.eos_token_id = [rig.VOCAB - 1, answers[0][place]]
    model_config.pad_token_id = 0
    prompt, given = rig.ids(prompts[0]), GenerationConfig(max_new_tokens=place + 8)
    ours = decoder.generate(prompt, generation_config=given)
    theirs = target.model.generate(prompt, generation_config=given, do_sample=False)
    assert ours.tolist() == theirs.tolist()
    assert ours[0, len(prompts[0]) :].tolist() == answers[0][: place + 1]


def test_the_models_stop_tokens_hold_by_default_and_give_way_to_the_arguments(
    decoder: SpeculativeDecoder,
    prompts: list[list[int]],
    answers: list[list[int]],
    model_config: GenerationConfig,
) -> None:
    early = place_of_a_new_token(answers[0], 2)
    late = place_of_a_new_token(answers[0], early + 1)
    model_config.eos_token_id = answers[0][early]
    prompt, size = rig.ids(prompts[0]), len(prompts[0])
    assert decoder.generate(prompt, max_new_tokens=30).shape[1] == size + early + 1
    out = decoder.generate(prompt, max_new_tokens=30, eos_token_id=answers[0][late])
    assert out.shape[1] == size + late + 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 4),
        ("num_return_sequences", 2),
        ("no_repeat_ngram_size", 3),
        ("min_new_tokens", 5),
        ("max_time", 1.0),
        ("stop_strings", ["a"]),
        ("suppress_tokens", [3]),
        ("output_scores", True),
    ],
)
def test_what_is_not_followed_is_refused_if_asked_for_and_named_if_the_model_asks(
    decoder: SpeculativeDecoder,
    prompts: list[list[int]],
    answers: list[list[int]],
    model_config: GenerationConfig,
    name: str,
    value: Any,
) -> None:
    prompt = rig.ids(prompts[0])
    given = GenerationConfig(max_new_tokens=3)
    setattr(given, name, value)
    refused(lambda: decoder.generate(prompt, generation_config=given), f"{name}=")
    refused(lambda: decoder.generate(prompt, **{name: value}), f"{name}=")
    setattr(model_config, name, value)
    with pytest.warns(UserWarning, match=f"{name}="):
        out = decoder.generate(prompt, max_new_tokens=3)
    assert out[0, -3:].tolist() == answers[0][:3]


def test_a_model_that_samples_by_default_is_decoded_greedily_all_the_same(
    decoder: SpeculativeDecoder,
    prompts: list[list[int]],
    answers: list[list[int]],
    model_config: GenerationConfig,
) -> None:
    model_config.do_sample, model_config.temperature = True, 1.5
    out = decoder.generate(rig.ids(prompts[0]), max_new_tokens=8)
    assert out[0, -8:].tolist() == answers[0][:8]


@pytest.mark.parametrize(
    "neutral",
    [
        {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0},
        {"pad_token_id": 3, "use_cache": True, "top_p": 1.0},
    ],
)
def test_fields_that_change_nothing_are_taken_as_keywords(
    decoder: SpeculativeDecoder,
    prompts: list[list[int]],
    answers: list[list[int]],
    neutral: dict[str, Any],
) -> None:
    out = decoder.generate(rig.ids(prompts[0]), max_new_tokens=3, **neutral)
    assert out[0, -3:].tolist() == answers[0][:3]


def test_an_argument_that_does_not_exist_is_named(
    decoder: SpeculativeDecoder, prompts: list[list[int]]
) -> None:
    refused(lambda: decoder.generate(rig.ids(prompts[0]), max_tokens=3), "max_tokens")


def test_a_given_config_may_ask_for_the_record(
    decoder: SpeculativeDecoder, prompts: list[list[int]]
) -> None:
    given = GenerationConfig(max_new_tokens=3, return_dict_in_generate=True)
    assert isinstance(decoder.generate(rig.ids(prompts[0]), None, given), GenerateOutput)
    out = decoder.generate(rig.ids(prompts[0]), None, given, return_dict_in_generate=False)
    assert isinstance(out, torch.Tensor)


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.puts: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        assert self.ended == 0
        assert value.device.type == "cpu"
        self.puts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_gets_the_prompt_then_every_token_once_run_by_run(
    decoder: SpeculativeDecoder, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    streamer = Recorder()
    decoder.generate(rig.ids(prompts[0]), max_new_tokens=13, streamer=streamer)
    known = answers[0]
    assert streamer.puts == [prompts[0], known[:1], known[1:6], known[6:11], known[11:13]]
    assert streamer.ended == 1


def test_a_streamer_never_sees_what_a_stop_token_cut_off(
    decoder: SpeculativeDecoder, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    place = place_of_a_new_token(answers[0], 2)
    streamer = Recorder()
    decoder.generate(
        rig.ids(prompts[0]), max_new_tokens=30, eos_token_id=answers[0][place], streamer=streamer
    )
    assert list(chain(*streamer.puts[1:])) == answers[0][: place + 1]
    assert streamer.ended == 1


def test_a_text_streamer_prints_exactly_the_answers_text(
    decoder: SpeculativeDecoder,
    prompts: list[list[int]],
    answers: list[list[int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Words:
        def decode(self, tokens: list[int], **_: Any) -> str:
            return " ".join(f"w{token}" for token in tokens)

    streamer = TextStreamer(Words(), skip_prompt=True)
    decoder.generate(rig.ids(prompts[0]), max_new_tokens=18, streamer=streamer)
    assert capsys.readouterr().out == Words().decode(answers[0][:18]) + "\n"


def test_a_streamer_takes_one_row_only(target: TargetModel, prompts: list[list[int]]) -> None:
    decoder = rig.decoder(target, rig.oracle([[0], [0]], LEVELS))
    tokens, mask = rig.padded(prompts[:2])
    refused(lambda: decoder.generate(tokens, mask, streamer=Recorder()), "streamer", "batch of 2")


@pytest.mark.parametrize(
    ("tokens", "mask", "part"),
    [
        (torch.zeros(3, dtype=torch.int64), None, "input_ids"),
        (torch.zeros(1, 0, dtype=torch.int64), None, "input_ids"),
        (torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, 4), "attention_mask"),
        (torch.zeros(2, 3, dtype=torch.int64), torch.tensor([[1, 1, 1], [0, 0, 0]]), "zeros"),
    ],
)
def test_inputs_of_the_wrong_shape_are_refused(
    decoder: SpeculativeDecoder, tokens: torch.Tensor, mask: torch.Tensor | None, part: str
) -> None:
    refused(lambda: decoder.generate(tokens, mask), part)


def refused(action: Any, *parts: str) -> None:
    """The action is refused in one line that holds all the parts."""
    with pytest.raises(UserError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message
