"""What ``checkqueue`` examines: the state of the database and of the queue, with a remedy for each finding."""
