"""Ready-made additions on top of the queue."""
