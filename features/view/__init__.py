"""A local web page about a run, a sweep or a dataset (README.md)."""
