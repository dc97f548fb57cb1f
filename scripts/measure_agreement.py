#!/usr/bin/env python
"""How often dropout heads agree with the clean head, over p_drop and over head_agreement.

The target answers a sample of MT-Bench's first turns greedily, without a draft; K heads vote at
every position. The table is what the default of --head-agreement was chosen from.

  python scripts/measure_agreement.py --output-dir results/agreement
  python scripts/measure_agreement.py --target meta-llama/Llama-3.1-8B-Instruct --device-map cuda
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from eagle_dropmatch import cli
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.evals import MTBench
from eagle_dropmatch.evals.base import select
from eagle_dropmatch.evals.chat import ChatSettings, render
from eagle_dropmatch.files import write_text


def main(argv: Sequence[str]) -> int:
    parser = cli.Parser(description=str(__doc__))
    parser.add_argument("--target", metavar="MODEL", help="folder or hub id (default: reference)")
    parser.add_argument("--device-map", metavar="MAP", help="as in transformers: cpu, cuda:0, auto")
    parser.add_argument("--questions", type=Path, metavar="FILE", help="FastChat jsonl")
    parser.add_argument("--limit", type=cli.limit, default=20, metavar="N", help="default 20")
    parser.add_argument("--max-new-tokens", type=cli.integer(1), default=64, metavar="N")
    parser.add_argument("--heads", type=cli.integer(1), default=5, metavar="K")
    parser.add_argument("--seed", type=cli.integer(0), default=0)
    parser.add_argument(
        "--p-drop",
        type=cli.drop_probability,
        nargs="*",
        default=[0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3],
        metavar="P",
    )
    parser.add_argument(
        "--head-agreement", type=cli.share, nargs="*", default=[0.5, 0.6, 0.7, 0.8, 0.9, 0.95]
    )
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="agreement.md and .json")
    args = parser.parse_args(argv)
    if "auto" in args.p_drop:
        raise UserError("--p-drop auto: name the shares to solve for with --head-agreement")
    benchmark = MTBench()
    questions = select(benchmark.load(args.questions), limit=args.limit)

    cli.silence_transformers()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from eagle_dropmatch.assets import reference_target
    from eagle_dropmatch.settings import stop_token_ids
    from eagle_dropmatch.studies.agreement import Setting, markdown, measure
    from eagle_dropmatch.target import TargetModel

    source = args.target or reference_target()
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", device_map=args.device_map)
    tokenizer = AutoTokenizer.from_pretrained(source)
    rows = measure(
        TargetModel(model),
        [
            render(tokenizer, benchmark.prompt(question, 0, []), ChatSettings()).ids
            for question in questions
        ],
        [Setting(p_drop=p) for p in args.p_drop]
        + [Setting(head_agreement=share) for share in args.head_agreement],
        heads=args.heads,
        max_new_tokens=args.max_new_tokens,
        stop_ids=stop_token_ids(model.generation_config, tokenizer),
        seed=args.seed,
    )
    text = markdown(
        rows,
        [
            f"First turns of {len(questions)} MT-Bench questions, {args.max_new_tokens} new tokens "
            f"each, greedy, K = {args.heads}, target {args.target or 'reference'}, "
            f"{str(model.dtype).removeprefix('torch.')}.",
        ],
    )
    print(text, end="")
    if args.output_dir is not None:
        args.output_dir.mkdir(parents=True, exist_ok=True)
        command = f"python scripts/measure_agreement.py {' '.join(argv)}"
        write_text(args.output_dir / "agreement.md", f"`{command}`\n\n{text}")
        data = {"command": command, "rows": [asdict(row) for row in rows]}
        write_text(args.output_dir / "agreement.json", json.dumps(data, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run_command(main))
