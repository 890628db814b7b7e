"""Example: jobs parse every module of Python's standard library into a search index."""
