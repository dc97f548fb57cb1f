"""A corpus from its checked arguments to its last line: the body of scripts/make_corpus.py."""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from eagle_dropmatch import cli
from eagle_dropmatch.assets import (
    REFERENCE_TARGET_HUB_ID,
    cache_dir,
    reference_target,
    sharegpt_prompts,
)
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.evals import chat
from eagle_dropmatch.evals.checkpoints import read_config
from eagle_dropmatch.settings import stop_token_ids
from eagle_dropmatch.training.corpus import Example, mostly_ascii, render
from eagle_dropmatch.training.corpus_file import CorpusFile
from eagle_dropmatch.training.corpus_options import CorpusOptions
from eagle_dropmatch.training.prompts import Conversation, read_conversations

if TYPE_CHECKING:
    from eagle_dropmatch.target import TargetModel
    from eagle_dropmatch.training.answers import Prompt

_POOL = 8  # batches within which prompts are sorted by length
_PUBLISHED_AT_ONCE = 256

Loader = Callable[[str, CorpusOptions], "TargetModel"]
"""Loads the model; tests put a small one in its place."""


def make_corpus(options: CorpusOptions, load: Loader | None = None) -> int:
    """Write a corpus, or go on with one; returns the exit code."""
    conversations = choose_conversations(options)
    if options.target is not None:
        read_config(options.target, "--target")
    target = options.target or str(reference_target())
    cli.silence_transformers()
    tokenizer = _load_tokenizer(target)
    meta = describe(options, tokenizer)
    path = options.output or default_output(meta)
    with CorpusFile(path) as corpus:
        corpus.open(meta)
        if corpus.done:
            _say(f"{path} has {len(corpus.done)} examples; going on")
        stop_ids = stop_token_ids(_generation_config(target), tokenizer)
        if options.published:
            _publish(corpus, conversations, tokenizer, stop_ids, options)
        else:
            model = (load or load_target)(target, options)
            _answer_all(corpus, conversations, tokenizer, model, stop_ids, options)
        if not corpus.done:
            raise UserError(
                f"none of {len(conversations)} conversations gave an example: no prompt has at "
                f"most {options.max_prompt_tokens} tokens (--max-prompt-tokens), or the chat "
                "template ends no answer with a stop token"
            )
        _report(path, corpus.done.values())
    return 0


def choose_conversations(options: CorpusOptions) -> list[Conversation]:
    """The conversations of a run, in an order that follows from the seed alone.

    A smaller limit takes the front of a larger one's, so that a run can be made longer.
    """
    source = options.prompts or sharegpt_prompts()
    found = read_conversations(source)
    if options.prompts is None:
        found = [c for c in found if mostly_ascii(" ".join(m["content"] for m in c.messages))]
    random.Random(options.seed).shuffle(found)
    return found[: options.limit]


def describe(options: CorpusOptions, tokenizer: Any) -> dict[str, Any]:
    """What must be equal for two runs to write into one file."""
    chat.require_chat_template(tokenizer)
    template = hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()[:16]
    target = options.target
    if target is not None and Path(target).is_dir():
        target = Path(target).resolve().name
    meta: dict[str, Any] = {
        "target": target or REFERENCE_TARGET_HUB_ID,
        "template": template,
        "seed": options.seed,
    }
    if options.prompts is not None:
        meta["prompts"] = hashlib.sha256(options.prompts.read_bytes()).hexdigest()[:16]
    if options.published:
        return {**meta, "answers": "published"}
    return {
        **meta,
        "answers": "target",
        "temperatures": list(options.temperatures),
        "max_new_tokens": options.max_new_tokens,
    }


