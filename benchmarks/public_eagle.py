#!/usr/bin/env python
"""EAGLE-3 as it is published, on the same weights, prompts and machine, beside ours.

EAGLE's own repository is no package. AngelSlim carries its trees, caches and models on, can be
installed, and runs on a CPU; but with versions of transformers that this project does not take, so
it gets a Python of its own:

  python -m venv angelslim && angelslim/bin/pip install angelslim==0.2.2
  python benchmarks/public_eagle.py --python angelslim/bin/python --compile

First turns of MT-Bench, greedily; at each prompt every arm answers in turn, one process waiting
while the other works. Both draw the same trees, ours also ones of a chosen size.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from eagle_dropmatch import cli
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.evals import first_turns
from eagle_dropmatch.evals.statistics import paired_ratio, ratio, require_scipy
from eagle_dropmatch.evals.table import inline, table_lines
from eagle_dropmatch.files import check_writable, write_text

SERVER = Path(__file__).with_name("public_eagle_server.py")


class Answer(NamedTuple):
    ids: list[int]
    accepted: list[int]
    """Draft tokens kept, for each step."""
    seconds: float

    @property
    def committed(self) -> float:
        return float(sum(self.accepted) + len(self.accepted))


class Server:
    """The other implementation, in its own process.

    Args:
        said: what the process writes to stderr.
    """

    def __init__(self, process: subprocess.Popen[str], said: IO[str]) -> None:
        self._process, self._said = process, said
        self.versions = self._read()

    def answer(self, prompt: Sequence[int], max_new_tokens: int, *, draft: bool) -> Answer:
        task = {"ids": list(prompt), "max_new_tokens": max_new_tokens, "draft": draft}
        assert self._process.stdin is not None
        print(json.dumps(task), file=self._process.stdin, flush=True)
        return Answer(**self._read())

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._said.seek(0)
            said = self._said.read().strip().splitlines() or ["nothing"]
            raise UserError(f"the published EAGLE-3 ended; the last that it said: {said[-1]}")
        return json.loads(line)


@contextmanager
def serving(python: str, settings: dict[str, Any]) -> Iterator[Server]:
    # Errors go to a file: a pipe that nobody reads would stop it once enough warnings are in it.
    with tempfile.TemporaryFile("w+") as said:
        try:
            process = subprocess.Popen(
                [python, str(SERVER), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )
        except OSError as error:
            raise UserError(f"--python {python} cannot be run ({error.strerror})") from None
        try:
            yield Server(process, said)
        finally:
            process.kill()
            process.wait()


def ours(
    decoder: Any, prompt: Sequence[int], max_new_tokens: int, *, draft: bool, adaptive: bool
) -> Answer:
    import torch

    decoder.adaptive = adaptive
    ids = torch.tensor([list(prompt)])
    began = time.perf_counter()
    out = decoder.generate(
        ids,
        max_new_tokens=max_new_tokens,
        repetition_penalty=1.0,
        return_dict_in_generate=True,
        draft=draft,
    )
    seconds = time.perf_counter() - began
    # Our lengths count the bonus token.
    accepted = [length - 1 for length in out.stats.accept_lengths]
    return Answer(out.sequences[0, ids.shape[1] :].tolist(), accepted, seconds)


def agree(ours: Sequence[int], theirs: Sequence[int]) -> bool:
    """Whether both are equal as far as both go."""
    return all(a == b for a, b in zip(ours, theirs, strict=False))


def table(answers: dict[str, list[Answer]], base: dict[str, str]) -> list[str]:
    """A line an arm; ``base`` names the published arm that each is held against."""
    body = []
    for arm, given in answers.items():
        tokens = [float(len(each.ids)) for each in given]
        seconds = [each.seconds for each in given]
        steps = [float(len(each.accepted)) for each in given]
        tau = ratio([each.committed for each in given], steps)
        row = [arm, inline(tau, 2), f"{sum(tokens) / sum(seconds):.1f}"]
        if base[arm] == arm:
            row += ["1", "", ""]
        else:
            theirs = answers[base[arm]]
            counts = [float(len(each.ids)) for each in theirs]
            faster = paired_ratio(tokens, seconds, counts, [each.seconds for each in theirs])
            pairs = list(zip(given, theirs, strict=True))
            same = sum(agree(x.ids, y.ids) for x, y in pairs)
            # The limit cuts our last step, and theirs goes on behind it.
            alike = sum(agree(x.accepted[:-1], y.accepted) for x, y in pairs)
            row += [inline(faster, 2), f"{same} of {len(pairs)}", f"{alike} of {len(pairs)}"]
        body.append(row)
    columns = ["", "tau", "tokens/s", "tokens/s over the published", "same answers", "same steps"]
    return table_lines(columns, body)


def main(argv: Sequence[str]) -> int:
    parser = cli.Parser(description=str(__doc__))
    first_turns.add_arguments(parser)
    parser.add_argument(
        "--python", required=True, metavar="PATH", help="a Python that has AngelSlim"
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--compile", action="store_true", help="run ours as machine code")
    parser.add_argument(
        "--as-published",
        action="store_true",
        help="leave AngelSlim's scores of nodes as they are; by default they are made EAGLE's",
    )
    parser.add_argument("--limit", type=cli.limit, default=20, metavar="N", help="questions")
    parser.add_argument("--max-new-tokens", type=cli.integer(1), default=64, metavar="N")
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="also write the table there")
    args = parser.parse_args(argv)
    questions = first_turns.questions_of(args, args.limit)
    require_scipy()
    if args.output_dir is not None:
        check_writable(args.output_dir)

    import torch
    import transformers
    from tqdm import tqdm

    from eagle_dropmatch.assets import reference_draft, reference_target

    decoder, prompts = first_turns.load(args, questions, dtype=args.dtype, compile=args.compile)
    tree = decoder.tree
    settings = {
        "target": str(args.target or reference_target()),
        "draft": str(args.draft or reference_draft()),
        "tree": (tree.total_token, tree.depth, tree.top_k),
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
        "mend_scores": not args.as_published,
    }
    shape = "/".join(map(str, settings["tree"]))
    plain, drawn = "published, plain", f"published, trees {shape}"
    base = {
        plain: plain,
        drawn: drawn,
        "ours, plain": plain,
        f"ours, trees {shape}": drawn,
        "ours, trees of a chosen size": drawn,
    }
    decoder.time_steps()
    answers: dict[str, list[Answer]] = {arm: [] for arm in base}
    most = args.max_new_tokens
    with serving(args.python, settings) as published:
        asked = tqdm([prompts[0], *prompts], unit="question", dynamic_ncols=True)
        for number, prompt in enumerate(asked):
            turn = (
                published.answer(prompt, most, draft=False),
                published.answer(prompt, most, draft=True),
                ours(decoder, prompt, most, draft=False, adaptive=False),
                ours(decoder, prompt, most, draft=True, adaptive=False),
                ours(decoder, prompt, most, draft=True, adaptive=True),
            )
            if number:  # The first answers warm both up.
                for given, answer in zip(answers.values(), turn, strict=True):
                    given.append(answer)
    theirs = published.versions
    text = "\n".join(
        [
            f"`{' '.join(['python benchmarks/public_eagle.py', *argv])}`",
            "",
            f"First turns of {len(prompts)} MT-Bench questions, {args.max_new_tokens} new tokens, "
            f"{args.dtype}, {settings['threads']} threads. Ours: {decoder.target.modules} modules, "
            f"torch {torch.__version__}, transformers {transformers.__version__}; the published: "
            f"AngelSlim, nodes scored as {'it does' if args.as_published else 'EAGLE does'}, torch "
            f"{theirs['torch']}, transformers {theirs['transformers']}.",
            "",
            *table(answers, base),
            "",
        ]
    )
    print(text)
    if args.output_dir is not None:
        write_text(args.output_dir / "public-eagle.md", text)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run_command(main))
