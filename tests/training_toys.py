"""A tiny target, drafts, a tokenizer and corpora for tests of the training room."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eagle_dropmatch.drafts.eagle3 import Eagle3Config, Eagle3Draft
from eagle_dropmatch.training.corpus import Example

HIDDEN, VOCAB, LAYERS, DRAFT_VOCAB = 64, 320, 8, 200
BOS, STOP = 256, 257

CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nBe kind<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: No system prompt of its own, a start token, and nothing after the stop token.
PLAIN = (
    "<s>{% for message in messages %}{% if message['role'] == 'user' %}"
    "Q: {{ message['content'] }}\n{% else %}A: {{ message['content'] }}<|im_end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}A: {% endif %}"
)


def toy_config(**changes: Any) -> LlamaConfig:
    return LlamaConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": 96,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "initializer_range": 0.25,
            "bos_token_id": BOS,
            "eos_token_id": STOP,
            **changes,
        }
    )


def toy_target(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A random float32 target whose distributions are far from flat."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(toy_config(**changes)).eval()


def toy_draft(
    model: Any, *, size: int = DRAFT_VOCAB, seed: int = 1, map_seed: int = 1, **changes: Any
) -> Eagle3Draft:
    """A random draft over ``size`` ids of the toy target, spread over its vocabulary."""
    config = Eagle3Config(
        **{
            "hidden_size": HIDDEN,
            "target_hidden_size": HIDDEN,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": VOCAB,
            "draft_vocab_size": size,
            **changes,
        }
    )
    draft = Eagle3Draft(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in draft.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            value.copy_(1 + 0.2 * noise if "norm" in name else noise / value.shape[-1] ** 0.5)
        generator.manual_seed(map_seed)
        ids = torch.randperm(VOCAB, generator=generator)[:size].sort().values
        draft.d2t.copy_(ids - torch.arange(size))
        draft.t2d[ids] = True
    draft.borrow_embedding(model.get_input_embeddings())
    return draft


def toy_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """Bytes as tokens, and the special tokens that the templates name."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS, STOP)
    tokenizer.chat_template = template
    return tokenizer


def save_toy_target(folder: Path, template: str = CHATML) -> Path:
    """The toy target and tokenizer as a checkpoint."""
    toy_target().save_pretrained(folder)
    toy_tokenizer(template).save_pretrained(folder)
    return folder


def toy_examples(count: int, *, seed: int = 3, source: str = "target-greedy") -> list[Example]:
    """Random conversations of 20 to 40 tokens with one or two answers."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    found = []
    for i in range(count):
        length = draw(20, 41)
        # Few distinct tokens, so that there is something to learn.
        ids = torch.randint(0, 40, (length,), generator=generator).tolist()
        start, middle = draw(3, 7), draw(9, 13)
        spans = [(start, length)] if i % 2 else [(start, middle), (middle + 3, length)]
        found.append(Example(f"{source}-{seed}-{i}", source, ids, spans))
    return found


def write_corpus(path: Path, examples: Sequence[Example]) -> Path:
    path.write_text("".join(example.to_json() + "\n" for example in examples))
    return path
