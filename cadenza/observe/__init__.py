"""Observation: events, metrics, plots."""
