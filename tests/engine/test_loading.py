"""Loading a pair: what works, and every mistake as one line before weights are read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import rig
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaModel, PreTrainedTokenizerFast, ViTConfig

from eagle_dropmatch.acceptors import NaiveAcceptor
from eagle_dropmatch.decoder import SpeculativeDecoder
from eagle_dropmatch.drafts.base import ADAPTIVE_TREE, TreeShape
from eagle_dropmatch.drafts.checkpoint import save_draft
from eagle_dropmatch.drafts.eagle3 import Eagle3Draft
from eagle_dropmatch.drafts.eagle3_drafter import Eagle3Drafter
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.target import TargetModel


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory, target: TargetModel, draft: Eagle3Draft
) -> tuple[Path, Path]:
    """The tiny target and its draft as checkpoints."""
    home = tmp_path_factory.mktemp("pair")
    target.model.save_pretrained(home / "target")
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(rig.VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(home / "target")
    save_draft(draft, home / "draft")
    return home / "target", home / "draft"


def load(folders: tuple[Path, Path], **options: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained(*folders, **options)


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading weights, or looking for the reference pair, fails the test."""

    def read(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("weights were read")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", read)
    monkeypatch.setattr("eagle_dropmatch.loading.load_draft", read)
    monkeypatch.setattr("eagle_dropmatch.assets.reference_target", read)


def test_a_pair_of_checkpoints_loads_and_says_what_generate_says(
    folders: tuple[Path, Path], prompts: list[list[int]], answers: list[list[int]]
) -> None:
    decoder = load(folders, total_token=20, depth=3, top_k=4)
    assert decoder.tree == TreeShape(20, 3, 4)
    assert decoder.acceptor.name == "exact"
    assert decoder.target.dtype == torch.float32
    assert decoder.target.model.config._attn_implementation == "sdpa"
    assert decoder.tokenizer("w5 w7").input_ids == [5, 7]
    out = decoder.generate(rig.ids(prompts[0]), max_new_tokens=20)
    assert isinstance(out, torch.Tensor)
    assert out[0, len(prompts[0]) :].tolist() == answers[0][:20]


def test_options_reach_the_pair(folders: tuple[Path, Path]) -> None:
    decoder = load(
        folders,
        acceptor="naive",
        acceptor_options={"K": 3, "p_drop": 0.1},
        dtype="bfloat16",
        attn_implementation="eager",
        layer_ids=[1, 3, 6],
        rope_theta=5e4,
    )
    assert isinstance(decoder.acceptor, NaiveAcceptor)
    assert (decoder.acceptor.K, decoder.acceptor.p_drop) == (3, 0.1)
    assert decoder.target.dtype == torch.bfloat16
    assert decoder.target.model.config._attn_implementation == "eager"
    assert (decoder.tree, decoder.adaptive) == (ADAPTIVE_TREE, True)
    assert decoder.target.taps is not None
    assert decoder.target.taps.layers == (1, 3, 6)
    drafter = decoder.drafter(decoder.tree)
    assert isinstance(drafter, Eagle3Drafter)
    assert drafter.draft.dtype == torch.bfloat16
    assert drafter.draft.config.rope_parameters["rope_theta"] == 5e4


@pytest.mark.parametrize(
    ("given", "tree", "adaptive"),
    [
        ({}, ADAPTIVE_TREE, True),
        ({"tree_budget": "fixed"}, TreeShape(60, 7, 10), False),
        ({"depth": 3}, TreeShape(60, 3, 10), False),
        ({"top_k": 2, "tree_budget": "auto"}, TreeShape(64, 9, 2), True),
    ],
)
def test_trees_choose_their_size_unless_one_is_given(
    folders: tuple[Path, Path], given: dict[str, Any], tree: TreeShape, adaptive: bool
) -> None:
    decoder = load(folders, **given)
    assert (decoder.tree, decoder.adaptive) == (tree, adaptive)


def test_weights_are_copied_where_they_fit_twice_or_it_is_asked_for(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load(folders).target.modules == "fused"
    monkeypatch.setattr("os.sysconf", lambda name: 1000)  # a megabyte of memory
    assert load(folders).target.modules != "fused"
    assert load(folders, fuse=True).target.modules == "fused"


def test_an_unknown_tree_budget_is_refused(folders: tuple[Path, Path]) -> None:
    refused(lambda: load(folders, tree_budget="large"), "tree_budget 'large'", "auto or fixed")


def test_a_model_that_ignores_the_tree_mask_is_refused_while_loading(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = LlamaModel.forward

    def forget(self: Any, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return forward(self, *args, attention_mask=None, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", forget)
    refused(lambda: load(folders, fuse=False), "LlamaForCausalLM", "tree mask")
    # Exchanged modules do not go through that forward, and mind the mask.
    load(folders, fuse=True)


def test_a_ready_made_rule_is_taken_as_it_is(folders: tuple[Path, Path]) -> None:
    rule = NaiveAcceptor(K=2)
    assert load(folders, acceptor=rule).acceptor is rule


@pytest.mark.parametrize("tap", [None, 3, 8])
def test_a_draft_without_fusion_reads_one_layer_or_the_normed_last_state(
    folders: tuple[Path, Path],
    target: TargetModel,
    prompts: list[list[int]],
    answers: list[list[int]],
    tmp_path: Path,
    tap: int | None,
) -> None:
    save_draft(rig.tiny_draft(target, fuse_features=False, num_taps=1), tmp_path)
    decoder = load((folders[0], tmp_path), layer_ids=None if tap is None else [tap])
    taps = decoder.target.taps
    assert (None if taps is None else taps.layers) == (None if tap is None else (tap,))
    out = decoder.generate(rig.ids(prompts[0]), max_new_tokens=12)
    assert isinstance(out, torch.Tensor)
    assert out[0, len(prompts[0]) :].tolist() == answers[0][:12]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"acceptor": "nave"}, ("'nave'", "exact, sampling, naive")),
        ({"acceptor": "naive", "acceptor_options": {"p_drop": 1.5}}, ("p_drop is 1.5",)),
        ({"depth": -1}, ("depth is -1",)),
        ({"total_token": 0}, ("total_token is 0",)),
        ({"top_k": 0}, ("top_k is 0",)),
        ({"dtype": "float31"}, ("'float31'", "bfloat16")),
        ({"dtype": "int8"}, ("'int8'", "bfloat16")),
        ({"attn_implementation": "flash_attention_2"}, ("flash_attention_2", "sdpa or eager")),
        ({"attn_implementation": "flex_attention"}, ("flex_attention", "sdpa or eager")),
    ],
    ids=str,
)
@pytest.mark.parametrize("named", [True, False], ids=["own-pair", "reference-pair"])
def test_options_are_checked_before_anything_is_read(
    folders: tuple[Path, Path],
    no_weights: None,
    options: dict[str, Any],
    parts: tuple[str, ...],
    named: bool,
) -> None:
    pair = folders if named else (None, None)
    refused(lambda: SpeculativeDecoder.from_pretrained(*pair, **options), *parts)


@pytest.mark.parametrize("only", ["target", "draft"])
def test_half_a_pair_is_refused(folders: tuple[Path, Path], no_weights: None, only: str) -> None:
    given = {only: folders[only == "draft"]}
    refused(lambda: SpeculativeDecoder.from_pretrained(**given), "only one of target and draft")


def test_paths_that_are_no_checkpoints_are_named(
    folders: tuple[Path, Path], no_weights: None, tmp_path: Path
) -> None:
    target, draft = folders
    for bad in (tmp_path, tmp_path / "absent", "no-such-model"):
        refused(lambda bad=bad: SpeculativeDecoder.from_pretrained(bad, draft), str(bad))
        refused(lambda bad=bad: SpeculativeDecoder.from_pretrained(target, bad), str(bad))


def test_a_config_that_is_no_json_is_named(
    folders: tuple[Path, Path], no_weights: None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{")
    refused(lambda: SpeculativeDecoder.from_pretrained(tmp_path, folders[1]), str(tmp_path))


def test_a_model_that_is_no_decoder_is_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    ViTConfig(num_hidden_layers=8, hidden_size=64, vocab_size=rig.VOCAB).save_pretrained(tmp_path)
    for file in folders[0].glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    refused(lambda: SpeculativeDecoder.from_pretrained(tmp_path, folders[1]), str(tmp_path))


def test_a_folder_without_weights_is_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    copied = shutil.copytree(folders[0], tmp_path / "bare")
    (copied / "model.safetensors").unlink()
    refused(lambda: SpeculativeDecoder.from_pretrained(copied, folders[1]), str(copied))


def test_a_folder_without_a_tokenizer_is_named_before_weights_are_read(
    folders: tuple[Path, Path], no_weights: None, tmp_path: Path
) -> None:
    copied = shutil.copytree(folders[0], tmp_path / "mute")
    for file in copied.glob("tokenizer*"):
        file.unlink()
    refused(
        lambda: SpeculativeDecoder.from_pretrained(copied, folders[1]), str(copied), "tokenizer"
    )


def test_a_draft_for_another_hidden_size_is_refused(
    folders: tuple[Path, Path], no_weights: None, tmp_path: Path
) -> None:
    wide = rig.tiny_config(hidden_size=128)
    wide.save_pretrained(tmp_path)
    refused(lambda: SpeculativeDecoder.from_pretrained(tmp_path, folders[1]), "64", "128")


@pytest.mark.parametrize("layers", [2, 6])
def test_a_shallow_target_is_refused_by_naming_layer_ids(
    folders: tuple[Path, Path], no_weights: None, tmp_path: Path, layers: int
) -> None:
    rig.tiny_config(layers=layers).save_pretrained(tmp_path)
    refused(
        lambda: SpeculativeDecoder.from_pretrained(tmp_path, folders[1]),
        f"{layers} layers",
        "layer_ids",
    )


def test_a_sliding_window_target_is_refused(
    folders: tuple[Path, Path], no_weights: None, tmp_path: Path
) -> None:
    rig.tiny_config("mistral", sliding_window=16).save_pretrained(tmp_path)
    refused(lambda: SpeculativeDecoder.from_pretrained(tmp_path, folders[1]), "window of 16")


def test_taps_outside_the_target_are_refused(folders: tuple[Path, Path], no_weights: None) -> None:
    refused(lambda: load(folders, layer_ids=[2, 4, 9]), "[2, 4, 9]", "last is 8")


def refused(action: Any, *parts: str) -> None:
    """The action is refused in one line that holds all the parts."""
    with pytest.raises(UserError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message


def test_a_small_model_or_the_text_drafts_in_the_place_of_a_draft(
    folders: tuple[Path, Path], prompts: list[list[int]], answers: list[list[int]]
) -> None:
    home, _ = folders
    for options, chain in (({"draft_lm": home}, True), ({"draft_ngram": 2}, False)):
        decoder = SpeculativeDecoder.from_pretrained(
            home, **options, total_token=5, depth=3, top_k=1 if chain else 4
        )
        out = decoder.generate(rig.ids(prompts[0]), max_new_tokens=20, return_dict_in_generate=True)
        assert out.sequences[0, len(prompts[0]) :].tolist() == answers[0][:20]
        if chain:  # it drafts for itself
            assert out.stats.tau > 3


@pytest.mark.usefixtures("no_weights")
def test_drafts_that_cannot_serve_are_refused_before_weights_are_read(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    home, draft = folders
    words = Tokenizer(WordLevel({f"w{rig.VOCAB - 1 - i}": i for i in range(rig.VOCAB)}))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    refused(
        lambda: SpeculativeDecoder.from_pretrained(home, draft_lm=tmp_path),
        "another tokenizer than the target",
        "a model with the target's tokenizer",
    )
    refused(
        lambda: SpeculativeDecoder.from_pretrained(home, draft, draft_ngram=2),
        "several drafts were given",
    )
