"""Checks of ``checkqueue``: findings about the database and the queue, each with a remedy."""
