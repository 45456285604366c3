"""How far results may differ: metrics, thresholds, verdicts and their report."""
