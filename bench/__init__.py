"""Scripts that measure: they write the numbers in `results/`."""