def default_output(meta: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()[:8]
    return cache_dir() / f"corpus-{Path(meta['target']).name}-{meta['answers']}-{digest}.jsonl"


def load_target(target: str, options: CorpusOptions) -> TargetModel:
    """The model behind our engine; UserError where transformers cannot find or run it."""
    import torch
    from transformers import AutoModelForCausalLM

    from eagle_dropmatch.fused import should_fuse
    from eagle_dropmatch.loading import cpu_has_bfloat16
    from eagle_dropmatch.target import TargetModel, probe

    if str(options.device_map).startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"--device-map {options.device_map}: torch sees no CUDA device here")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    slow = options.device_map is None and not cpu_has_bfloat16()
    dtype = options.dtype or ("float32" if slow else "auto")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            target, dtype=dtype, device_map=options.device_map
        )
    except OSError as error:
        raise UserError(f"the target cannot be loaded: {str(error).splitlines()[0]}") from error
    wrapped = TargetModel(model, fuse=should_fuse(model))
    probe(wrapped)
    return wrapped


def _publish(
    corpus: CorpusFile,
    conversations: Sequence[Conversation],
    tokenizer: Any,
    stop_ids: Sequence[int],
    options: CorpusOptions,
) -> None:
    left = [each for each in conversations if each.id not in corpus.done]
    with tqdm(total=len(left), unit="conversation", dynamic_ncols=True) as bar:
        for start in range(0, len(left), _PUBLISHED_AT_ONCE):
            part = left[start : start + _PUBLISHED_AT_ONCE]
            found: list[Example] = []
            for conversation in part:
                example = render(tokenizer, conversation.messages, stop_ids)
                if example is not None:
                    found.append(replace(example, id=conversation.id))
            corpus.append(found)
            bar.update(len(part))


def _answer_all(
    corpus: CorpusFile,
    conversations: Sequence[Conversation],
    tokenizer: Any,
    model: TargetModel,
    stop_ids: tuple[int, ...],
    options: CorpusOptions,
) -> None:
    from eagle_dropmatch.training.answers import first_prompts, second_prompts

    longest = options.max_prompt_tokens
    _answer(corpus, first_prompts(conversations, tokenizer, longest), model, stop_ids, options)
    if options.turns == 2:
        prompts = second_prompts(conversations, corpus.done, tokenizer, longest)
        _answer(corpus, prompts, model, stop_ids, options)


def _answer(
    corpus: CorpusFile,
    prompts: Sequence[Prompt],
    model: TargetModel,
    stop_ids: tuple[int, ...],
    options: CorpusOptions,
) -> None:
    """Answer what is not yet answered, a batch at a time.

    The plan is made over all prompts, so a batch has its temperature whatever is done already.
    """
    from eagle_dropmatch.training.answers import answer, plan

    left = sum(prompt.id not in corpus.done for prompt in prompts)
    tokens, began = 0, time.perf_counter()
    with tqdm(total=left, unit="answer", dynamic_ncols=True) as bar:
        for number, batch in enumerate(plan(prompts, options.batch, _POOL)):
            waiting = [prompt for prompt in batch if prompt.id not in corpus.done]
            if not waiting:
                continue
            found = answer(
                model,
                waiting,
                temperature=options.temperatures[number % len(options.temperatures)],
                max_new_tokens=options.max_new_tokens,
                stop_ids=stop_ids,
                seed=options.seed,
            )
            corpus.append(found)
            tokens += sum(end - start for example in found for start, end in example.spans)
            bar.update(len(found))
            bar.set_postfix_str(f"{tokens / (time.perf_counter() - began):.0f} tokens/s")


def _load_tokenizer(target: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(target)
    except (OSError, ValueError) as error:
        raise UserError(
            f"the tokenizer of {target} cannot be loaded: {str(error).splitlines()[0]}"
        ) from error


def _generation_config(target: str) -> Any:
    """The target's generation config, or None where it has none."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(target)
    except OSError:
        return None


def _report(path: Path, examples: Iterable[Example]) -> None:
    from eagle_dropmatch.training.card import count_sources

    print(path)
    for source, number, tokens in count_sources(list(examples)):
        print(f"  {source}: {number:,} examples, {tokens:,} answer tokens")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
