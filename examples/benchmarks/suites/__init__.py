"""The suites, one module each: `Settings`, `run(bench, settings)`, `tables(record)` and `checks(record)`."""
