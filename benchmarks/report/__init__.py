"""Tables and plots of docs/benchmarks.md, from files of figures. Its prose is not generated."""
