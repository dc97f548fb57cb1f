"""What a call of ``generate`` asks for: transformers' generation settings, read or refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from eagle_dropmatch.errors import UserError

if TYPE_CHECKING:
    from eagle_dropmatch.sampling import Sampler

#: Fields that change what is generated and that nothing here follows, with the values at which
#: they change nothing (None, unset, is always one of them).
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0, 0.0),
    "dola_layers": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "max_time": (),
    "stop_strings": (),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": (),
    "force_words_ids": (),
    "constraints": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "sequence_bias": (),
    "guidance_scale": (1.0,),
    "watermarking_config": (),
    "token_healing": (False,),
    "prompt_lookup_num_tokens": (),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "top_h": (),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "output_scores": (False,),
    "output_logits": (False,),
}


def read_settings(given: Any, own: Any, keywords: Mapping[str, Any]) -> Any:
    """A generation config: ``keywords`` over the one that was given over the model's own.

    What a caller asks for and is not there is one error that names it. What the model's own config
    asks for and is not there is left out with a warning. Its ``do_sample`` is not followed either:
    decoding is greedy unless the caller asks for samples.

    Args:
        given: a GenerationConfig or None.
        own: the model's GenerationConfig.
        keywords: fields by name, as transformers' ``generate`` takes them.

    Raises:
        UserError: for a name that is no such field, or a field that is not followed here.
    """
    unknown = sorted(name for name in keywords if not hasattr(own, name))
    if unknown:
        raise UserError(
            f"generate() has no argument {', '.join(unknown)}: expected its own, or fields of a "
            "transformers GenerationConfig"
        )
    asked = copy.deepcopy(given) if given is not None else type(own)()
    for name, value in keywords.items():
        setattr(asked, name, value)
    refused = _departures(asked)
    if refused:
        raise UserError(
            f"{', '.join(refused)} was asked for: decoding here does not follow that; leave it out"
        )
    ignored = _departures(own)
    if ignored:
        warnings.warn(
            f"the model's own generation config asks for {', '.join(ignored)}, which is not "
            "applied here",
            stacklevel=3,
        )
    asked.do_sample = bool(asked.do_sample)
    for name, value in vars(own).items():
        if getattr(asked, name, None) is None:
            setattr(asked, name, value)
    return asked


def read_sampler(settings: Any) -> Sampler:
    """How the target chooses its tokens under ``settings``.

    Without ``do_sample`` that is its argmax. Unset fields have transformers' values: temperature 1
    and the 50 likeliest tokens.
    """
    from eagle_dropmatch.sampling import Sampler

    penalty = _value(settings, "repetition_penalty", 1.0)
    if not settings.do_sample:
        return Sampler(repetition_penalty=penalty)
    temperature = _value(settings, "temperature", 1.0)
    if temperature <= 0:
        raise UserError(
            f"temperature {temperature} was given with do_sample=True: expected a number above 0, "
            "or do_sample=False"
        )
    return Sampler(
        temperature=temperature,
        top_k=_value(settings, "top_k", 50),
        top_p=_value(settings, "top_p", 1.0),
        min_p=_value(settings, "min_p", 0.0),
        repetition_penalty=penalty,
    )


def _value(settings: Any, name: str, default: Any) -> Any:
    value = getattr(settings, name, None)
    return default if value is None else value


def _departures(config: Any) -> list[str]:
    found = []
    for name, neutral in UNSUPPORTED.items():
        value = getattr(config, name, None)
        if value is not None and value not in neutral:
            found.append(f"{name}={value!r}")
    return found


def stop_token_ids(*sources: Any) -> tuple[int, ...]:
    """Every id that ends an answer, once, in the order of the sources.

    Args:
        sources: each an id, several ids, a tensor of ids, None, or anything that has an
            ``eos_token_id`` of such a kind (a generation config, a tokenizer).
    """
    ids: list[int] = []
    for source in sources:
        found = getattr(source, "eos_token_id", source)
        if hasattr(found, "flatten"):  # a tensor, without importing torch to ask
            found = found.flatten().tolist()
        if found is not None:
            ids.extend([found] if isinstance(found, int) else found)
    return tuple(dict.fromkeys(ids))


def new_token_limit(settings: Any, prompt_length: int) -> int:
    """The most new tokens that ``settings`` allow; transformers' 20 where they say nothing."""
    limit: int | None = getattr(settings, "max_new_tokens", None)
    if limit is None:
        longest = getattr(settings, "max_length", None)
        limit = 20 if longest is None else longest - prompt_length
    if limit < 1:
        raise UserError(f"max_new_tokens is {limit}: expected at least 1")
    return limit
