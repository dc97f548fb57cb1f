"""Benchmarks, the runner that compares decoders on them, and the statistics of the comparison."""

from __future__ import annotations

from .base import Benchmark, Question
from .gsm8k import GSM8K
from .komtbench import KoMTBench
from .mtbench import MTBench

BENCHMARKS: dict[str, type[Benchmark]] = {each.name: each for each in (MTBench, KoMTBench, GSM8K)}
"""Name -> class of every benchmark."""

__all__ = ["BENCHMARKS", "GSM8K", "Benchmark", "KoMTBench", "MTBench", "Question"]
