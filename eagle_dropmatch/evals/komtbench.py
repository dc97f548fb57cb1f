"""KoMT-Bench (LG AI Research): MT-Bench's 80 questions rewritten for Korean."""

from __future__ import annotations

from .fastchat import FastChatBenchmark


class KoMTBench(FastChatBenchmark):
    """From the hub, or from a file."""

    name = "komt_bench"
    hub_id = "LGAI-EXAONE/KoMT-Bench"
