"""End-to-end benchmarks and their results."""
