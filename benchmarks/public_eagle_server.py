#!/usr/bin/env python
"""EAGLE-3 of AngelSlim, answering prompts one by one: the other side of public_eagle.py.

It needs other versions than this project, so it runs under a Python of its own and imports nothing
from here. One JSON object a line comes in, {"ids": [...], "max_new_tokens": n, "draft": bool}, and
one goes out, {"ids": [...], "accepted": [...], "seconds": s}.

  python public_eagle_server.py '{"target": ..., "draft": ..., "tree": [60, 7, 10], ...}'
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def readable_target(folder: Path, into: Path) -> Path:
    """The target's folder with what earlier versions of transformers expect to find there."""
    from safetensors import safe_open

    for file in folder.iterdir():
        (into / file.name).symlink_to(file.resolve())

    def rewrite(name: str, **changes: object) -> None:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        (into / name).unlink()
        (into / name).write_text(json.dumps({**content, **changes}), encoding="utf-8")

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "rope_theta" not in config:
        rotation = config["rope_parameters"]
        if rotation.get("rope_type", "default") != "default":
            raise SystemExit(f"{folder}: AngelSlim reads no rotation of {rotation}")
        rewrite("config.json", rope_theta=rotation["rope_theta"], rope_scaling=None)
    rewrite("tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    if not (into / "model.safetensors.index.json").exists():
        # Its draft looks its embedding up through an index.
        with safe_open(folder / "model.safetensors", "pt") as weights:
            lies = dict.fromkeys(weights.keys(), "model.safetensors")
        index = json.dumps({"weight_map": lies})
        (into / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    return into


def mend_scores(draft: Any) -> None:
    """Score a level's nodes by their own probabilities, as EAGLE does.

    AngelSlim up to 0.5.0 takes those of the level's first node for all, which makes other trees.
    """
    import torch

    def best_tokens(hidden: Any) -> tuple[Any, Any]:
        logits = draft.lm_head(draft.norm(hidden))
        best = torch.topk(draft.logsoftmax(logits), draft.top_k, dim=-1)
        return best.indices, best.values if len(hidden) > 1 else best.values[0]

    draft._get_topk_tokens = best_tokens


def main() -> None:
    # What libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    import transformers
    from angelslim.compressor.speculative.inference.models import Eagle3Model

    transformers.logging.set_verbosity_error()
    asked = json.loads(sys.argv[1])
    total_token, depth, top_k = asked["tree"]
    with tempfile.TemporaryDirectory() as folder:
        target = asked["target"]
        if Path(target).is_dir():
            target = str(readable_target(Path(target), Path(folder)))
        model = Eagle3Model.from_pretrained(
            target,
            asked["draft"],
            total_token=total_token,
            depth=depth,
            top_k=top_k,
            dtype=getattr(torch, asked["dtype"]),
        )
    if asked["mend_scores"]:
        mend_scores(model.eagle_layer)
    torch.set_num_threads(asked["threads"])

    def reply(content: object) -> None:
        print(json.dumps(content), file=answers, flush=True)

    reply({"torch": torch.__version__, "transformers": transformers.__version__})
    for line in sys.stdin:
        task = json.loads(line)
        ids = torch.tensor([task["ids"]])
        decode = model.eagle_generate if task["draft"] else model.naive_generate
        began = time.perf_counter()
        with torch.inference_mode():
            found = decode(ids, max_new_tokens=task["max_new_tokens"], log=True)
        seconds = time.perf_counter() - began
        new = found[0][0, ids.shape[1] :].tolist()
        accepted = found[3] if task["draft"] else [0] * len(new)
        reply({"ids": new, "accepted": accepted, "seconds": seconds})


if __name__ == "__main__":
    main()
