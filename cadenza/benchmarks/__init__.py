"""Benchmarks: what the library costs, as tables for people and JSON for scripts."""
