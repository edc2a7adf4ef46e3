"""Scheduling strategies side by side on one workload: strategies, bounds, figures, plots."""
