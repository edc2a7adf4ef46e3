"""Schedules side by side on one workload: strategies, baselines, bounds, figures, plots."""
