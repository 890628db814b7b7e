"""Writes the tables and plots of docs/benchmarks.md from files of figures. Its prose is written by hand."""
