"""Machine code: the model's own answers, made once, refused in one line where it cannot be."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import rig
import torch
from transformers.models.llama.modeling_llama import LlamaModel

from eagle_dropmatch import compiled
from eagle_dropmatch.acceptors import make_acceptor
from eagle_dropmatch.decoder import SpeculativeDecoder
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.target import TargetModel


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EAGLE_DROPMATCH_CACHE", str(tmp_path))
    # Kernels are tried out over the real pair's sizes; here that would only cost time.
    monkeypatch.setitem(compiled._SETTINGS, "max_autotune", False)
    return tmp_path / "compiled"


@rig.needs_compiler
@pytest.mark.parametrize("family", ["qwen3"])  # has all that Llama has, and norms of its heads
def test_answers_are_transformers_own_and_the_second_time_nothing_is_made(
    family: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = rig.tiny_model(family)
    plain = rig.tiny_target(family)
    draft = rig.tiny_draft(plain)

    def decoder() -> SpeculativeDecoder:
        target, network = TargetModel(model, rig.TAPS, compile=True), copy.deepcopy(draft)
        network.borrow_embedding(model.get_input_embeddings())
        network.compile_layer()
        assert target.modules == "compiled"
        return rig.decoder(target, rig.eagle3(network), (24, 4, 6), make_acceptor("exact"))

    first = decoder()
    monkeypatch.setattr(compiled, "_make", lambda *_: pytest.fail("made again"))
    second = decoder()
    assert sorted(path.name.split("-")[0] for path in cache.iterdir()) == ["draft", "target"]

    wanted = rig.decoder(plain, rig.eagle3(draft), (24, 4, 6), make_acceptor("exact"))
    for lengths in ((9,), (7, 12)):  # one row, and rows whose slots differ
        prompts = rig.prompts(*lengths)
        tokens, mask = rig.padded(prompts)
        outs = [
            each.generate(tokens, mask, max_new_tokens=40, return_dict_in_generate=True)
            for each in (first, second, wanted)
        ]
        for row, prompt in enumerate(prompts):
            for out in outs:
                assert out.sequences[row, -40:].tolist() == rig.greedy(model, prompt, 40)
        # The same trees, too: taps and draft are right, not only what the target verifies.
        lengths_of = [[row.accept_lengths for row in out.stats.rows] for out in outs]
        assert lengths_of[0] == lengths_of[1] == lengths_of[2]
        assert max(max(each) for each in lengths_of[0]) > 1


@rig.needs_compiler
def test_other_weights_and_other_taps_are_other_files(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "_make", lambda path, *_: path.touch())
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path: path)
    for seed, taps in ((0, None), (1, None), (0, (0,)), (0, None)):
        TargetModel(rig.tiny_model(layers=1, seed=seed), taps, compile=True)
    assert len(list(cache.iterdir())) == 3


@rig.needs_compiler
def test_a_damaged_file_is_made_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def make(path: Path, *_: Any) -> None:
        path.write_text("whole")
        made.append(path)

    monkeypatch.setattr(compiled, "_make", make)

    def read(path: str) -> str:
        if Path(path).read_text() != "whole":
            raise RuntimeError("not an archive")
        return path

    monkeypatch.setattr(torch._inductor, "aoti_load_package", read)
    model = rig.tiny_model(layers=1)
    TargetModel(model, compile=True)
    made[0].write_text("half")
    TargetModel(model, compile=True)
    TargetModel(model, compile=True)
    assert made == [made[0]] * 2


class OddModel(LlamaModel):
    """As in Gemma: embeddings are scaled."""

    def forward(self, input_ids: Any = None, **given: Any) -> Any:
        return super().forward(inputs_embeds=8.0 * self.embed_tokens(input_ids), **given)


@rig.needs_compiler
def test_another_layout_is_refused_in_one_line(cache: Path) -> None:
    model = rig.tiny_model(layers=1)
    model.model.__class__ = OddModel
    with pytest.raises(UserError, match="laid out like Llama's") as caught:
        TargetModel(model, compile=True)
    assert "\n" not in str(caught.value)
    assert not list(cache.iterdir())  # nothing half made is left


@pytest.mark.usefixtures("cache")
def test_no_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler") as caught:
        TargetModel(rig.tiny_model(layers=1), compile=True)
    assert "\n" not in str(caught.value)


def test_what_lies_not_on_a_cpu_is_refused_before_anything_is_made(
    reference_target_dir: Any,
) -> None:
    with pytest.raises(UserError, match="whole on a CPU"):
        SpeculativeDecoder.from_pretrained(dtype="float16", compile=True)
