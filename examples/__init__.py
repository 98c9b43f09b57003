"""Scripts to copy, and benchmarks."""
