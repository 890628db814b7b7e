"""A project that spreads the jobs of its customers over two PostgreSQL servers."""
