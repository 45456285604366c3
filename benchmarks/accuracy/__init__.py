"""What every choice that rounds costs in answers: docs/results/accuracy.md.

    python -m benchmarks.accuracy                  100,000 tokens of each row: a day on two cores
    python -m benchmarks.accuracy --tokens 2048 --contexts 1024,16384

Engines of the CPU round as those of a GPU do, but for the order of f32 sums. Measured rows stay in
the results, but for those of fewer tokens: an interrupted run continues.
"""
