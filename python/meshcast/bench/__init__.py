"""Benchmarks of reshards: cases, methods to compare, measurement and tables. Nothing here is imported by the
rest of the package."""
