"""Benchmarks, the runner that compares decoders on them, and the statistics of the comparison."""

from __future__ import annotations

from .base import Benchmark, Question
from .mtbench import MTBench

BENCHMARKS: dict[str, type[Benchmark]] = {"mt_bench": MTBench}
"""Name -> class of every benchmark."""

__all__ = ["BENCHMARKS", "Benchmark", "MTBench", "Question"]
