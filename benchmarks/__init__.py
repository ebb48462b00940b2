"""Measurements: each module is a program that prints a table and writes its figures under `benchmarks/results`."""
