"""Ideas for better baselines, compared on equal streams (benchmarks/baseline_study.py)."""
