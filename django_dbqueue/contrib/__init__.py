"""What is ready-made on top of the queue."""
